"""Policies: whose turn it is among the jobs of a model that wait.

A policy is a row of this table and a file `routing/lua/lib/policies/<name>.lua`, which decides; here stands what is
said of it, and what it means before anything waits.
"""

from collections.abc import Callable
from dataclasses import dataclass

Overtaking = Callable[[int, float], float | None]
"""Of a priority and of the seconds that one step of it is worth: the longest that a job can be overtaken, in seconds.

For so long after its acceptance others may still be accepted that come before it; None: there is no such time.
"""


@dataclass(frozen=True, slots=True)
class Policy:
    """What is known of a policy without asking it.

    `next_is`: whose turn it is.  `longest_wait`: the longest that order can make a job wait, in terms of the load, with
    `{priority}`, its `{overtaking_s}` and the `{step_s}` of a step.  `is_by_tenant`: tenants' jobs are not in each
    other's way, so bounds on what may wait are each tenant's.
    """

    name: str
    next_is: str
    longest_overtaking_s: Overtaking
    longest_wait: str
    is_by_tenant: bool = False

    def describe_wait(self, priority: int, step_s: float) -> str:
        """`longest_wait` for a priority: a sentence."""
        overtaking_s = self.longest_overtaking_s(priority, step_s)
        return self.longest_wait.format(priority=priority, overtaking_s=overtaking_s, step_s=step_s)


def _at_once(priority: int, step_s: float) -> float | None:
    return 0.0


def _head_starts(priority: int, step_s: float) -> float | None:
    return (priority - 1) * step_s


def _most_urgent_at_once(priority: int, step_s: float) -> float | None:
    return 0.0 if priority == 1 else None


def _never(priority: int, step_s: float) -> float | None:
    return None


DEFAULT_POLICY = "priority"
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
            "the most urgent job, from 1 to 9, and of those the one that was accepted first",
            _most_urgent_at_once,
            "A job of priority 1 waits for the work of its priority that was accepted before it, and no longer; all "
            "others wait for as long as more urgent work keeps coming.",
        ),
        Policy(
            "aging",
            "the job that was accepted first, where each step of priority is worth a head start of `tier_head_start` "
            "seconds",
            _head_starts,
            "A job of priority {priority} waits for the work that is accepted until {overtaking_s:g} s after it, and "
            "no longer; each step counts {step_s:g} s.",
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


def list_names() -> str:
    """The names, as a part of a sentence."""
    *others, last = POLICIES
    return f"{', '.join(others)} or {last}"


def describe_all() -> str:
    """What is next under each of them."""
    rows = "; ".join(f"`{row.name}`: {row.next_is}" for row in POLICIES.values())
    return f"What is next.  {rows}."
