"""Celery's revoke cancels a job, whether it waits, is delayed, is offered or runs, and whichever worker receives it.

`control.revoke`, `AsyncResult.revoke` and Flower's button send it to all workers at once.  Each worker that receives it
cancels the job in the database, where a second cancel changes nothing.  It needs no message of the job for that.
"""

import os
import threading
from collections.abc import Iterable
from typing import Any

import structlog
from celery import states
from celery.utils.functional import maybe_list
from celery.worker import control
from celery.worker.state import revoked

from slotkeeper import audit
from slotkeeper.audit import Actor
from slotkeeper.errors import Conflict, DatabaseUnavailable, JobNotFound
from slotkeeper.process import singleton
from tasks import offer_messages
from tasks.celery_app import celery
from tasks.services import dispatcher
from tasks.threads import WorkQueue
from tasks.worker.concurrency import TakenOffer
from tasks.worker.worker import this_worker

log = structlog.get_logger(__name__)

_RETRY_S = 1.0
_CLIENT = Actor("a client of Celery", "Celery")  # Celery does not say which.
_MAX_TRIES = 300
_UNFINISHED_STATES = frozenset({states.PENDING, states.RECEIVED, states.RETRY, states.REJECTED})


class Cancels:
    """Cancels jobs in a thread: the loop that receives a revoke must not wait for the database."""

    def __init__(self) -> None:
        self._queue: WorkQueue[str] = WorkQueue("cancels", self._cancel_all)
        self._pause = threading.Event()

    def put(self, ids: Iterable[str]) -> None:
        """Have these jobs canceled.  Raises RuntimeError: no thread can be started now."""
        for job_id in ids:
            self._queue.put(job_id)

    def _cancel_all(self, ids: list[str]) -> None:
        for job_id in ids:
            try:
                self._cancel(job_id)
            except Exception as error:
                log.error("revoke_failed", job_id=job_id, error=repr(error))

    def _cancel(self, job_id: str) -> None:
        """Cancel the job as soon as the database responds.  Raises DatabaseUnavailable after `_MAX_TRIES` tries."""
        for _ in range(_MAX_TRIES):
            try:
                cancel_job(job_id)
                return
            except DatabaseUnavailable:
                self._pause.wait(_RETRY_S)
        raise DatabaseUnavailable(f"The record stayed away for {_MAX_TRIES * _RETRY_S:.0f} s; revoke it again.")


@singleton
def cancel_queue() -> Cancels:
    return Cancels()


def cancel_job(job_id: str) -> None:
    """Cancel a job; one that has ended stays as it is.  Raises DatabaseUnavailable."""
    try:
        with audit.acting_as(_CLIENT):
            dispatcher().cancel(job_id)
    except Conflict:
        log.debug("revoked_too_late", job_id=job_id)
    except JobNotFound:
        _revoke_message(job_id)


def _revoke_message(task_id: str) -> None:
    """The record does not know it: a message that no worker has admitted yet, or no job at all.  As Celery does."""
    if celery.backend.get_state(task_id) in _UNFINISHED_STATES:
        celery.backend.mark_as_revoked(task_id, reason="revoked")


def is_revoked(task_id: str) -> bool:
    """Return whether this worker has received a revoke of this task."""
    return task_id in revoked


@control.control_command(name="revoke", variadic="task_id", signature="[id1 [id2 [... [idN]]]]")
def revoke(state: Any, task_id: Any, **_: Any) -> dict[str, Any]:
    """Revoke by id: a job is canceled wherever it is, and its server asked to stop it, with or without terminate."""
    ids = {task for task in maybe_list(task_id) or [] if isinstance(task, str)}
    revoked.update(ids)  # for what is still a message only
    cancel_queue().put(sorted(ids))
    return {"ok": f"{len(ids)} are being revoked"}


@control.control_command(
    name="terminate", variadic="task_id", args=[("signal", str)], signature="<signal> [id1 [id2 [... [idN]]]]"
)
def terminate(state: Any, signal: Any, task_id: Any, **_: Any) -> dict[str, Any]:
    """The same as revoke: a job's server stops it, no thread of a worker can be killed."""
    return revoke(state, task_id)


@control.control_command(name="revoke_by_stamped_headers", variadic="headers", signature="[key=value ...]")
def revoke_by_stamped_headers(state: Any, headers: Any, **_: Any) -> dict[str, Any]:
    """Not done: jobs are not found by stamps; revoke them by their ids."""
    return {"ok": "nothing was revoked: jobs are not found by stamped headers, revoke them by their ids"}


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


_UNCHANGED = "nothing was changed: a worker's queues are those of its command line; stop it, or start another"


@control.control_command(name="cancel_consumer", args=[("queue", str)], signature="<queue>")
def cancel_consumer(state: Any, queue: Any = None, **_: Any) -> dict[str, Any]:
    """Not done: what no worker takes is waited for by all."""
    return {"ok": _UNCHANGED}


@control.control_command(name="add_consumer", args=[("queue", str)], signature="<queue> [exchange [type [key]]]")
def add_consumer(state: Any, queue: Any = None, **_: Any) -> dict[str, Any]:
    """Not done: a worker of jobs would take maintenance's messages, and the other way round."""
    return {"ok": _UNCHANGED}
