"""Draw small plots as SVG paths, which need no script, each with a description for screen readers."""

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 240, 48


@dataclass(frozen=True, slots=True)
class Plot:
    """`area` and `line`: paths in a box of WIDTH by HEIGHT; `words` says the same."""

    area: str
    line: str
    words: str
    width: int = WIDTH
    height: int = HEIGHT


def slot_use_plot(use: Sequence[float], ended: Sequence[int], slots: int) -> Plot:
    """Share of slots in use, minute by minute, the newest at the right.  slots: of servers that are online."""
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
