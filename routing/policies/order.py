"""Which lane a job waits in, and for how long it may be overtaken.  What a policy decides stands in lua/lib/policies.

A lane holds jobs that are alike for placement and order: same model, needs, tenant and tier.
"""

import hashlib
from functools import lru_cache
from urllib.parse import quote

from jobs.config import ModelConfig
from jobs.policies import POLICIES
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
    return POLICIES[config.policy].longest_overtaking_s(tier, config.tier_head_start)


def longest_wait(config: ModelConfig, tier: int = TIER_DEFAULT) -> str:
    """The longest that order can make a job of this tier wait, in terms of the load: a sentence."""
    return POLICIES[config.policy].says(tier, config.tier_head_start)


TIERS = range(1, TIER_LEAST_URGENT + 1)
