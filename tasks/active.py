"""What `inspect active` shows: every run of this worker, also one that no message brought, beside its other tasks."""

import os
from typing import Any

from celery.worker import control

from tasks import messages
from tasks.worker.capacity import Taken
from tasks.worker.process import this_worker

_CELERYS: Any = control.active  # type: ignore[attr-defined]


@control.inspect_command(name="active", alias="dump_active")
def active(state: Any, safe: bool = False, **_: Any) -> list[dict[str, Any]]:
    """List of runs and of other tasks currently being executed."""
    taken = this_worker().places.taken() if this_worker.created else []
    return [*_CELERYS(state, safe=safe), *(_info(it, state.hostname) for it in taken)]


def _info(taken: Taken, hostname: str) -> dict[str, Any]:
    """Return the fields that Celery shows of a task's request, and the run's server and slot."""
    offer, queue = taken.offer, messages.queue_of(taken.offer.model)
    return {
        "id": offer.job_id,
        "name": messages.TASK,
        "type": messages.TASK,
        "args": [offer.model],
        "kwargs": {},
        "hostname": hostname,
        "time_start": taken.since_s,
        "acknowledged": True,
        "delivery_info": {"exchange": "", "routing_key": queue, "priority": None, "redelivered": False},
        "worker_pid": os.getpid(),
        "server": offer.server,
        "slot": offer.slot,
    }
