"""Draws plots of outcomes as SVG files, by matplotlib, which the extra `plots` installs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.simulate.outcome_statistics import Summary
from app.simulate.scenario import Outcome, SimulationError
from app.simulate.terminal_report import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Texts stay texts, a `$` in a name is one, and the same outcome gives the same file.
_STYLE: Any = {"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "slotkeeper", "font.size": 9}
_POINTS = 500  # of a line
_HEIGHT, _WIDTH = 3.0, 7.6  # inches

Draw = Callable[["Axes", Sequence[Summary], Sequence[Outcome]], None]


def write(folder: Path, summaries: Sequence[Summary], outcomes: Sequence[Outcome]) -> list[Path]:
    """Write all plots into a folder, which is created if missing, and return the files.  Raises SimulationError."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise SimulationError("--plots needs matplotlib: pip install 'slotkeeper[plots]'.") from None

    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in _PLOTS.items():
            with rc_context(_STYLE):
                figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
                axes = figure.subplots()
                draw(axes, summaries, outcomes)
                axes.set_ylim(bottom=0)
                axes.grid(alpha=0.3)
                # By name: matplotlib leaves out what begins with "_".
                axes.legend(axes.lines, [str(line.get_label()) for line in axes.lines], frameon=False)
                files.append(folder / f"{name}.svg")
                figure.savefig(files[-1], metadata={"Date": None})
    except OSError as error:
        raise SimulationError(
            f"--plots {folder}: it cannot be written ({error.strerror}); name another folder."
        ) from None
    return files


def _draw_waits(axes: "Axes", summaries: Sequence[Summary], outcomes: Sequence[Outcome]) -> None:
    axes.set_title("Waits: 90 % of the jobs that arrive then wait less")
    axes.yaxis.set_major_formatter(lambda seconds, _: duration(seconds))
    for summary in summaries:
        axes.plot(*_over_time(axes, summary, summary.series.wait_p90), label=summary.name)


def _draw_waiting(axes: "Axes", summaries: Sequence[Summary], outcomes: Sequence[Outcome]) -> None:
    axes.set_title("Waiting jobs")
    for summary in summaries:
        axes.plot(*_over_time(axes, summary, summary.series.waiting), label=summary.name)


def _draw_use(axes: "Axes", summaries: Sequence[Summary], outcomes: Sequence[Outcome]) -> None:
    axes.set_title("Slot use")
    axes.set_ylim(top=1.0)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    for summary in summaries:
        axes.plot(*_over_time(axes, summary, summary.series.use), label=f"{summary.name}, {summary.use:.0%}")


def _draw_distribution(axes: "Axes", summaries: Sequence[Summary], outcomes: Sequence[Outcome]) -> None:
    axes.set_title("Waits: share of the jobs that started within")
    axes.set_xscale("symlog", linthresh=1.0)
    axes.xaxis.set_major_formatter(lambda seconds, _: duration(seconds))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_ylim(top=1.0)
    for summary, outcome in zip(summaries, outcomes, strict=True):
        waits = sorted(job.wait_ms / 1000 for job in outcome.jobs if job.wait_ms is not None)
        points = range(0, len(waits), max(len(waits) // _POINTS, 1))
        axes.plot([waits[n] for n in points], [(n + 1) / len(waits) for n in points], label=summary.name)


def _over_time(axes: "Axes", summary: Summary, values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Return the times of a series, in the unit that the axis is labelled with, and its values."""
    unit, per_hour = ("minutes", 60.0) if summary.hours <= 2 else ("hours", 1.0)
    if summary.hours > 48:
        unit, per_hour = "days", 1 / 24
    axes.set_xlabel(unit)
    return [hour * per_hour for hour in summary.series.hours], [float("nan") if y is None else y for y in values]


_PLOTS: dict[str, Draw] = {
    "waits": _draw_waits,
    "waiting": _draw_waiting,
    "use": _draw_use,
    "distribution": _draw_distribution,
}
