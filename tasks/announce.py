"""How the outside is told of offers and ends: by Celery."""

from functools import partial

from celery import states
from celery.app.task import Context
from celery.exceptions import TaskRevokedError

from jobs.states import State
from jobs.store import Moved
from routing.queues import Offer
from tasks import messages
from tasks.celery_app import celery
from tasks.publisher import publisher


class JobFailed(Exception):
    """A job that ended without a result: (code, message)."""


class CeleryAnnouncer:
    """Publishes wake-ups, and tells Celery's clients of jobs that end outside of a task."""

    def offered(self, offer: Offer) -> None:
        publisher().soon(partial(_wake, offer))

    def ended(self, moved: Moved, *, by_worker: bool) -> None:
        if moved.webhook_id is not None:
            send = partial(celery.send_task, "webhooks.send", args=[moved.webhook_id], ignore_result=True, retry=False)
            publisher().soon(send)
        if not by_worker:
            _store_end(moved)


def _wake(offer: Offer) -> None:
    from tasks.wiring import dispatcher

    headers = dispatcher().store.headers(offer.job_id)
    if headers is not None:
        _, tier, failures, envelope = headers
        messages.publish(offer, tier, failures, envelope)


def _store_end(moved: Moved) -> None:
    """Let AsyncResult.get() return: no task will ever say how this job ended."""
    from tasks.wiring import dispatcher

    job = dispatcher().store.get(moved.job.id)
    if job is None or job.envelope is None:  # None: nobody waits for it at the result backend
        return
    request = Context(id=job.id, task=messages.TASK, **messages.unpack_envelope(job.envelope))
    if job.state is State.COMPLETED:
        celery.backend.mark_as_done(job.id, _result(job.result), request=request)
    elif job.state in (State.CANCELED, State.EXPIRED):
        error = TaskRevokedError(job.error_message or job.state)
        celery.backend.mark_as_failure(job.id, error, request=request, state=states.REVOKED)
    else:
        failed = JobFailed(job.error_code, job.error_message)
        celery.backend.mark_as_failure(job.id, failed, request=request)


def _result(text: str | None) -> object:
    from kombu.utils import json

    return None if text is None else json.loads(text)
