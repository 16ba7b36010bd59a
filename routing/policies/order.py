"""Whose turn it is.

A lane holds jobs that are alike for placement, in order of acceptance.  The room serves the lane with the
smallest order key first; the key is `offset(lane) + seq of the job at its head`, so a policy is nothing but
a choice of offsets.  Keys are exact integers below 2^53, which a Redis score holds without rounding (R39).
"""

from collections.abc import Callable

from jobs.config import Policy
from jobs.record import Waiting

# 2^49 jobs may be accepted before a key could leak into the next tier; nine tiers stay below 2^53.
_TIER_STEP = 1 << 49


def lane(job: Waiting) -> str:
    """The lane of a job: `<tier>|<model>`.  The model stands last, for it may contain anything but a bar."""
    return f"{job.tier}|{job.model}"


def tier_of(lane_name: str) -> int:
    return int(lane_name.split("|", 1)[0])


def model_of(lane_name: str) -> str:
    return lane_name.rsplit("|", 1)[1]


def _fifo(tier: int) -> int:
    return 0


def _priority(tier: int) -> int:
    return tier * _TIER_STEP


_OFFSETS: dict[Policy, Callable[[int], int]] = {"fifo": _fifo, "priority": _priority}


def offset(policy: Policy, tier: int) -> int:
    """What the policy adds to the acceptance number of a job of this tier."""
    return _OFFSETS[policy](tier)
