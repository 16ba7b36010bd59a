"""What `inspect active` shows: every run of this worker, also one that no message brought, beside its other tasks."""

import os
from typing import Any

from celery.worker import control

from tasks import offer_messages
from tasks.worker.concurrency import TakenOffer
from tasks.worker.worker import this_worker

_celery_active: Any = control.active  # type: ignore[attr-defined]


@control.inspect_command(name="active", alias="dump_active")
def active(state: Any, safe: bool = False, **_: Any) -> list[dict[str, Any]]:
    """List of runs and of other tasks currently being executed."""
    taken = this_worker().concurrency.taken_offers() if this_worker.created else []
    return [*_celery_active(state, safe=safe), *(_run_info(run, state.hostname) for run in taken)]


def _run_info(taken: TakenOffer, hostname: str) -> dict[str, Any]:
    """Return the fields that Celery shows of a task's request, and the run's server and slot."""
    offer, queue = taken.offer, offer_messages.queue_name(taken.offer.model)
    return {
        "id": offer.job_id,
        "name": offer_messages.TASK,
        "type": offer_messages.TASK,
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
