"""Policies: whose turn it is among the jobs of a model that wait.

A policy is a row of this table and a file `routing/lua/lib/policies/<name>.lua`, which decides; here stands what is
said of it, and what it means before anything waits.
"""

from collections.abc import Callable
from dataclasses import dataclass

Overtaking = Callable[[int, float], float | None]
"""Of a tier and of the seconds that one tier is worth: the longest that a job can be overtaken, in seconds.

For so long after its acceptance others may still be accepted that come before it; None: there is no such time.
"""


@dataclass(frozen=True, slots=True)
class Policy:
    """What is known of a policy without asking it.

    `next_is`: whose turn it is.  `longest_wait`: the longest that order can make a job wait, in terms of the load, with
    `{tier}`, its `{overtaking_s}` and the `{step_s}` of a tier.  `is_by_tenant`: tenants' jobs are not in each other's
    way, so bounds on what may wait are each tenant's.
    """

    name: str
    next_is: str
    longest_overtaking_s: Overtaking
    longest_wait: str
    is_by_tenant: bool = False

    def says(self, tier: int, step_s: float) -> str:
        """`longest_wait` for a tier: a sentence."""
        return self.longest_wait.format(tier=tier, overtaking_s=self.longest_overtaking_s(tier, step_s), step_s=step_s)


def _at_once(tier: int, step_s: float) -> float | None:
    return 0.0


def _head_starts(tier: int, step_s: float) -> float | None:
    return (tier - 1) * step_s


def _first_tier_at_once(tier: int, step_s: float) -> float | None:
    return 0.0 if tier == 1 else None


def _never(tier: int, step_s: float) -> float | None:
    return None


DEFAULT = "priority"
POLICIES = {
    row.name: row
    for row in (
        Policy(
            "fifo",
            "the job that was accepted first",
            _at_once,
            "A job waits for the work that was accepted before it, and no longer.",
        ),
        Policy(
            "priority",
            "the most urgent tier, 1 to 9, and of it the job that was accepted first",
            _first_tier_at_once,
            "A job of tier 1 waits for the work of its tier that was accepted before it, and no longer; all others "
            "wait for as long as more urgent work keeps coming.",
        ),
        Policy(
            "aging",
            "the job that was accepted first, where each tier is worth a head start of `tier_head_start` seconds",
            _head_starts,
            "A job of tier {tier} waits for the work that is accepted until {overtaking_s:g} s after it, and no "
            "longer; each tier counts {step_s:g} s.",
        ),
        Policy(
            "fair",
            "the tenant that has had the least slot time for its weight, and its most urgent job",
            _never,
            "A tenant gets its share of the slots' time by weight, however much the others submit; of its own jobs the "
            "less urgent wait for as long as more urgent ones keep coming.",
            is_by_tenant=True,
        ),
    )
}


def one_of() -> str:
    """The names, as a part of a sentence."""
    *others, last = POLICIES
    return f"{', '.join(others)} or {last}"


def described() -> str:
    """What is next under each of them."""
    rows = "; ".join(f"`{row.name}`: {row.next_is}" for row in POLICIES.values())
    return f"What is next.  {rows}."
