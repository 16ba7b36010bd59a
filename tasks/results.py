"""Notifies Celery's clients of ended jobs: results, links, errbacks, parts of chords, the next steps of chains.

The database keeps a notification for each job that came by Celery, from its last transition until result backend and
broker have taken it (slotkeeper/outbox/result_notifications.py).  A thread of each process sends those of the jobs that
end there, so that neither a slot nor a worker's thread waits for a backend that is away; the maintenance task
`tell_due` sends the others later.  So each is sent at least once.  Sent twice, a result, a part of a chord and a next
step that is `infer` have the same effect; another task may be sent twice, with the same task id.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from queue import Full
from typing import Any
from uuid import NAMESPACE_OID, uuid5

import structlog
from celery import Signature, signature, states
from celery import Task as CeleryTask
from celery.app import pop_current_task, push_current_task
from celery.app.task import Context
from celery.exceptions import TaskRevokedError
from celery.signals import worker_shutdown
from kombu.exceptions import EncodeError, OperationalError
from redis.exceptions import ConnectionError as RedisUnreachable
from redis.exceptions import TimeoutError as RedisTimeout

from routing.queue.queues import Offer
from slotkeeper import json_text
from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.errors import DatabaseUnavailable, SlotkeeperError, TooManyRequests
from slotkeeper.jobs.states import State
from slotkeeper.jobs.store import JobStore, Transition
from slotkeeper.jobs.values import Job, QueuedJob
from slotkeeper.large_json import is_expensive_to_parse
from slotkeeper.outbox.result_notifications import ResultNotification, ResultNotifications
from slotkeeper.process import singleton
from tasks import offer_messages
from tasks.celery_app import celery
from tasks.offer_messages import publish_queue
from tasks.security.celery_tokens import TokenSubject
from tasks.step_tokens import acting_for
from tasks.threads import WorkQueue

log = structlog.get_logger(__name__)

_MAX_WAITING = 10_000  # notifications of one process in memory; the database has the others
_CLAIM_LIMIT = 1_000
_BATCH = 100
_RETRY_S = 1.0
_FLUSH_S = 3.0  # of a worker that stops; the time that it gets is not much longer
# Backend, broker or database are away: the same will succeed later.
UNAVAILABLE = (DatabaseUnavailable, OperationalError, RedisUnreachable, RedisTimeout, OSError)
# Errors for which a step is refused: each try would raise the same.
_REFUSALS = (SlotkeeperError, EncodeError, TypeError, ValueError, LookupError, AttributeError)


class NotificationFailed(Exception):
    """A notification that failed for another reason than an outage."""


class JobFailed(Exception):
    """A job that ended without a result: (code, message)."""


class ResultNotifier:
    """Sends notifications in a thread, one after another, and deletes them from the database."""

    def __init__(self, notifications: ResultNotifications, store: JobStore) -> None:
        self._notifications, self._store = notifications, store
        self._queue: WorkQueue[ResultNotification] = WorkQueue(
            "result-notifier", self.notify, max_pending=_MAX_WAITING, batch=_BATCH
        )
        self._pause = threading.Event()
        worker_shutdown.connect(self._flush)

    def put(self, notification: ResultNotification) -> None:
        """Send a notification soon.  If too many wait before it, `notify_overdue` of some process sends it later."""
        try:
            self._queue.put(notification)
        except (Full, RuntimeError) as error:
            log.warning("notification_deferred", job_id=notification.job_id, error=repr(error))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all waiting notifications are sent; False: that takes longer, and `notify_overdue` sends them."""
        return self._queue.flush(timeout_s)

    def _flush(self, **_: object) -> None:
        """Send what waits when a worker stops, so that clients need not wait for `notify_overdue`."""
        if not self.flush(_FLUSH_S):
            log.info("notifications_deferred")

    def notify_overdue(self) -> None:
        """Send notifications that were not sent because a process died or the backend was away."""
        if self._queue.is_empty:
            for notification in self._notifications.claim_due(now_ms(), _CLAIM_LIMIT):
                self.put(notification)

    def notify(self, batch: list[ResultNotification]) -> None:
        """Send these, and delete from the database those that were sent."""
        notified = [notification.id for notification in batch if self._notify_one(notification)]
        try:
            if notified:
                crash_at("result_notified")
                self._notifications.delete(notified)
        except DatabaseUnavailable as error:
            log.warning("notification_not_deleted", count=len(notified), error=str(error))

    def _notify_one(self, notification: ResultNotification) -> bool:
        """Send one, and return whether it was sent.  Waits while the backend is away: no other could be sent either."""
        while True:
            try:
                job = self._store.get(notification.job_id)
                if job is not None and self._notifications.is_pending(notification.id):
                    (_notify_in_subprocess if is_expensive_to_parse(job.result or "") else notify_clients)(job)
                return True
            except UNAVAILABLE as error:
                log.warning("notification_postponed", job_id=notification.job_id, error=str(error))
                self._pause.wait(_RETRY_S)
            except Exception as error:
                log.error("notification_failed", job_id=notification.job_id, error=repr(error))
                return False


def _notify_in_subprocess(job: Job) -> None:
    """Notify of a large result in a separate process: Celery's objects of it would block all threads.

    Raises OSError if broker, backend or database are away; NotificationFailed for any other end of that process, such
    as by the kernel for its memory: it would be the same at once, and other notifications must not wait for it.
    """
    ended = subprocess.run([sys.executable, "-P", "-m", "tasks.notify_large_result", job.id], check=False)
    if ended.returncode == os.EX_TEMPFAIL:
        raise OSError("the process that notifies of a large result reached no broker, backend or database")
    if ended.returncode:
        raise NotificationFailed(f"the process that notifies of a large result ended with status {ended.returncode}")


# -- one end ---------------------------------------------------------------------------------------------------


def notify_clients(job: Job) -> None:
    """Notify the clients that wait for this job.  Raises what backend, broker and database raise when they are away."""
    request = offer_messages.task_context(job)
    with _as_current_task(request), acting_for(_subject(job, request)):
        match job.state:
            case State.COMPLETED:
                _notify_result(job, request)
            case State.CANCELED | State.EXPIRED:
                _notify_failure(job, request, TaskRevokedError(job.error_message or job.state.value), states.REVOKED)
            case _:
                _notify_failure(job, request, JobFailed(job.error_code, job.error_message), states.FAILURE)


def notify_refusal(request: Context, refusal: SlotkeeperError) -> None:
    """Notify the clients that wait for a message that has not become a job.  Raises as notify_clients."""
    error = JobFailed(refusal.code, refusal.detail)
    celery.backend.mark_as_failure(str(request.id), error, request=request, store_result=not request.ignore_result)


class _EndedJob(CeleryTask):
    """What `infer` is to Celery while it sends what follows a job: its name, and the request that stands for the job.

    The task itself runs jobs, and so cannot be loaded here, where all who end one come by.
    """

    name = offer_messages.TASK


@singleton
def _ended_job() -> CeleryTask:
    _EndedJob.bind(celery)
    return _EndedJob()


@contextmanager
def _as_current_task(request: Context) -> Iterator[None]:
    """What is sent meanwhile is sent by this job, so that it is found among its result's children."""
    task = _ended_job()
    push_current_task(task)
    task.request_stack.push(request)
    try:
        yield
    finally:
        task.request_stack.pop()
        pop_current_task()


def _subject(job: Job, request: Context) -> TokenSubject:
    """Return the tenant and key for which the steps after a job are sent: those of the job."""
    return TokenSubject(job.tenant, request.get("key_id"), request.get("key_owner"))


def _notify_result(job: Job, request: Context) -> None:
    """First what follows, then the result: with that there, nothing that follows is sent a second time."""
    result = None if job.result is None else json_text.loads(job.result)
    if request.ignore_result or celery.backend.get_task_meta(job.id, cache=False)["status"] != states.SUCCESS:
        for link in _link_signatures(job, request.callbacks, "link"):
            _send_step(link, result, request)
        if request.chain:
            _send_step(signature(request.chain[-1], app=celery), result, request, chain=request.chain[:-1])
    celery.backend.mark_as_done(job.id, result, request=request)


def notify_too_large(job: Job) -> None:
    """Report a result that is too large for the result backend as a failure that says where the result is.

    Raises as notify_clients.
    """
    request = offer_messages.task_context(job)
    hint = f"read it with GET /queue/jobs/{job.id}"
    error = JobFailed("result_too_large", f"The result is too large for Celery's result backend; {hint}.")
    with _as_current_task(request), acting_for(_subject(job, request)):
        _notify_failure(job, request, error, states.FAILURE)


def _notify_failure(job: Job, request: Context, error: Exception, state: str) -> None:
    request.errbacks = _link_signatures(job, request.errbacks, "errback")
    try:
        celery.backend.mark_as_failure(
            job.id, error, request=request, store_result=not request.ignore_result, state=state
        )
    except (DatabaseUnavailable, TooManyRequests):
        raise
    except _REFUSALS as refusal:
        log.warning("errback_refused", job_id=job.id, error=str(refusal))


def _link_signatures(job: Job, links: Any, kind: str) -> list[Signature]:
    """Return the signatures with task ids that are the same whenever the end is published again."""
    found = []
    for n, link in enumerate(links or ()):
        step = signature(link, app=celery).clone()
        if step.subtask_type is None:  # A canvas names its own parts.
            step.options.setdefault("task_id", str(uuid5(NAMESPACE_OID, f"{job.id} {job.attempt} {kind} {n}")))
        found.append(step)
    return found


def _send_step(step: Signature, result: Any, request: Context, **options: Any) -> None:
    """Send a step that follows.  If it is refused, it fails with the reason, as do the steps after it."""
    try:
        step.apply_async((result,), parent_id=request.id, root_id=request.root_id or request.id, **options)
    except (DatabaseUnavailable, TooManyRequests):
        raise
    except _REFUSALS as refusal:
        log.warning("step_refused", job_id=request.id, step=step.get("task"), error=str(refusal))
        _fail_step(step, refusal, options.get("chain"))


def _fail_step(step: Signature, refusal: Exception, chain: Any) -> None:
    given = step.options
    request = Context(
        id=given.get("task_id"),
        group=given.get("group_id"),
        group_index=given.get("group_index"),
        chord=given.get("chord"),
        errbacks=given.get("link_error"),
        chain=chain,
        delivery_info={},
    )
    if request.id is None:
        return
    error = JobFailed(refusal.code, refusal.detail) if isinstance(refusal, SlotkeeperError) else refusal
    celery.backend.mark_as_failure(request.id, error, request=request)


class CeleryNotifier:
    """Publishes the messages of offers, and has Celery's clients notified of ends."""

    def __init__(self, store: JobStore, result_notifier: ResultNotifier) -> None:
        self._store, self._result_notifier = store, result_notifier

    def wake_worker(self, offer: Offer, new: QueuedJob | None) -> None:
        publish = (
            partial(self._publish_waiting_job, offer)
            if new is None
            else partial(offer_messages.publish_offer, offer, new.priority, failures=0)
        )
        publish_queue().put(publish)

    def notify_ended(self, transition: Transition) -> None:
        if transition.notification_id is not None:
            self._result_notifier.put(ResultNotification(transition.notification_id, transition.job.id))

    def _publish_waiting_job(self, offer: Offer) -> None:
        """Publish an offer of a job that has waited, and may have run."""
        headers = self._store.get_message_headers(offer.job_id)
        if headers is not None:
            _, priority, failures, _ = headers
            offer_messages.publish_offer(offer, priority, failures)
