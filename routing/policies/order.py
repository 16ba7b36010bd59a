"""Which lane a job waits in.  The policies themselves, key functions of lanes, stand in lua/lib/order.lua.

A lane holds jobs that are alike for placement and order: same model, needs, tenant and tier.
"""

import hashlib
from functools import lru_cache
from urllib.parse import quote

from jobs.config import ModelConfig
from jobs.record import TIER_DEFAULT, TIER_LEAST_URGENT, Waiting

_READABLE = "/:@+ ~"  # of a tenant's name beside letters, digits and `_.-`; a bar would end it too early


def lane(job: Waiting) -> str:
    """`<tier>|<digest of its needs>|<tenant>|<model>`."""
    return f"{job.tier}|{_digest(job.needs)}|{account(job.tenant, job.model)}"


def asked_class(model: str, needs: str) -> str:
    """`<digest of the needs>|<model>`, as the scripts know jobs that the same servers can run."""
    return f"{_digest(needs)}|{model}"


def account(tenant: str, model: str) -> str:
    """`<tenant>|<model>`, as the scripts know a tenant's use of a model."""
    return f"{safe(tenant)}|{model}"


def safe(tenant: str) -> str:
    """A tenant's name as part of a key."""
    return quote(tenant, safe=_READABLE)


@lru_cache(4096)
def _digest(needs: str) -> str:
    return hashlib.sha256(needs.encode()).hexdigest()[:12] if needs else ""


def longest_overtaking_s(tier: int, config: ModelConfig) -> float | None:
    """For how many seconds after its acceptance others may still be accepted that come before a job of this tier.

    The bound on what order alone can make it wait: the work that was accepted until then.  None: there is none.
    """
    match config.policy:
        case "fifo":
            return 0.0
        case "aging":
            return (tier - 1) * config.tier_head_start
        case "priority" if tier == 1:
            return 0.0
        case _:
            return None


def longest_wait(config: ModelConfig, tier: int = TIER_DEFAULT) -> str:
    """The longest that order can make a job of this tier wait, in terms of the load: a sentence."""
    match config.policy:
        case "fifo":
            return "A job waits for the work that was accepted before it, and no longer."
        case "aging":
            step_s = config.tier_head_start
            return (
                f"A job of tier {tier} waits for the work that is accepted until {(tier - 1) * step_s:g} s after it, "
                f"and no longer; each tier counts {step_s:g} s."
            )
        case "priority":
            return (
                "A job of tier 1 waits for the work of its tier that was accepted before it, and no longer; all others "
                "wait for as long as more urgent work keeps coming."
            )
        case _:
            return (
                "A tenant gets its share of the slots' time by weight, however much the others submit; of its own jobs "
                "the less urgent wait for as long as more urgent ones keep coming."
            )


TIERS = range(1, TIER_LEAST_URGENT + 1)
