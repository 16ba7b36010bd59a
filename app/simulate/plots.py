"""Draws plots as self-contained SVG files, for light and dark backgrounds."""

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
_MAX_VARIANTS_WITH_MEDIANS = 3  # the number of variants up to which medians are drawn, so that the plot stays legible
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
    """One line of a plot; a y of None interrupts it.  `faint`: dotted, for a line beside another of the same colour."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: int
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from 0 to `highest`.  `ticks`: (value, label).  `log`: logarithmic, from the first tick."""

    title: str
    ticks: Sequence[tuple[float, str]]
    highest: float
    log: bool = False

    def share(self, value: float) -> float:
        """Return the place of a value on the axis, from 0 to 1."""
        if not self.log:
            return value / self.highest
        from math import log

        low = self.ticks[0][0]
        return max(log(max(value, low) / low) / log(self.highest / low), 0.0)


def write(folder: Path, summaries: Sequence[Summary], outcomes: Sequence[Outcome]) -> list[Path]:
    """Write all plots into a folder, which is created if missing, and return the files.  Raises SimulationError."""
    plots = {
        "waits": waits_over_time(summaries),
        "waiting": waiting_over_time(summaries),
        "use": use_over_time(summaries),
        "distribution": waits_spread(summaries, outcomes),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, svg in plots.items():
            (folder / f"{name}.svg").write_text(svg, "utf-8")
    except OSError as error:
        raise SimulationError(
            f"--plots {folder}: it cannot be written ({error.strerror}); name another folder."
        ) from None
    return [folder / f"{name}.svg" for name in plots]


def waits_over_time(summaries: Sequence[Summary]) -> str:
    """Plot the percentiles of waits over time."""
    lines = []
    for colour, summary in enumerate(summaries):
        lines.append(Line(summary.name, _slice_centres(summary), summary.series.wait_p90, colour))
        if len(summaries) <= _MAX_VARIANTS_WITH_MEDIANS:
            lines.append(
                Line(f"{summary.name}, half", _slice_centres(summary), summary.series.wait_p50, colour, faint=True)
            )
    return _svg("Waits", "90 % of the jobs that arrive then wait less", _time_axis(summaries), _wait_axis(lines), lines)


def waiting_over_time(summaries: Sequence[Summary]) -> str:
    """Plot the number of waiting jobs over time."""
    lines = [
        Line(summary.name, summary.series.hours, summary.series.waiting, colour)
        for colour, summary in enumerate(summaries)
    ]
    highest = max((y for line in lines for y in line.ys if y is not None), default=1) or 1
    ticks = _ticks(highest)
    axis = Axis("jobs", [(tick, f"{tick:,.0f}") for tick in ticks], ticks[-1])
    return _svg("Waiting jobs", "over time", _time_axis(summaries), axis, lines)


def use_over_time(summaries: Sequence[Summary]) -> str:
    """Plot the use of slots over time."""
    lines = [
        Line(f"{summary.name}, {summary.use:.0%}", _slice_centres(summary), summary.series.use, n)
        for n, summary in enumerate(summaries)
    ]
    axis = Axis("of the slots' time", [(tick / 100, f"{tick} %") for tick in range(0, 101, 20)], 1.0)
    return _svg("Slot use", "over time", _time_axis(summaries), axis, lines)


def waits_spread(summaries: Sequence[Summary], outcomes: Sequence[Outcome]) -> str:
    """Plot the distribution of waits."""
    longest = max((summary.waits.longest for summary in summaries), default=0.0)
    at = doubling(longest)
    ticks = [(0.1, "0.1 s"), *((value, label) for value, label in _DECADES_S if value < longest * 1.5)]
    x = Axis("wait", ticks, max(longest, ticks[-1][0], 1.0), log=True)
    y = Axis("of all jobs", [(tick / 100, f"{tick} %") for tick in range(0, 101, 20)], 1.0)
    lines = [
        Line(summary.name, at, distribution(outcome.jobs, at), n)
        for n, (summary, outcome) in enumerate(zip(summaries, outcomes, strict=True))
    ]
    return _svg("Waits", "share of jobs that started within", x, y, lines)


def _slice_centres(summary: Summary) -> list[float]:
    """Return the centres of the slices, in hours from the start."""
    half = summary.series.hours[0] / 2
    return [hour - half for hour in summary.series.hours]


def _time_axis(summaries: Sequence[Summary]) -> Axis:
    """Return the time axis, in minutes, hours or days."""
    hours = summaries[0].hours
    if hours <= 2:
        ticks = _ticks(hours * 60)
        return Axis("minutes", [(tick / 60, f"{tick:g}") for tick in ticks if tick <= hours * 60], hours)
    if hours <= 48:
        step = 3 if hours > 12 else 1
        return Axis("hours", [(float(tick), str(tick)) for tick in range(0, int(hours) + 1, step)], hours)
    step = max(round(hours / 24 / 10), 1)
    return Axis("days", [(tick * 24.0, str(tick)) for tick in range(0, int(hours / 24) + 1, step)], hours)


def _wait_axis(lines: Sequence[Line]) -> Axis:
    """Return an axis of waits, with steps that are whole numbers of seconds, minutes or hours."""
    highest = max((y for line in lines for y in line.ys if y is not None), default=0.0) or 0.1
    step = next((step for step in _STEPS_S if highest / step <= 6), _STEPS_S[-1] * -(-highest // (6 * _STEPS_S[-1])))
    count = int(-(-highest // step))
    size, unit = next((pair for pair in ((3600, "h"), (60, "min")) if step >= pair[0]), (1, "s"))
    return Axis("wait", [(n * step, f"{n * step / size:g} {unit}") for n in range(count + 1)], count * step)


def _ticks(highest: float) -> list[float]:
    """Return at most seven round numbers, from 0 to at least `highest`."""
    size = 1.0
    while True:
        for first in _ROUND:
            if highest <= 6 * first * size:
                count = int(-(-highest // (first * size)))
                return [n * first * size for n in range(max(count, 1) + 1)]
        size *= 10


# Grey that is legible on white and on black, for viewers without prefers-color-scheme.
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


def _svg(title: str, subtitle: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """Return a plot as the text of an SVG file."""
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
    """Return a line as an SVG path.  Lines below others are wider, so that they are visible where lines coincide."""
    width = 1.3 if line.faint else 2 + 1.2 * min(last - line.colour, 4)
    steps, pen_down = [], False
    for x, y in zip(line.xs, line.ys, strict=True):
        if y is not None:
            steps.append(f"{'L' if pen_down else 'M'}{across(x):.1f} {up(y):.1f}")
        pen_down = y is not None
    style = f'class="{_css_class(line)}" stroke="{_colour(line)}" stroke-width="{width:.1f}"'
    return f'<path {style} d="{"".join(steps)}"/>'


def _legend(lines: Sequence[Line], right: float) -> list[str]:
    """Return the legend, above the plot, from the right; a second row has the labels that do not fit in the first."""
    parts: list[str] = []
    place, height = right, 54.0
    for line in reversed(lines):
        place -= 6.6 * len(line.label) + 38
        if place < _LEFT:
            place, height = right - 6.6 * len(line.label) - 38, height - 18
        style = f'class="{_css_class(line)}" stroke="{_colour(line)}" stroke-width="2.5"'
        parts.append(f'<path {style} d="M{place:.0f} {height:.0f}h20"/>')
        parts.append(f'<text x="{place + 26:.0f}" y="{height + 4:.0f}">{escape(line.label)}</text>')
    return parts


def _css_class(line: Line) -> str:
    return "line faint" if line.faint else "line"


def _colour(line: Line) -> str:
    return _COLOURS[line.colour % len(_COLOURS)]
