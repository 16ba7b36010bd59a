"""Names of lanes, accounts and constraint classes.

A lane holds jobs that are alike for placement and order: same model, constraints, tenant and priority.  How a policy
orders lanes stands in lua/lib/policies.
"""

import hashlib
from functools import lru_cache
from urllib.parse import quote

from slotkeeper.jobs.values import QueuedJob

_READABLE = "/:@+ ~"  # kept in a tenant's name beside letters, digits and `_.-`; a bar would end the name


def lane_name(job: QueuedJob) -> str:
    """Return `<priority>|<digest of the constraints>|<tenant>|<model>`."""
    return f"{job.priority}|{constraints_digest(job.constraints)}|{account_name(job.tenant, job.model)}"


def account_name(tenant: str, model: str) -> str:
    """Return `<tenant>|<model>`, the name of a tenant's use of a model."""
    return f"{encode_tenant(tenant)}|{model}"


def class_name(model: str, constraints: str) -> str:
    """Return `<digest of the constraints>|<model>`, the name of jobs that the same servers can run."""
    return f"{constraints_digest(constraints)}|{model}"


@lru_cache(4096)
def encode_tenant(tenant: str) -> str:
    """Return a tenant's name as a part of a key."""
    return quote(tenant, safe=_READABLE)


@lru_cache(4096)
def constraints_digest(constraints: str) -> str:
    """Return a short digest of constraints in their text form; "" for none."""
    return hashlib.sha256(constraints.encode()).hexdigest()[:12] if constraints else ""
