"""The figures for people at a terminal: tables, bars and lines of blocks."""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from app.simulate.outcome_statistics import Summary, Waits, distribution
from app.simulate.scenario import Outcome

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Fold = Callable[[Sequence[float]], float]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_LINE = 40  # characters of a line over time
_BARS = {1: 20, 2: 20}  # characters of a bar, by the number of variants
_BAR = 8  # of more variants, so that four find room
_WITHIN_S = ((1, "1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"), (3600, "1 h"), (86_400, "1 day"))


def show(console: "Console", found: Sequence[Summary], outcomes: Sequence[Outcome]) -> None:
    """Print everything: one column for each variant."""
    for table in (_compared(found), _within(found, outcomes), _over_time(found)):
        console.print("", table)
    console.print()
    for line in _remarks(found):
        console.print(line)


def duration(seconds: float) -> str:
    """A length of time in the unit that suits it, with two digits or more."""
    number, unit = _parts(seconds)
    return f"{number} {unit}"


def duration_pair(first: float, second: float) -> str:
    """Two lengths of time, the unit said once if it is the same."""
    (number, unit), (other, its) = _parts(first), _parts(second)
    return f"{number} / {other} {unit}" if unit == its else f"{number} {unit} / {other} {its}"


def _parts(seconds: float) -> tuple[str, str]:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            number = seconds / size
            return (f"{number:.1f}" if number < 9.95 else f"{number:.0f}"), unit
    return (f"{seconds:.0f}" if seconds >= 20 or seconds == 0 else f"{seconds:.2g}"), "s"


def sparkline(values: Sequence[float | None], highest: float, width: int = _LINE, fold: Fold = max) -> str:
    """Values as a row of blocks, several of them in one by `fold`; a space where there is none."""
    step = len(values) / width
    parts = [values[int(n * step) : max(int((n + 1) * step), int(n * step) + 1)] for n in range(width)]
    known = [[it for it in part if it is not None] for part in parts]
    return "".join(_block(fold(part) if part else None, highest) for part in known)


def _block(value: float | None, highest: float) -> str:
    if value is None or highest <= 0:
        return _BLOCKS[0 if value is None else 1]
    return _BLOCKS[1 + min(int(value / highest * 8), 7)]


def _compared(found: Sequence[Summary]) -> "Table":
    """One table of all figures."""
    table = _table(("", *(figures.name for figures in found)))
    rows: dict[str, Callable[[Summary], str]] = {
        "jobs": lambda it: f"{it.waits.jobs:,}",
        "wait, mean": lambda it: duration(it.waits.mean),
        "p50": lambda it: duration(it.waits.p50),
        "p90": lambda it: duration(it.waits.p90),
        "p99": lambda it: duration(it.waits.p99),
        "longest": lambda it: duration(it.waits.longest),
        "overtaken by": lambda it: duration(it.waits.overtaken),
        "slot use": lambda it: f"{it.use:.1%}",
        "jobs per hour": lambda it: f"{it.per_hour:,.0f}",
        "Jain's index": lambda it: "-" if it.jain is None else f"{it.jain:.3f}",
    }
    for label, shown in rows.items():
        table.add_row(label, *map(shown, found))
    table.add_row()
    table.add_row("wait, p50 / p99")
    for label, waits in _groups(found):
        table.add_row(label, *(duration_pair(it.p50, it.p99) if it else "-" for it in waits))
    return table


def _groups(found: Sequence[Summary]) -> Iterator[tuple[str, list[Waits | None]]]:
    for kind in ("priorities", "models", "tenants"):
        names = sorted({name for figures in found for name in getattr(figures, kind)})
        for name in names if len(names) > 1 else ():
            label = (
                f"priority {name}" if kind == "priorities" else f"{name} tenants" if kind == "tenants" else str(name)
            )
            yield label, [getattr(figures, kind).get(name) for figures in found]


def _within(found: Sequence[Summary], outcomes: Sequence[Outcome]) -> "Table":
    """The share of jobs that started within so much time, as bars."""
    table = _table(("within", *(figures.name for figures in found)))
    bar = _BARS.get(len(found), _BAR)
    shares = [distribution(outcome.jobs, [limit for limit, _ in _WITHIN_S]) for outcome in outcomes]
    for n, (_, label) in enumerate(_WITHIN_S):
        if all(share[max(n - 1, 0)] == 1 for share in shares) and n:
            break
        table.add_row(label, *(f"{'█' * round(share[n] * bar):<{bar}} {share[n]:6.1%}" for share in shares))
    return table


def _over_time(found: Sequence[Summary]) -> "Table":
    hours = found[0].hours
    table = _table(("over time", "", f"0 to {duration(hours * 3600)}", "highest"))
    every = [figures.series for figures in found]
    worst = max((wait for it in every for wait in it.wait_p90 if wait is not None), default=0.0)
    longest = max((count for it in every for count in it.waiting), default=0)
    for figures, it in zip(found, every, strict=True):
        own = max((wait for wait in it.wait_p90 if wait is not None), default=0.0)
        table.add_row("wait p90", figures.name, sparkline(it.wait_p90, worst), duration(own))
    for figures, it in zip(found, every, strict=True):
        table.add_row("waiting", figures.name, sparkline(it.waiting, longest), f"{max(it.waiting, default=0):,}")
    for figures, it in zip(found, every, strict=True):
        table.add_row("slot use", figures.name, sparkline(it.use, 1.0, fold=fmean), f"{max(it.use, default=0):.0%}")
    return table


def _remarks(found: Sequence[Summary]) -> Iterator[str]:
    for figures in found:
        if figures.waits.never:
            yield f"{figures.name}: {figures.waits.never:,} jobs never ran; no slot could run them."
        if figures.broken:
            yield f"{figures.name}: {figures.broken:,} jobs ran again, for an outage broke off their first run."
        if figures.swaps:
            yield f"{figures.name}: servers changed their model {figures.swaps:,} times."
        if figures.late:
            yield f"{figures.name}: {figures.late:,} jobs did not start before their deadline."


def _table(titles: Sequence[str]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*titles, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in table.columns:
        column.no_wrap = True
    return table
