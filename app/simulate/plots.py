"""The figures as drawings: SVG files that need nothing else, and suit a light page as well as a dark one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from app.simulate.outcome_statistics import Summary, distribution, doubling
from app.simulate.scenario import Outcome, SimulationError

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 74, 46
_COLOURS = ("#2f7ed8", "#e07b1a", "#2a9d62", "#b54ac2", "#c8a400", "#d1495b", "#1fa3a8", "#8a7157")
_ROUND = (1, 2, 5)
_MEDIANS = 3  # variants beside which half of the jobs can be shown without a tangle
_STEPS_S = (
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    20,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    14_400,
    21_600,
    43_200,
    86_400,
)
_DECADES_S = (
    (1, "1 s"),
    (10, "10 s"),
    (60, "1 min"),
    (600, "10 min"),
    (3600, "1 h"),
    (36_000, "10 h"),
    (360_000, "100 h"),
)

Point = tuple[float, float]
Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a drawing; None breaks it.  `faint`: it accompanies another of its colour."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: int
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """From 0, or from the first tick, to the last one; ticks are (value, label).  `log`: 0 stands at the very left."""

    title: str
    ticks: Sequence[tuple[float, str]]
    highest: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value stands, 0 to 1."""
        if not self.log:
            return value / self.highest
        from math import log

        low = self.ticks[0][0]
        return max(log(max(value, low) / low) / log(self.highest / low), 0.0)


def write(folder: Path, found: Sequence[Summary], outcomes: Sequence[Outcome]) -> list[Path]:
    """Draw everything into a folder, which is made if need be; answers the files.  Raises Wrong."""
    drawings = {
        "waits": waits_over_time(found),
        "waiting": waiting_over_time(found),
        "use": use_over_time(found),
        "distribution": waits_spread(found, outcomes),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, drawing in drawings.items():
            (folder / f"{name}.svg").write_text(drawing, "utf-8")
    except OSError as error:
        raise SimulationError(
            f"--plots {folder}: it cannot be written ({error.strerror}); name another folder."
        ) from None
    return [folder / f"{name}.svg" for name in drawings]


def waits_over_time(found: Sequence[Summary]) -> str:
    lines = []
    for colour, it in enumerate(found):
        lines.append(Line(it.name, _middles(it), it.series.wait_p90, colour))
        if len(found) <= _MEDIANS:
            lines.append(Line(f"{it.name}, half", _middles(it), it.series.wait_p50, colour, faint=True))
    return _drawing("Waits", "90 % of the jobs that arrive then wait less", _hours(found), _spans(lines), lines)


def waiting_over_time(found: Sequence[Summary]) -> str:
    lines = [Line(it.name, it.series.hours, it.series.waiting, colour) for colour, it in enumerate(found)]
    highest = max((y for line in lines for y in line.ys if y is not None), default=1) or 1
    ticks = _ticks(highest)
    axis = Axis("jobs", [(tick, f"{tick:,.0f}") for tick in ticks], ticks[-1])
    return _drawing("Waiting jobs", "over time", _hours(found), axis, lines)


def use_over_time(found: Sequence[Summary]) -> str:
    lines = [Line(f"{it.name}, {it.use:.0%}", _middles(it), it.series.use, n) for n, it in enumerate(found)]
    axis = Axis("of the slots' time", [(tick / 100, f"{tick} %") for tick in range(0, 101, 20)], 1.0)
    return _drawing("Slot use", "over time", _hours(found), axis, lines)


def waits_spread(found: Sequence[Summary], outcomes: Sequence[Outcome]) -> str:
    longest = max((it.waits.longest for it in found), default=0.0)
    at = doubling(longest)
    ticks = [(0.1, "0.1 s"), *((value, label) for value, label in _DECADES_S if value < longest * 1.5)]
    x = Axis("wait", ticks, max(longest, ticks[-1][0], 1.0), log=True)
    y = Axis("of all jobs", [(tick / 100, f"{tick} %") for tick in range(0, 101, 20)], 1.0)
    lines = [
        Line(it.name, at, distribution(outcome.jobs, at), n)
        for n, (it, outcome) in enumerate(zip(found, outcomes, strict=True))
    ]
    return _drawing("Waits", "share of jobs that started within", x, y, lines)


def _middles(figures: Summary) -> list[float]:
    half = figures.series.hours[0] / 2
    return [hour - half for hour in figures.series.hours]


def _hours(found: Sequence[Summary]) -> Axis:
    hours = found[0].hours
    if hours <= 2:
        ticks = _ticks(hours * 60)
        return Axis("minutes", [(tick / 60, f"{tick:g}") for tick in ticks if tick <= hours * 60], hours)
    if hours <= 48:
        step = 3 if hours > 12 else 1
        return Axis("hours", [(float(tick), str(tick)) for tick in range(0, int(hours) + 1, step)], hours)
    step = max(round(hours / 24 / 10), 1)
    return Axis("days", [(tick * 24.0, str(tick)) for tick in range(0, int(hours / 24) + 1, step)], hours)


def _spans(lines: Sequence[Line]) -> Axis:
    """An axis of waits, with steps that are whole in seconds, minutes or hours."""
    highest = max((y for line in lines for y in line.ys if y is not None), default=0.0) or 0.1
    step = next((step for step in _STEPS_S if highest / step <= 6), _STEPS_S[-1] * -(-highest // (6 * _STEPS_S[-1])))
    count = int(-(-highest // step))
    size, unit = next((it for it in ((3600, "h"), (60, "min")) if step >= it[0]), (1, "s"))
    return Axis("wait", [(n * step, f"{n * step / size:g} {unit}") for n in range(count + 1)], count * step)


def _ticks(highest: float) -> list[float]:
    """Round numbers from 0 to at least `highest`, seven at most."""
    size = 1.0
    while True:
        for first in _ROUND:
            if highest <= 6 * first * size:
                count = int(-(-highest // (first * size)))
                return [n * first * size for n in range(max(count, 1) + 1)]
        size *= 10


# Grey that can be read on white and on black, for a viewer that does not say which it is.
_STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #7d8590 }
  .title { font-size: 15px; font-weight: 600 }
  .grid { stroke: #8c959f; stroke-opacity: .28 }
  .axis { stroke: #8c959f }
  .line { fill: none; stroke-linejoin: round; stroke-linecap: round }
  .faint { stroke-dasharray: 2 4 }
  @media (prefers-color-scheme: light) { text { fill: #57606a } .title { fill: #1f2328 } }
  @media (prefers-color-scheme: dark) { text { fill: #9aa4af } .title { fill: #e6edf3 } }
"""


def _drawing(title: str, subtitle: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def across(value: float) -> float:
        return _LEFT + x.share(value) * (right - _LEFT)

    def up(value: float) -> float:
        return bottom - min(y.share(value), 1.0) * (bottom - _TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(f"{title} {subtitle}")}">',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="22">{escape(title)}</text>',
        f'<text x="{_LEFT + 9 * len(title) + 10}" y="22">{escape(subtitle)}</text>',
    ]
    for value, label in y.ticks:
        height = up(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{height:.1f}" x2="{right}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    for value, label in x.ticks:
        place = across(value)
        parts.append(f'<line class="axis" x1="{place:.1f}" y1="{bottom}" x2="{place:.1f}" y2="{bottom + 5}"/>')
        parts.append(f'<text x="{place:.1f}" y="{bottom + 19}" text-anchor="middle">{escape(label)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    parts.append(f'<text x="{right}" y="{_HEIGHT - 8}" text-anchor="end">{escape(x.title)}</text>')
    parts.append(f'<text x="8" y="{_TOP - 12}">{escape(y.title)}</text>')
    parts += _legend(lines, right)
    last = max((line.colour for line in lines), default=0)
    parts += [_path(line, across, up, last) for line in lines]
    return "\n".join([*parts, "</svg>\n"])


def _path(line: Line, across: Scale, up: Scale, last: int) -> str:
    """A line; those below others are broader, so that they are seen where all run alike."""
    width = 1.3 if line.faint else 2 + 1.2 * min(last - line.colour, 4)
    steps, pen_down = [], False
    for x, y in zip(line.xs, line.ys, strict=True):
        if y is not None:
            steps.append(f"{'L' if pen_down else 'M'}{across(x):.1f} {up(y):.1f}")
        pen_down = y is not None
    style = f'class="{_kind(line)}" stroke="{_colour(line)}" stroke-width="{width:.1f}"'
    return f'<path {style} d="{"".join(steps)}"/>'


def _legend(lines: Sequence[Line], right: float) -> list[str]:
    """Above the field, from the right; in a second row what finds no room in the first."""
    parts: list[str] = []
    place, height = right, 54.0
    for line in reversed(lines):
        place -= 6.6 * len(line.label) + 38
        if place < _LEFT:
            place, height = right - 6.6 * len(line.label) - 38, height - 18
        style = f'class="{_kind(line)}" stroke="{_colour(line)}" stroke-width="2.5"'
        parts.append(f'<path {style} d="M{place:.0f} {height:.0f}h20"/>')
        parts.append(f'<text x="{place + 26:.0f}" y="{height + 4:.0f}">{escape(line.label)}</text>')
    return parts


def _kind(line: Line) -> str:
    return "line faint" if line.faint else "line"


def _colour(line: Line) -> str:
    return _COLOURS[line.colour % len(_COLOURS)]
