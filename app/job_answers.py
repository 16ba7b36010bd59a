"""Response bodies for jobs."""

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from app.schemas.base import PROVIDED, From, ResponseSchema, Time
from routing.admission.constraints import decode_constraints
from routing.admission.labels import decode_labels
from routing.queries import explain, job_timeline
from routing.queries.positions import QueuePosition, StartEstimate
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import FINAL_STATES, Reason, State
from slotkeeper.jobs.values import AcceptedJob, Job
from slotkeeper.outbox.event_reader import OutboxEvent
from slotkeeper.urls import mask_url

NextStep = Literal["starting", "waiting", "later", "unknown"]

_ESTIMATE: Any = Field(
    description="Seconds from now: (jobs of its model before it + 1) × mean slot time of its model's latest runs / "
    "slots of its model.  null: no run was measured, or it cannot start at present."
)
_NEXT_STEP: Any = Field(
    description="What the job does next.  `starting`: it has a slot and is being started.  `waiting`: it is in the "
    "queue, at `position`.  `later`: it is delayed.  `unknown`: Redis is unavailable, or the job is not in the queue "
    "yet.  null: it has started or ended; see `status`."
)
_POSITION: Any = Field(
    description="Position in the queue; 1: next.  null: it is not in the queue, or the position is not known now."
)
_NOTICE: Any = Field(description="Why it cannot start at present, such as constraints that no registered server meets.")

# The codes of dead jobs; `last_code` is the code of the last attempt.
_DEAD_CODES = {Reason.RETRIES_EXHAUSTED: "max_retries_exceeded", Reason.CRASHES_EXHAUSTED: "max_crashes_exceeded"}


def seconds(ms: int) -> float:
    """Convert milliseconds to seconds, rounded to 0.1 s."""
    return round(ms / 1000, 1)


def estimated_start_s(estimate: StartEstimate | None) -> float | None:
    """Return when a job should start, in seconds from now; None: there is no estimate."""
    return None if estimate is None else seconds(estimate.start_ms)


def next_step(state: State, position: QueuePosition) -> str | None:
    """Return what a job does next, in one word; None: it has started or ended."""
    match state:
        case State.DELAYED:
            return "later"
        case State.QUEUED if position.offered:
            return "starting"
        case State.QUEUED:
            return "unknown" if position.position is None else "waiting"
        case _:
            return None


def queue_position(state: State, position: QueuePosition) -> dict[str, Any]:
    """Return the next step of a job, its position and its estimated start, as fields of JobDetail and SubmitReceipt."""
    return {
        "next_step": next_step(state, position),
        "position": position.position,
        "estimated_start_s": estimated_start_s(position.estimate),
    }


def job_error(job: Job) -> dict[str, Any] | None:
    """Return JobError of a job or of its last attempt; None: there was no error."""
    if job.error_code is None:
        return None
    code = _DEAD_CODES.get(job.why) if job.state is State.DEAD else None
    if code is None:
        return JobError.build(code=job.error_code, message=job.error_message, last_code=None)
    return JobError.build(code=code, message=job.error_message, last_code=job.error_code)


def _server_or_slot(job: Job, name: str | None) -> str | None:
    """Return `name`, a server or slot, if the job has it or had it at its end."""
    return name if job.state is State.RUNNING or job.state in FINAL_STATES else None


class SubmitReceipt(ResponseSchema, source=AcceptedJob):
    """An accepted job: it is in the database."""

    job_id: Annotated[str, From("id")]
    status: Annotated[State, From("state")]
    next_step: Annotated[NextStep | None, PROVIDED] = _NEXT_STEP
    position: Annotated[int | None, PROVIDED] = _POSITION
    deduplicated: bool = Field(description="Whether it was already accepted, with the same Idempotency-Key.")
    estimated_start_s: Annotated[float | None, PROVIDED] = _ESTIMATE
    notice: Annotated[str | None, PROVIDED] = _NOTICE
    links: Annotated[dict[str, str], PROVIDED]


class BatchReceiptItem(ResponseSchema, source=AcceptedJob):
    job_id: Annotated[str, From("id")]
    status: Annotated[State, From("state")]
    deduplicated: bool
    notice: Annotated[str | None, PROVIDED] = _NOTICE


class BatchReceipt(ResponseSchema):
    """The accepted jobs of a batch, in the order of the request."""

    batch: str | None = Field(
        description="Name of the batch, for /queue/batches.  If all jobs were already accepted: the batch of the first."
    )
    accepted: int = Field(description="Number of jobs that were not already accepted.")
    jobs: list[BatchReceiptItem]


class JobError(ResponseSchema):
    code: str
    message: str | None
    last_code: str | None = Field(
        None, description="Code of the last attempt, if `code` says why there is no further attempt."
    )


class JobView(ResponseSchema, source=Job):
    """The current state of a job."""

    job_id: Annotated[str, From("id")]
    model: str
    status: Annotated[State, From("state")]
    why: str = Field(description="Reason of its last transition.")
    priority: int
    constraints: Annotated[dict[str, Any], From(lambda job: decode_constraints(job.constraints))]
    labels: Annotated[dict[str, str], From(lambda job: decode_labels(job.labels))]
    tenant: str
    batch: str | None = Field(description="Name of its batch; null: it was submitted alone.")
    attempts: int = Field(description="Number of runs that were started on a server.")
    failures: int = Field(description="Failed attempts, which count towards `max_retries`.")
    crashes: int = Field(description="Attempts that ended by a crash, which count towards `max_crashes`.")
    server: Annotated[str | None, From(lambda job: _server_or_slot(job, job.server))]
    slot: Annotated[str | None, From(lambda job: _server_or_slot(job, job.slot))]
    error: Annotated[JobError | None, From(lambda job: job_error(job) if job.state in FINAL_STATES else None)] = Field(
        description="Why it ended without a result."
    )
    last_error: Annotated[JobError | None, From(lambda job: None if job.state in FINAL_STATES else job_error(job))] = (
        Field(description="Error of the last attempt, if the job has not ended.")
    )
    cancel_requested: Annotated[bool, From(lambda job: job.cancel_requested_ms is not None)]
    callback_url: Annotated[str | None, From(lambda job: job.callback_url and mask_url(job.callback_url))] = Field(
        description="Without user, password and the values of the query, which may be keys."
    )
    created_at: Time
    started_at: Time | None
    completed_at: Annotated[Time | None, From("finished_ms")]
    not_before: Annotated[Time | None, From("due_ms")] = Field(description="When a delayed job is queued.")
    deadline: Time | None


class JobDetail(JobView):
    """A job with its position in the queue or its result."""

    next_step: Annotated[NextStep | None, PROVIDED] = _NEXT_STEP
    position: Annotated[int | None, PROVIDED] = _POSITION
    estimated_start_s: Annotated[float | None, PROVIDED] = _ESTIMATE
    # Copied as JSON text, without parsing.
    result: Annotated[Any, From(lambda job: None if job.result is None else orjson.Fragment(job.result))]


class BlockerView(ResponseSchema, source=explain.Blocker):
    """One reason why a job waits."""

    code: str = Field(description="Stable code for programs.")
    sentence: str
    subject: str | None = Field(description="The server, model or tenant that causes it.")
    until: Time | None = Field(description="When it may end.")


class EstimateBasis(ResponseSchema, source=StartEstimate):
    """The values that an estimated start was computed from."""

    jobs_before: int = Field(description="Number of jobs of its model before it in the queue.")
    mean_run_s: Annotated[float, From(lambda estimate: seconds(estimate.run_ms))] = Field(
        description="Mean slot time of its model's latest runs."
    )
    slots: int = Field(description="Number of slots of its model.")


def estimate_basis(estimate: StartEstimate | None) -> dict[str, Any] | None:
    """Return EstimateBasis; None: nothing was computed."""
    return None if estimate is None or estimate.run_ms is None else EstimateBasis.build(estimate)


class ExplanationView(ResponseSchema, source=explain.Explanation):
    """Why a job waits."""

    job_id: Annotated[str, PROVIDED]
    status: Annotated[State, PROVIDED]
    sentence: str = Field(description="All reasons in one sentence.")
    waits_for: list[BlockerView]
    ahead: int | None = Field(description="Number of jobs of its model before it; null: it is not in the queue.")
    before: list[str] = Field(
        description="Up to five jobs of its tenant and priority directly before it, the nearest last."
    )
    policy: str | None
    longest_overtaking_s: float | None = Field(
        description="It may be overtaken by jobs accepted at most so many seconds later; null: no bound."
    )
    servers: Annotated[
        dict[str, str | None],
        From(lambda explanation: {name: why or None for name, why in explanation.servers.items()}),
    ] = Field(description="Server of its model -> why the server cannot take the job now; null: it can.")
    estimated_start_s: Annotated[float | None, PROVIDED] = _ESTIMATE
    estimate_basis: Annotated[EstimateBasis | None, PROVIDED] = Field(
        description="null: the job has a slot, or there is no estimate."
    )


class JobList(ResponseSchema):
    jobs: list[JobView]
    next_cursor: str | None = Field(description="null: this is the last page.")


class AttemptView(ResponseSchema, source=job_timeline.Attempt):
    attempt: int
    server: str | None
    slot: str | None
    started_at: Time
    ended_at: Time | None
    outcome: str | None = Field(description="Reason of the transition that ended the attempt; null: it is running.")
    error: Annotated[
        JobError | None, From(lambda attempt: attempt.error and JobError.build(**attempt.error, last_code=None))
    ]


class AttemptList(ResponseSchema):
    job_id: str
    attempts: list[AttemptView]


class CancelResult(ResponseSchema):
    job_id: str
    status: Literal["canceled", "canceling"]


class PushResult(ResponseSchema):
    status: str = Field(
        description="The current state of the job; `ignored`: the push does not report the end of the run."
    )


class LedgerView(ResponseSchema, source=ledger.Ledger):
    """The number of accepted jobs, by current state, and by final state for removed jobs."""

    accepted: int
    by_state: dict[str, int]
    purged: Annotated[
        dict[str, int], From(lambda ledger: {str(name): count for name, count in ledger.purged.items() if count})
    ]
    balanced: bool


class PartStatus(ResponseSchema):
    ok: bool
    why: str | None


class ReadinessView(ResponseSchema):
    status: Literal["ok", "degraded", "unavailable"]
    parts: dict[str, PartStatus]


class LivenessView(ResponseSchema):
    status: Literal["ok"]


class JobEvent(ResponseSchema, source=OutboxEvent):
    job_id: Annotated[str, From("event.job_id")]
    model: str
    tenant: str
    priority: int
    server: str | None = Field(description="Server of that attempt; null before the first.")
    attempt: Annotated[int, From("event.attempt")] = Field(description="Number of attempts so far.")
    why: Annotated[str, From(lambda entry: entry.event.data.get("why"))] = Field(
        description="Reason of the transition."
    )
    at: Annotated[Time, From("event.at_ms")]
    retry_in_ms: Annotated[int | None, From(lambda entry: entry.event.data.get("retry_in_ms"))] = Field(
        None, description="Only if the job waits for its next attempt: the time until then, in ms."
    )


def event_data(entry: OutboxEvent) -> dict[str, Any]:
    """Return JobEvent, without `retry_in_ms` if it is None."""
    data = JobEvent.build(entry)
    if data["retry_in_ms"] is None:
        del data["retry_in_ms"]
    return data
