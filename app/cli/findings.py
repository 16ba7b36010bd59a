"""What the checks of `slotkeeper doctor` find."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.  `level`: ok, warn or fail.  `remedy`: a sentence with what to do; "": nothing."""

    part: str
    level: str
    message: str
    remedy: str = ""


Check = Callable[[], Iterator[Finding]]


def worst_level(findings: Sequence[Finding]) -> str:
    """Return the worst level of all findings."""
    levels = {finding.level for finding in findings}
    return next((level for level in ("fail", "warn") if level in levels), "ok")
