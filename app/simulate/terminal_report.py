"""Prints the statistics of outcomes at a terminal: tables, bars and sparklines."""

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
_SPARKLINE = 40  # characters of a sparkline
_BARS = {1: 20, 2: 20}  # characters of a bar, by the number of variants
_NARROW_BAR = 8  # characters of a bar with more variants, so that four fit
_WITHIN_S = ((1, "1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"), (3600, "1 h"), (86_400, "1 day"))


def show(console: "Console", summaries: Sequence[Summary], outcomes: Sequence[Outcome]) -> None:
    """Print all tables, with one column for each variant."""
    for table in (_comparison(summaries), _wait_shares(summaries, outcomes), _over_time(summaries)):
        console.print("", table)
    console.print()
    for line in _notes(summaries):
        console.print(line)


def duration(seconds: float) -> str:
    """Return a duration as a text, in a suitable unit, with two or more digits."""
    number, unit = _parts(seconds)
    return f"{number} {unit}"


def duration_pair(first: float, second: float) -> str:
    """Return two durations as a text; a unit that both share is written once."""
    (number, unit), (other, other_unit) = _parts(first), _parts(second)
    return f"{number} / {other} {unit}" if unit == other_unit else f"{number} {unit} / {other} {other_unit}"


def _parts(seconds: float) -> tuple[str, str]:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            number = seconds / size
            return (f"{number:.1f}" if number < 9.95 else f"{number:.0f}"), unit
    return (f"{seconds:.0f}" if seconds >= 20 or seconds == 0 else f"{seconds:.2g}"), "s"


def sparkline(values: Sequence[float | None], highest: float, width: int = _SPARKLINE, fold: Fold = max) -> str:
    """Return values as a row of block characters.  `fold` combines the values of one block; a space: there are none."""
    step = len(values) / width
    parts = [values[int(n * step) : max(int((n + 1) * step), int(n * step) + 1)] for n in range(width)]
    present = [[value for value in part if value is not None] for part in parts]
    return "".join(_block(fold(part) if part else None, highest) for part in present)


def _block(value: float | None, highest: float) -> str:
    if value is None or highest <= 0:
        return _BLOCKS[0 if value is None else 1]
    return _BLOCKS[1 + min(int(value / highest * 8), 7)]


def _comparison(summaries: Sequence[Summary]) -> "Table":
    """Return the table of all statistics."""
    table = _table(("", *(summary.name for summary in summaries)))
    rows: dict[str, Callable[[Summary], str]] = {
        "jobs": lambda summary: f"{summary.waits.jobs:,}",
        "wait, mean": lambda summary: duration(summary.waits.mean),
        "p50": lambda summary: duration(summary.waits.p50),
        "p90": lambda summary: duration(summary.waits.p90),
        "p99": lambda summary: duration(summary.waits.p99),
        "longest": lambda summary: duration(summary.waits.longest),
        "overtaken by": lambda summary: duration(summary.waits.overtaken),
        "slot use": lambda summary: f"{summary.use:.1%}",
        "jobs per hour": lambda summary: f"{summary.per_hour:,.0f}",
        "Jain's index": lambda summary: "-" if summary.jain is None else f"{summary.jain:.3f}",
    }
    for label, format_value in rows.items():
        table.add_row(label, *map(format_value, summaries))
    table.add_row()
    table.add_row("wait, p50 / p99")
    for label, waits in _groups(summaries):
        table.add_row(label, *(duration_pair(each.p50, each.p99) if each else "-" for each in waits))
    return table


def _groups(summaries: Sequence[Summary]) -> Iterator[tuple[str, list[Waits | None]]]:
    for kind in ("priorities", "models", "tenants"):
        names = sorted({name for summary in summaries for name in getattr(summary, kind)})
        for name in names if len(names) > 1 else ():
            label = (
                f"priority {name}" if kind == "priorities" else f"{name} tenants" if kind == "tenants" else str(name)
            )
            yield label, [getattr(summary, kind).get(name) for summary in summaries]


def _wait_shares(summaries: Sequence[Summary], outcomes: Sequence[Outcome]) -> "Table":
    """Return the table of the shares of jobs that started within given times, as bars."""
    table = _table(("within", *(summary.name for summary in summaries)))
    bar = _BARS.get(len(summaries), _NARROW_BAR)
    shares = [distribution(outcome.jobs, [limit for limit, _ in _WITHIN_S]) for outcome in outcomes]
    for n, (_, label) in enumerate(_WITHIN_S):
        if all(share[max(n - 1, 0)] == 1 for share in shares) and n:
            break
        table.add_row(label, *(f"{'█' * round(share[n] * bar):<{bar}} {share[n]:6.1%}" for share in shares))
    return table


def _over_time(summaries: Sequence[Summary]) -> "Table":
    """Return the table of time series, as sparklines."""
    hours = summaries[0].hours
    table = _table(("over time", "", f"0 to {duration(hours * 3600)}", "highest"))
    all_series = [summary.series for summary in summaries]
    longest_wait = max((wait for series in all_series for wait in series.wait_p90 if wait is not None), default=0.0)
    most_waiting = max((count for series in all_series for count in series.waiting), default=0)
    for summary, series in zip(summaries, all_series, strict=True):
        highest_wait = max((wait for wait in series.wait_p90 if wait is not None), default=0.0)
        table.add_row("wait p90", summary.name, sparkline(series.wait_p90, longest_wait), duration(highest_wait))
    for summary, series in zip(summaries, all_series, strict=True):
        table.add_row(
            "waiting", summary.name, sparkline(series.waiting, most_waiting), f"{max(series.waiting, default=0):,}"
        )
    for summary, series in zip(summaries, all_series, strict=True):
        table.add_row(
            "slot use", summary.name, sparkline(series.use, 1.0, fold=fmean), f"{max(series.use, default=0):.0%}"
        )
    return table


def _notes(summaries: Sequence[Summary]) -> Iterator[str]:
    for summary in summaries:
        if summary.waits.never:
            yield f"{summary.name}: {summary.waits.never:,} jobs never ran; no slot could run them."
        if summary.broken:
            yield f"{summary.name}: {summary.broken:,} jobs ran again, for an outage broke off their first run."
        if summary.swaps:
            yield f"{summary.name}: servers changed their model {summary.swaps:,} times."
        if summary.late:
            yield f"{summary.name}: {summary.late:,} jobs did not start before their deadline."


def _table(titles: Sequence[str]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*titles, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in table.columns:
        column.no_wrap = True
    return table
