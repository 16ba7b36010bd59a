"""Draw small plots as SVG paths, which need no script.  Each has a description for screen readers."""

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 240, 48


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot.  `area` and `line`: SVG paths in a box of WIDTH by HEIGHT.  `words`: the description of the plot."""

    area: str
    line: str
    words: str
    width: int = WIDTH
    height: int = HEIGHT


def slot_use_plot(use: Sequence[float], ended: Sequence[int], slots: int) -> Plot:
    """Return the plot of the share of slots in use.

    use, ended: the share and the number of ended jobs of each minute, the newest last.  slots: of the online servers.
    """
    if not slots:
        return Plot("", "", f"No server is online. {sum(ended)} jobs ended in the last hour.")
    if not any(use):
        return Plot("", "", f"Slot use over the last hour: none. {sum(ended)} jobs ended.")
    step = WIDTH / (len(use) - 1)
    points = [f"{n * step:.1f} {_y(share):.1f}" for n, share in enumerate(use)]
    line = "M" + "L".join(points)
    mean, most = sum(use) / len(use), max(use)
    words = (
        f"Slot use over the last hour: {use[-1]:.0%} at last, {mean:.0%} on average, {most:.0%} at most. "
        f"{sum(ended)} jobs ended."
    )
    return Plot(f"{line}L{WIDTH} {HEIGHT}L0 {HEIGHT}Z", line, words)


def _y(share: float) -> float:
    return HEIGHT - 1 - share * (HEIGHT - 2)
