"""`infer`: the task that runs one job.  Python clients call it too: their call is a submit like any other.

    infer.delay("zimg", {"prompt": "a sunset"}).get(timeout=60)

What a worker receives is a wake-up for an offer, with the job's id as the task's id.  A message from a client
without this code carries no offer; the worker that gets it submits the job in its stead.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import structlog
from celery import Task as CeleryTask
from celery.exceptions import Ignore, Reject, Retry
from celery.result import AsyncResult
from celery.worker.request import Request

from jobs.crash import crash_at
from jobs.errors import IdempotencyConflict, RecordUnavailable, SlotkeeperError
from jobs.record import new_job_id
from jobs.states import State
from routing import exact
from routing.dispatcher import Settled, Task
from routing.outcome import Kind, Outcome
from routing.submission import Submission
from tasks import asking, messages
from tasks.celery_app import celery
from tasks.heartbeat import Hold
from tasks.revoking import cancels, is_revoked
from tasks.runner import HandBack, LeaseLost, Misconfigured, Watch, when_stored
from tasks.settlement import settle
from tasks.telling import AWAY, JobFailed, tell_refusal
from tasks.wiring import dispatcher
from tasks.worker import this_worker

T = TypeVar("T")
log = structlog.get_logger(__name__)

_STORE_AGAIN_S = 1.0
_ADMIT_TRIES = 30


class ServerFault(Exception):
    """The server answered with an error or with nonsense, and the job waits to be tried again: (code, message)."""


class InferRequest(Request):
    """Acknowledges a wake-up as soon as a thread has it, a bare client's message only when it is recorded."""

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        self._eta = None  # A job waits in the record, never in this worker's memory.

    def on_accepted(self, pid: Any, time_accepted: Any) -> None:
        super().on_accepted(pid, time_accepted)
        if messages.is_wake_up(self.request_dict):
            self.acknowledge()

    def revoked(self) -> bool:
        """Never: dropped here, an offer would hold its slot for nobody.  A revoke is a cancel, see revoking.py."""
        return False


class InferTask(CeleryTask):
    """`apply_async` submits, `retry` lets the job wait in the record; the rest is Celery's."""

    Request = "tasks.inference:InferRequest"
    # S1's figures (R95, R96).  A model's configuration overrides them; ±10 % of jitter is added by the policy.
    autoretry_for = (ServerFault,)
    retry_backoff = 1
    retry_backoff_max = 30
    retry_jitter = False
    max_retries = 50
    acks_late = True  # see InferRequest
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
        given = {**options, **_parentage(options), "link": link, "link_error": link_error, "shadow": shadow}
        job_id = task_id or new_job_id()
        accepted = _submit(asking.read(job_id, args or (), kwargs or {}, given), may_be_another=task_id is None)
        result: AsyncResult = AsyncResult(accepted, backend=self.backend, app=celery)
        if options.get("add_to_parent", True) and celery.current_worker_task is not None:
            celery.current_worker_task.add_trail(result)
        return result

    def retry(  # type: ignore[override]
        self, args: Any = None, kwargs: Any = None, exc: Any = None, **options: Any
    ) -> Retry:
        """Say that the job waits in the record; Celery's autoretry calls this.  Always raises Retry."""
        if not isinstance(exc, ServerFault):
            raise exc or RuntimeError("infer is retried by its own faults only")
        crash_at("retry_committed")
        raise Retry("The server answered wrongly; the job waits in the record.", exc)


def _submit(submission: Submission, *, may_be_another: bool = False) -> str:
    """Id of the accepted job.  Raises what dispatcher.submit raises."""
    (receipt,) = dispatcher().submit([submission])
    if receipt.accepted.id != submission.id and not may_be_another:  # Its client waits for the id that it chose.
        raise IdempotencyConflict(
            f"This idempotency_key names the job {receipt.accepted.id!r}, which was accepted before; "
            "wait for that one, or use a new key.",
            job_id=receipt.accepted.id,
        )
    return receipt.accepted.id


def _parentage(options: dict[str, Any]) -> dict[str, Any]:
    """Which task called this one, as Celery's own apply_async would say."""
    parent = celery.current_worker_task
    if parent is None:
        return {}
    return {
        "parent_id": options.get("parent_id") or parent.request.id,
        "root_id": options.get("root_id") or parent.request.root_id,
    }


def _described_by(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For `help`: who calls the task submits a job, whatever a worker does with its message."""

    def describe(task: Callable[..., Any]) -> Callable[..., Any]:
        task.__doc__ = call.__doc__
        return task

    return describe


def _sentence() -> str:
    return (
        "infer runs in Slotkeeper's workers only: infer.delay(model, payload) submits a job and answers an "
        "AsyncResult, whose get() waits for the result"
    )


@celery.task(
    bind=True,
    base=InferTask,
    name=messages.TASK,
    __signature__=inspect.signature(asking.infer),
)
@_described_by(asking.infer)
def infer(self: InferTask, *args: Any, **kwargs: Any) -> Any:
    """Run the job that this wake-up offers.  A second delivery finds nothing to start and ends."""
    if self.request.called_directly or self.request.is_eager:
        raise RuntimeError(_sentence())
    if not messages.is_wake_up(self.request.headers):
        _admit(self, args, kwargs)
        raise Ignore
    offer = messages.read_offer(str(self.request.id), args, self.request.headers)
    if offer is None:
        log.warning("wake_up_not_understood", job_id=self.request.id)
        raise Ignore
    worker = this_worker()
    task = worker.start(offer)
    if task is None:
        raise Ignore
    with worker.holding(task) as hold:
        try:
            return _conclude(self, task, hold, _carry_out(task, hold))
        except RecordUnavailable as error:  # The lease is gone, or this worker is: another will run it again.
            log.error("result_not_stored", job_id=task.run.job.id, error=str(error))
            raise Ignore from None


def _admit(self: InferTask, args: Any, kwargs: Any) -> None:
    """Submit for a client that could not.  Its message is acknowledged only after this has committed."""
    request, job_id = self.request, str(self.request.id)
    if is_revoked(job_id) and not _is_known(job_id):
        _patiently(lambda: self.backend.mark_as_revoked(job_id, "revoked", request=request))
        return
    try:
        submission = asking.read(job_id, args, kwargs, _options_of(request))
        _patiently(lambda: _submit(submission))
    except SlotkeeperError as error:
        _refuse(request, error)
    if is_revoked(job_id):  # Who heard of it while there was no job yet found none.
        cancels().ask([job_id])


def _refuse(request: Any, refusal: SlotkeeperError) -> None:
    """Tell a bare client why there is no job; a job that is there already has an end of its own."""
    log.warning("bare_message_refused", job_id=request.id, code=refusal.code)  # Its sentence may quote the client.
    if not _patiently(lambda: _is_known(request.id)):
        _patiently(lambda: tell_refusal(request, refusal))


def _is_known(job_id: str) -> bool:
    return dispatcher().store.state_of(job_id) is not None


def _patiently(act: Callable[[], T]) -> T:
    """Until it is done, the message is the only copy: wait for who is away, then leave it to the broker."""
    for _ in range(_ADMIT_TRIES):
        try:
            return act()
        except AWAY:
            this_worker().heartbeat.wait(_STORE_AGAIN_S)
    raise Reject("the database is away", requeue=True)


def _options_of(request: Any) -> dict[str, Any]:
    """What a message says, as options of apply_async."""
    time_limit, soft_time_limit = request.timelimit or (None, None)
    return {
        "priority": _tier_of(request),
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
        "stamped_headers": request.stamped_headers,
        **(request.stamps or {}),
    }


def _tier_of(request: Any) -> int | None:
    priority = (request.delivery_info or {}).get("priority")
    return priority if priority in range(1, 10) else None


def _carry_out(task: Task, hold: Hold) -> Outcome:
    try:
        if task.run.cancel_requested:
            return Outcome(Kind.CANCELED, message="Canceled before it was sent.")
        when_stored(lambda: this_worker().confirm(task, hold), hold)
        watch = when_stored(lambda: Watch(task, hold, dispatcher().store, dispatcher().fleet), hold)
        return watch.outcome()
    except HandBack:
        _hand_back(task, hold)
        raise Ignore from None
    except LeaseLost:
        return Outcome(Kind.UNKNOWN, code="lease_lost")
    except RecordUnavailable:
        raise  # It says nothing of the server, nor of the job.
    except Misconfigured as error:
        return Outcome(Kind.RETRY, code="misconfigured", message=f"The model's configuration is wrong: {error}.")
    except Exception as error:
        log.exception("run_failed", job_id=task.run.job.id)
        return Outcome(Kind.LOST, code="internal_error", message=f"The worker failed under it: {type(error).__name__}.")


def _hand_back(task: Task, hold: Hold) -> None:
    """Let another worker resume: the server goes on with the job, the slot stays taken."""
    settled = when_stored(lambda: dispatcher().hand_back(task), hold)
    log.info("handed_back", job_id=task.run.job.id, stored=settled)


def _conclude(self: InferTask, task: Task, hold: Hold, outcome: Outcome) -> Any:
    """Settle, hand on, and say in Celery's words what came of it."""
    if outcome.kind is Kind.UNKNOWN:
        return _ended_elsewhere(task)
    settled = _settle(task, hold, outcome)
    if settled.moved is None:
        return _ended_elsewhere(task)
    match settled.moved.to:
        case State.COMPLETED:
            return exact.unwritten(outcome.result)
        case State.QUEUED:
            raise Retry(f"Back to its place: {outcome.message or outcome.kind}")
        case State.DELAYED:
            # On to InferTask.retry, by Celery's autoretry.
            raise ServerFault(outcome.code or "server_error", outcome.message)
        case State.CANCELED | State.EXPIRED as ended:
            _show_revoked(self, expired=ended is State.EXPIRED)
            raise Ignore
        case _:
            raise JobFailed(outcome.code or outcome.kind.value, outcome.message)


def _show_revoked(self: InferTask, *, expired: bool) -> None:
    """To Flower.  That nobody can be shown it changes nothing."""
    try:
        self.send_event("task-revoked", terminated=False, signum=None, expired=expired)
    except Exception as error:
        log.warning("event_not_sent", error=str(error))


def _settle(task: Task, hold: Hold, outcome: Outcome) -> Settled:
    worker = this_worker()
    canceling = hold.cancel or task.run.cancel_requested
    settled = when_stored(lambda: settle(task, outcome, canceling=canceling, taker=worker.taker), hold)
    worker.go_on(task.held.fleet, settled.next)
    return settled


def _ended_elsewhere(task: Task) -> Any:
    """This run counts no more: its lease was lost, or the server's push was quicker than the poll.

    Whoever ended it has told everybody.  Only the result of a push is left for this task to say.
    """
    worker = this_worker()
    run = task.run
    worker.go_on(task.held.fleet, dispatcher().leave(task.held, run.job.id, run.attempt, taker=worker.taker))
    job = dispatcher().store.get(run.job.id)
    if job is not None and job.state is State.COMPLETED and job.attempt == run.attempt:
        return exact.plain(job.result) if job.result else None
    raise Ignore
