"""The task `infer`, whose call submits a job.

    infer.delay("zimg", {"prompt": "a sunset"}).get(timeout=60)

A worker receives a wake-up message for an offer, whose task id is the job's id.  A bare client, which is a client
without this code, sends a message without an offer: the worker that receives it submits the job for that client.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog
from celery.exceptions import Ignore, Reject
from celery.result import AsyncResult
from celery.worker.request import Request
from redis.exceptions import RedisError

from routing.admission.submission import Submission
from slotkeeper import trace_context
from slotkeeper.errors import IdempotencyConflict, SlotkeeperError
from slotkeeper.jobs.values import new_job_id
from slotkeeper.registry.identity import Identity
from tasks import offer_messages
from tasks import options as call_options
from tasks.celery_app import celery
from tasks.extensions.control import cancel_queue, is_revoked
from tasks.identity import identify_caller, identify_message
from tasks.offer_messages import is_wake_up
from tasks.results import UNAVAILABLE, notify_refusal
from tasks.retries import RetriedTask
from tasks.services import dispatcher
from tasks.step_tokens import TOKEN_HEADER
from tasks.worker.worker import this_worker

T = TypeVar("T")
log = structlog.get_logger(__name__)

_RETRY_S = 1.0
_MAX_TRIES = 30
# The token, and the headers that tracing libraries add to every task.
_READ_HEADERS = (TOKEN_HEADER, "traceparent", "tracestate", "baggage")


class InferRequest(Request):
    """A request that the worker neither delays nor drops: a wake-up that is held back holds a slot."""

    eta = None
    """A job with an earliest start waits in the database, never in this worker's memory."""

    def revoked(self) -> bool:
        """Return False: a revoke cancels the job in the database, see extensions/control.py."""
        return False


class ResultBackendUnavailable(Exception):
    """The result backend does not answer.  The job and its result are in the database all the same."""


class JobResult(AsyncResult):
    """The result of a submitted job, which says in one sentence that the result backend is away."""

    def get(self, *args: Any, **options: Any) -> Any:
        """As Celery's.  Raises ResultBackendUnavailable."""
        with self._explains_outage():
            return super().get(*args, **options)

    @property
    def state(self) -> Any:
        """As Celery's; also read by `ready`.  Raises ResultBackendUnavailable."""
        with self._explains_outage():
            return super().state

    status = state

    @contextmanager
    def _explains_outage(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, RuntimeError) as error:
            # Celery raises a RuntimeError when it has tried long enough to connect again.
            cause = error.__cause__ if isinstance(error, RuntimeError) else error
            if not isinstance(cause, RedisError):
                raise
            raise ResultBackendUnavailable(
                f"Celery's result backend does not answer ({cause}): start Slotkeeper, or set SLOTKEEPER_RESULT_URL; "
                f"`slotkeeper job {self.id}` shows the result, which is in the database."
            ) from None


class InferTask(RetriedTask):
    """A task whose `apply_async` submits a job; the rest is Celery's."""

    Request = "tasks.inference:InferRequest"
    # A bare client's message is acknowledged after its job is stored.  The pool acknowledges wake-ups at once.
    acks_late = True
    send_events = False  # The relay publishes them, even if Flower enables events at the workers.
    typing = False

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: Any = None,
        **options: Any,
    ) -> AsyncResult:
        """Submit a job, and return when it is stored; see `infer`.  Raises what `Dispatcher.submit` raises."""
        if celery.conf.task_always_eager:  # As Celery's own; the task's body then raises an error with the reason.
            return self.apply(args, kwargs, task_id=task_id, link=link, link_error=link_error, **options)
        headers = options["headers"] if isinstance(options.get("headers"), Mapping) else {}
        given = {**options, **_parent_ids(options), "link": link, "link_error": link_error, "shadow": shadow}
        given |= {"headers": _other_headers(headers)} if headers else {}
        given |= _trace_options(kwargs or {}, options, headers)
        job_id, sender = task_id or new_job_id(), identify_caller(headers)
        submission = call_options.read_submission(job_id, args or (), kwargs or {}, given, sender)
        accepted = _submit(submission, sender, accepts_other_id=task_id is None)
        result = self.AsyncResult(accepted)
        if options.get("add_to_parent", True) and celery.current_worker_task is not None:
            celery.current_worker_task.add_trail(result)
        return result

    def AsyncResult(self, task_id: str, **options: Any) -> JobResult:
        """Return the result of the job with this id."""
        return JobResult(task_id, backend=self.backend, app=celery, **options)


def _submit(submission: Submission, sender: Identity, *, accepts_other_id: bool = False) -> str:
    """Submit a job, and return the id of the accepted one.

    accepts_other_id: it may be that of an earlier job with the same idempotency key.
    Raises what `Dispatcher.submit` raises.
    """
    (receipt,) = dispatcher().submit([submission], sender)
    if receipt.accepted.id != submission.id and not accepts_other_id:  # The client waits for the id that it chose.
        raise IdempotencyConflict(
            f"This idempotency_key names the job {receipt.accepted.id!r}, which was accepted before; "
            "wait for that one, or use a new key.",
            job_id=receipt.accepted.id,
        )
    return receipt.accepted.id


def _parent_ids(options: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of the task that calls this one, by the rule of Celery's `apply_async`."""
    parent = celery.current_worker_task
    if parent is None:
        return {}
    return {
        "parent_id": options.get("parent_id") or parent.request.id,
        "root_id": options.get("root_id") or parent.request.root_id,
    }


def _other_headers(headers: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the headers of a call that mean nothing here: `read_submission` refuses them."""
    return {name: value for name, value in headers.items() if name not in _READ_HEADERS} or None


def _trace_options(kwargs: Any, options: dict[str, Any], headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option `traceparent` of a call: from its headers, OpenTelemetry, the calling task, or environment."""
    if "traceparent" in options or "traceparent" in kwargs:
        return {}
    return {
        "traceparent": headers.get("traceparent") or trace_context.get_current_traceparent() or _caller_traceparent()
    }


def _caller_traceparent() -> str | None:
    """Return the traceparent of the calling task, or without one, that of this process's environment."""
    caller = celery.current_worker_task
    return trace_context.get_process_traceparent() if caller is None else _message_traceparent(caller.request)


def _with_docstring_of(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the task with the docstring of `call`, for `help(infer)`: to its callers the task is a submit."""

    def describe(task: Callable[..., Any]) -> Callable[..., Any]:
        task.__doc__ = call.__doc__
        return task

    return describe


def _not_callable_message() -> str:
    return (
        "infer runs in Slotkeeper's workers only: infer.delay(model, payload) submits a job and answers an "
        "AsyncResult, whose get() waits for the result; with task_always_eager it submits nothing"
    )


@celery.task(
    bind=True,
    base=InferTask,
    name=offer_messages.TASK,
    __signature__=call_options.signature(),
)
@_with_docstring_of(call_options.infer)
def infer(self: InferTask, *args: Any, **kwargs: Any) -> Any:
    """Submit the job of a bare client's message.  The pool handles wake-ups without this function (pool.py)."""
    if self.request.called_directly or self.request.is_eager:
        raise RuntimeError(_not_callable_message())
    if not is_wake_up(self.request.headers):
        _submit_for_client(self, args, kwargs)
    raise Ignore


def _submit_for_client(self: InferTask, args: Any, kwargs: Any) -> None:
    """Submit the job of a bare client.  Its message is acknowledged only after the commit."""
    request, job_id = self.request, str(self.request.id)
    if is_revoked(job_id) and not _job_exists(job_id):
        _retry_while_away(lambda: self.backend.mark_as_revoked(job_id, "revoked", request=request))
        return
    try:
        sender = _retry_while_away(lambda: identify_message(request.headers))
        submission = call_options.read_submission(job_id, args, kwargs, _options_from_message(request), sender)
        _retry_while_away(lambda: _submit(submission, sender))
    except SlotkeeperError as error:
        _report_refusal(request, error)
    if is_revoked(job_id):  # The workers received the revoke before this job was stored, and found none to cancel.
        cancel_queue().put([job_id])


def _report_refusal(request: Any, refusal: SlotkeeperError) -> None:
    """Notify a bare client that its job was refused, unless a job with that id exists: it has its own result."""
    # The sentence of the refusal may quote what the client sent, so it is not logged.
    log.warning("bare_message_refused", job_id=request.id, code=refusal.code)
    if not _retry_while_away(lambda: _job_exists(request.id)):
        _retry_while_away(lambda: notify_refusal(request, refusal))


def _job_exists(job_id: str) -> bool:
    return dispatcher().store.get_state(job_id) is not None


def _retry_while_away(function: Callable[[], T]) -> T:
    """Call `function` until the database, Redis and the result backend are available, and return its result.

    Raises Reject after `_MAX_TRIES` tries: until then the message is the only copy, so it returns to the broker.
    """
    for _ in range(_MAX_TRIES):
        try:
            return function()
        except UNAVAILABLE:
            this_worker().heartbeat.wait(_RETRY_S)
    raise Reject("the database is away", requeue=True)


def _options_from_message(request: Any) -> dict[str, Any]:
    """Return the options of `apply_async` that a message carries."""
    time_limit, soft_time_limit = request.timelimit or (None, None)
    return {
        "priority": _message_priority(request),
        "expires": request.expires,
        "eta": request.eta,
        "time_limit": time_limit,
        "soft_time_limit": soft_time_limit,
        "shadow": request.shadow,
        "ignore_result": request.ignore_result,
        "link": request.callbacks,
        "link_error": request.errbacks,
        "chain": request.chain,
        "chord": request.chord,
        "group_id": request.group,
        "group_index": request.group_index,
        "root_id": request.root_id,
        "parent_id": request.parent_id,
        "traceparent": None if "traceparent" in (request.kwargs or {}) else _message_traceparent(request),
        "stamped_headers": request.stamped_headers,
        **(request.stamps or {}),
    }


def _message_traceparent(request: Any) -> str | None:
    """Return the traceparent in the headers of a message."""
    traceparent = (request.headers or {}).get("traceparent")
    return traceparent if isinstance(traceparent, str) else None


def _message_priority(request: Any) -> int | None:
    priority = (request.delivery_info or {}).get("priority")
    return priority if priority in range(1, 10) else None
