"""Policies: the order of a model's waiting jobs, and how long that order can make a job wait.

A policy is a row of this table and a file `routing/lua/lib/policies/<name>.lua`, which computes the order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from slotkeeper.jobs.values import PRIORITY_DEFAULT, PRIORITY_LEAST_URGENT

PRIORITIES = range(1, PRIORITY_LEAST_URGENT + 1)

Overtaking = Callable[[int, float], float | None]
"""(priority, seconds that one step of priority is worth) -> for how many seconds after its acceptance a job can be
overtaken by jobs that are accepted later; None: without limit."""


class PolicyConfig(Protocol):
    """The fields of a model's configuration that concern its policy.  The configuration imports this module."""

    @property
    def policy(self) -> str: ...

    @property
    def tier_head_start(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy, apart from its script.

    next_is: which job comes next.  longest_wait: the longest wait that the order can cause, as a sentence with
    `{priority}`, `{overtaking_s}` and `{step_s}`.  is_by_tenant: jobs of one tenant do not delay those of another, so
    limits on waiting jobs hold for each tenant.  is_by_deadline: a job's place depends on its deadline.
    """

    name: str
    next_is: str
    longest_overtaking_s: Overtaking
    longest_wait: str
    is_by_tenant: bool = False
    is_by_deadline: bool = False

    def describe_wait(self, priority: int, step_s: float) -> str:
        """Return `longest_wait` for a priority."""
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
            "edf",
            "the job with the earliest deadline (`ttl`), then those without one; of equal ones, the job that was "
            "accepted first",
            _never,
            "A job with a deadline waits for the work whose deadline is earlier; one without a deadline waits for as "
            "long as work with one keeps coming.",
            is_by_deadline=True,
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


def longest_overtaking_s(priority: int, config: PolicyConfig) -> float | None:
    """Return for how many seconds after its acceptance a job of this priority can be overtaken by later jobs.

    The policy can make the job wait for the work that is accepted until then.  None: without limit.
    """
    return POLICIES[config.policy].longest_overtaking_s(priority, config.tier_head_start)


def longest_wait(config: PolicyConfig, priority: int = PRIORITY_DEFAULT) -> str:
    """Return the longest wait that the policy can cause for a job of this priority, as a sentence."""
    return POLICIES[config.policy].describe_wait(priority, config.tier_head_start)


def list_names() -> str:
    """Return the names as part of a sentence."""
    *others, last = POLICIES
    return f"{', '.join(others)} or {last}"


def describe_all() -> str:
    """Return which job comes next under each policy, as a sentence."""
    rows = "; ".join(f"`{row.name}`: {row.next_is}" for row in POLICIES.values())
    return f"What is next.  {rows}."
