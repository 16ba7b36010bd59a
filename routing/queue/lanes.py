"""Which lane a job waits in.  What a policy decides stands in lua/lib/policies.

A lane holds jobs that are alike for placement and order: same model, constraints, tenant and priority.
"""

import hashlib
from functools import lru_cache
from urllib.parse import quote

from slotkeeper.jobs.values import QueuedJob

_READABLE = "/:@+ ~"  # of a tenant's name beside letters, digits and `_.-`; a bar would end it too early


def lane_name(job: QueuedJob) -> str:
    """`<priority>|<digest of its constraints>|<tenant>|<model>`."""
    return f"{job.priority}|{constraints_digest(job.constraints)}|{account_name(job.tenant, job.model)}"


def account_name(tenant: str, model: str) -> str:
    """`<tenant>|<model>`, as the scripts know a tenant's use of a model."""
    return f"{encode_tenant(tenant)}|{model}"


@lru_cache(4096)
def encode_tenant(tenant: str) -> str:
    """A tenant's name as part of a key."""
    return quote(tenant, safe=_READABLE)


@lru_cache(4096)
def constraints_digest(constraints: str) -> str:
    """Of constraints in their text form, short; "" for none."""
    return hashlib.sha256(constraints.encode()).hexdigest()[:12] if constraints else ""
