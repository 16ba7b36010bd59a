"""The payload of a job, for those who may see the job.

Its tenant sees it whole.  Who operates sees it without what its model's `redact` names, and that is noted in the audit
log.
"""

from collections.abc import Iterable
from typing import Any

from app.auth.access import current_identity
from app.context import dispatcher
from slotkeeper import audit, json_text
from slotkeeper.jobs.values import Job
from tasks.servers import pointers
from tasks.services import database

_REDACTED = "(redacted)"


def is_own(job: Job) -> bool:
    """Return whether the client of this request belongs to the job's tenant.  Without keys all clients are one."""
    identity = current_identity()
    return identity.key_id is None or identity.tenant.name == job.tenant


def read_payload(job: Job) -> Any:
    """Return the payload of a job that was read whole, for the client of this request, and note who reads it."""
    payload = json_text.loads(job.payload or "{}")
    if is_own(job):
        return payload
    entry = audit.make_entry("job.read_payload", job_id=job.id, model=job.model, tenant=job.tenant)
    audit.write_entry(database(), entry)
    model = dispatcher().catalog.get().model(job.model)
    return _REDACTED if model is None else redact(payload, model.config.redact)


def redact(payload: Any, places: Iterable[str]) -> Any:
    """Replace the values at these JSON pointers."""
    for place in places:
        pointer = pointers.parse(place)
        if not pointer:
            return _REDACTED
        parent = pointers.resolve(payload, pointer[:-1])
        if pointers.resolve(parent, pointer[-1:]) is not pointers.MISSING:
            parent[pointer[-1] if isinstance(parent, dict) else int(pointer[-1])] = _REDACTED
    return payload
