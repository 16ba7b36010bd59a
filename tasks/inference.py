"""`infer`: the task that runs one job.  Python clients call it too: their call is a submit like any other.

    infer.delay("zimg", {"prompt": "a sunset"}).get(timeout=60)

What a worker receives is a wake-up for an offer, with the job's id as the task's id.  A message from a client
without this code carries no offer; the worker that gets it submits the job in its stead.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import structlog
from celery.exceptions import Ignore, Reject
from celery.result import AsyncResult
from celery.worker.request import Request

from routing.admission.submission import Submission
from slotkeeper import trace_context
from slotkeeper.errors import IdempotencyConflict, SlotkeeperError
from slotkeeper.jobs.values import new_job_id
from tasks import offer_messages
from tasks import options as call_options
from tasks.celery_app import celery
from tasks.extensions.control import cancel_queue, is_revoked
from tasks.offer_messages import is_wake_up
from tasks.results import UNAVAILABLE, notify_refusal
from tasks.retries import RetriedTask
from tasks.services import dispatcher
from tasks.worker.worker import this_worker

T = TypeVar("T")
log = structlog.get_logger(__name__)

_RETRY_S = 1.0
_MAX_TRIES = 30
_TRACE_HEADERS = ("traceparent", "tracestate", "baggage")  # headers that instruments add to any task


class InferRequest(Request):
    """Neither waits nor is revoked: jobs wait in the database, and an offer that is dropped holds its slot."""

    eta = None
    """A job with an earliest start waits in the database, never in this worker's memory."""

    def revoked(self) -> bool:
        """Return False: the job of the message is canceled, see extensions/control.py."""
        return False


class InferTask(RetriedTask):
    """`apply_async` submits; the rest is Celery's."""

    Request = "tasks.inference:InferRequest"
    acks_late = True  # A bare client's message is acknowledged when its job is recorded, a wake-up by the pool.
    send_events = False  # The relay publishes them, also where Flower asks workers to.
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
        """Submit a job, see `infer`.  Raises what dispatcher.submit raises.  Answers once the job is recorded."""
        if celery.conf.task_always_eager:  # As Celery does; the body says that it runs in no such process.
            return self.apply(args, kwargs, task_id=task_id, link=link, link_error=link_error, **options)
        given = {**options, **_parent_ids(options), "link": link, "link_error": link_error, "shadow": shadow}
        given |= _trace_options(kwargs or {}, options)
        job_id = task_id or new_job_id()
        accepted = _submit(
            call_options.read_submission(job_id, args or (), kwargs or {}, given), accepts_other_id=task_id is None
        )
        result: AsyncResult = AsyncResult(accepted, backend=self.backend, app=celery)
        if options.get("add_to_parent", True) and celery.current_worker_task is not None:
            celery.current_worker_task.add_trail(result)
        return result


def _submit(submission: Submission, *, accepts_other_id: bool = False) -> str:
    """Id of the accepted job.  Raises what dispatcher.submit raises."""
    (receipt,) = dispatcher().submit([submission])
    if receipt.accepted.id != submission.id and not accepts_other_id:  # Its client waits for the id that it chose.
        raise IdempotencyConflict(
            f"This idempotency_key names the job {receipt.accepted.id!r}, which was accepted before; "
            "wait for that one, or use a new key.",
            job_id=receipt.accepted.id,
        )
    return receipt.accepted.id


def _parent_ids(options: dict[str, Any]) -> dict[str, Any]:
    """Which task called this one, as Celery's own apply_async would say."""
    parent = celery.current_worker_task
    if parent is None:
        return {}
    return {
        "parent_id": options.get("parent_id") or parent.request.id,
        "root_id": options.get("root_id") or parent.request.root_id,
    }


def _trace_options(kwargs: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The trace that the caller names, or is at: by its headers, OpenTelemetry, its own task, or its environment.

    Of headers only those of traces are taken; others stay, and are refused.
    """
    headers = options.get("headers")
    if not isinstance(headers, Mapping):
        headers = {}
    other_headers = {name: value for name, value in headers.items() if name not in _TRACE_HEADERS}
    taken = {"headers": other_headers or None} if headers else {}
    if "traceparent" in options or "traceparent" in kwargs:
        return taken
    return {
        **taken,
        "traceparent": headers.get("traceparent") or trace_context.get_current_traceparent() or _caller_traceparent(),
    }


def _caller_traceparent() -> str | None:
    """A worker's own environment says nothing of the tasks that run in it."""
    caller = celery.current_worker_task
    return trace_context.get_process_traceparent() if caller is None else _message_traceparent(caller.request)


def _with_docstring_of(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For `help`: who calls the task submits a job, whatever a worker does with its message."""

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
    """Submit the job of a client that could not.  A wake-up is not run by this function, but by the pool (pool.py)."""
    if self.request.called_directly or self.request.is_eager:
        raise RuntimeError(_not_callable_message())
    if not is_wake_up(self.request.headers):
        _submit_for_client(self, args, kwargs)
    raise Ignore


def _submit_for_client(self: InferTask, args: Any, kwargs: Any) -> None:
    """Submit for a client that could not.  Its message is acknowledged only after this has committed."""
    request, job_id = self.request, str(self.request.id)
    if is_revoked(job_id) and not _job_exists(job_id):
        _retry_while_away(lambda: self.backend.mark_as_revoked(job_id, "revoked", request=request))
        return
    try:
        submission = call_options.read_submission(job_id, args, kwargs, _options_from_message(request))
        _retry_while_away(lambda: _submit(submission))
    except SlotkeeperError as error:
        _report_refusal(request, error)
    if is_revoked(job_id):  # Who heard of it while there was no job yet found none.
        cancel_queue().put([job_id])


def _report_refusal(request: Any, refusal: SlotkeeperError) -> None:
    """Tell a bare client why there is no job; a job that is there already has an end of its own."""
    log.warning("bare_message_refused", job_id=request.id, code=refusal.code)  # Its sentence may quote the client.
    if not _retry_while_away(lambda: _job_exists(request.id)):
        _retry_while_away(lambda: notify_refusal(request, refusal))


def _job_exists(job_id: str) -> bool:
    return dispatcher().store.get_state(job_id) is not None


def _retry_while_away(function: Callable[[], T]) -> T:
    """Until it is done, the message is the only copy: wait for who is away, then leave it to the broker."""
    for _ in range(_MAX_TRIES):
        try:
            return function()
        except UNAVAILABLE:
            this_worker().heartbeat.wait(_RETRY_S)
    raise Reject("the database is away", requeue=True)


def _options_from_message(request: Any) -> dict[str, Any]:
    """What a message says, as options of apply_async."""
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
    """In which trace a message was sent, by its headers."""
    found = (request.headers or {}).get("traceparent")
    return found if isinstance(found, str) else None


def _message_priority(request: Any) -> int | None:
    priority = (request.delivery_info or {}).get("priority")
    return priority if priority in range(1, 10) else None
