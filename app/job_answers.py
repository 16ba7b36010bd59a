"""What is answered about jobs."""

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
    "slots of its model.  null: no run was measured, or it cannot start as things stand."
)
_NEXT_STEP: Any = Field(
    description="What comes next: `starting`: it has a slot and is being started; `waiting`: in line, at `position`; "
    "`later`: it is delayed; `unknown`: the waiting room cannot be reached, or has not taken it in yet.  null: it has "
    "started or ended, as `status` says."
)
_POSITION: Any = Field(description="1: next.  null: it does not wait in line, or that is not known now.")
_NOTICE: Any = Field(description="What keeps it from starting for now, such as constraints that no known server meets.")

# The two ways to be dead, as clients know them from elsewhere; the last attempt's own code stands beside it.
_DEAD_CODES = {Reason.RETRIES_EXHAUSTED: "max_retries_exceeded", Reason.CRASHES_EXHAUSTED: "max_crashes_exceeded"}


def seconds(ms: int) -> float:
    return round(ms / 1000, 1)


def estimated_start_s(estimate: StartEstimate | None) -> float | None:
    """When a job should start, seconds from now."""
    return None if estimate is None else seconds(estimate.start_ms)


def next_step(state: State, where: QueuePosition) -> str | None:
    """What comes next for a job, in one word; None: it has started or ended, as its status says."""
    match state:
        case State.DELAYED:
            return "later"
        case State.QUEUED if where.offered:
            return "starting"
        case State.QUEUED:
            return "unknown" if where.position is None else "waiting"
        case _:
            return None


def queue_position(state: State, where: QueuePosition) -> dict[str, Any]:
    """Where a job stands, and when it should start."""
    return {
        "next_step": next_step(state, where),
        "position": where.position,
        "estimated_start_s": estimated_start_s(where.estimate),
    }


def job_error(it: Job) -> dict[str, Any] | None:
    """Of a job, or of its last attempt."""
    if it.error_code is None:
        return None
    code = _DEAD_CODES.get(it.why) if it.state is State.DEAD else None
    if code is None:
        return JobError.build(code=it.error_code, message=it.error_message, last_code=None)
    return JobError.build(code=code, message=it.error_message, last_code=it.error_code)


def _server_or_slot(it: Job, name: str | None) -> str | None:
    """A server or slot that a job has, or had at its end."""
    return name if it.state is State.RUNNING or it.state in FINAL_STATES else None


class SubmitReceipt(ResponseSchema, source=AcceptedJob):
    """A job that was accepted: it is in the record."""

    job_id: Annotated[str, From("id")]
    status: Annotated[State, From("state")]
    next_step: Annotated[NextStep | None, PROVIDED] = _NEXT_STEP
    position: Annotated[int | None, PROVIDED] = _POSITION
    deduplicated: bool = Field(description="It had been accepted before, under the same Idempotency-Key.")
    estimated_start_s: Annotated[float | None, PROVIDED] = _ESTIMATE
    notice: Annotated[str | None, PROVIDED] = _NOTICE
    links: Annotated[dict[str, str], PROVIDED]


class BatchReceiptItem(ResponseSchema, source=AcceptedJob):
    job_id: Annotated[str, From("id")]
    status: Annotated[State, From("state")]
    deduplicated: bool
    notice: Annotated[str | None, PROVIDED] = _NOTICE


class BatchReceipt(ResponseSchema):
    """All jobs of a batch were accepted, in this order."""

    batch: str | None = Field(
        description="Where /queue/batches shows them; if all had been accepted before, that of the first."
    )
    accepted: int = Field(description="Jobs that had not been accepted before.")
    jobs: list[BatchReceiptItem]


class JobError(ResponseSchema):
    code: str
    message: str | None
    last_code: str | None = Field(None, description="Of the last attempt, where `code` says why there is no further.")


class JobView(ResponseSchema, source=Job):
    """A job as it stands."""

    job_id: Annotated[str, From("id")]
    model: str
    status: Annotated[State, From("state")]
    why: str = Field(description="Of its last transition.")
    priority: int
    constraints: Annotated[dict[str, Any], From(lambda it: decode_constraints(it.constraints))]
    labels: Annotated[dict[str, str], From(lambda job: decode_labels(job.labels))]
    tenant: str
    batch: str | None = Field(description="The batch that it came in; null: it came alone.")
    attempts: int = Field(description="Runs that a server took up.")
    failures: int = Field(description="Counts against max_retries.")
    crashes: int = Field(description="Counts against max_crashes.")
    server: Annotated[str | None, From(lambda it: _server_or_slot(it, it.server))]
    slot: Annotated[str | None, From(lambda it: _server_or_slot(it, it.slot))]
    error: Annotated[JobError | None, From(lambda it: job_error(it) if it.state in FINAL_STATES else None)] = Field(
        description="Why it ended without a result."
    )
    last_error: Annotated[JobError | None, From(lambda it: None if it.state in FINAL_STATES else job_error(it))] = (
        Field(description="Of the last attempt of a job that has not ended.")
    )
    cancel_requested: Annotated[bool, From(lambda it: it.cancel_requested_ms is not None)]
    callback_url: Annotated[str | None, From(lambda it: it.callback_url and mask_url(it.callback_url))] = Field(
        description="Without a user, a password and the values of its query, which may be keys."
    )
    created_at: Time
    started_at: Time | None
    completed_at: Annotated[Time | None, From("finished_ms")]
    not_before: Annotated[Time | None, From("due_ms")] = Field(description="delayed: when it is queued.")
    deadline: Time | None


class JobDetail(JobView):
    """A job with its place or its result."""

    next_step: Annotated[NextStep | None, PROVIDED] = _NEXT_STEP
    position: Annotated[int | None, PROVIDED] = _POSITION
    estimated_start_s: Annotated[float | None, PROVIDED] = _ESTIMATE
    # It is handed on as the text that it is.
    result: Annotated[Any, From(lambda it: None if it.result is None else orjson.Fragment(it.result))]


class BlockerView(ResponseSchema, source=explain.Blocker):
    """One thing that a job waits for."""

    code: str = Field(description="A stable word for programs.")
    sentence: str
    subject: str | None = Field(description="The server, model or tenant that it is about.")
    until: Time | None = Field(description="When it may be over.")


class EstimateBasis(ResponseSchema, source=StartEstimate):
    """What an estimated start was computed from."""

    jobs_before: int = Field(description="Jobs of its model that come before it.")
    mean_run_s: Annotated[float, From(lambda estimate: seconds(estimate.run_ms))] = Field(
        description="Mean slot time of its model's latest runs."
    )
    slots: int = Field(description="Slots of its model.")


def estimate_basis(estimate: StartEstimate | None) -> dict[str, Any] | None:
    """Return what an estimate was computed from; None: nothing was computed."""
    return None if estimate is None or estimate.run_ms is None else EstimateBasis.build(estimate)


class ExplanationView(ResponseSchema, source=explain.Explanation):
    """What a job waits for."""

    job_id: Annotated[str, PROVIDED]
    status: Annotated[State, PROVIDED]
    sentence: str = Field(description="All of it in one sentence.")
    waits_for: list[BlockerView]
    ahead: int | None = Field(description="Jobs of its model that come first; null: it does not wait in line.")
    before: list[str] = Field(
        description="Up to five jobs of its tenant and priority that come just before it; the last is the nearest."
    )
    policy: str | None
    longest_overtaking_s: float | None = Field(
        description="Jobs accepted up to so many seconds after it may come before it; null: there is no bound."
    )
    servers: Annotated[
        dict[str, str | None], From(lambda it: {name: why or None for name, why in it.servers.items()})
    ] = Field(description="Each server of its model, and what keeps it from taking this job now; null: nothing does.")
    estimated_start_s: Annotated[float | None, PROVIDED] = _ESTIMATE
    estimate_basis: Annotated[EstimateBasis | None, PROVIDED] = Field(
        description="null: the job has a slot, or there is no estimate."
    )


class JobList(ResponseSchema):
    jobs: list[JobView]
    next_cursor: str | None = Field(description="null: this was the last page.")


class AttemptView(ResponseSchema, source=job_timeline.Attempt):
    attempt: int
    server: str | None
    slot: str | None
    started_at: Time
    ended_at: Time | None
    outcome: str | None = Field(description="The reason of the transition that ended it; null: it is running.")
    error: Annotated[JobError | None, From(lambda it: it.error and JobError.build(**it.error, last_code=None))]


class AttemptList(ResponseSchema):
    job_id: str
    attempts: list[AttemptView]


class CancelResult(ResponseSchema):
    job_id: str
    status: Literal["canceled", "canceling"]


class PushResult(ResponseSchema):
    status: str = Field(description="The job's state now; `ignored`: the push does not tell the end of the run.")


class RetryAllResult(ResponseSchema):
    retried: int
    more: bool = Field(description="There are dead jobs left: ask again.")


class LedgerView(ResponseSchema, source=ledger.Ledger):
    """Every accepted job, in the state in which it stands or in which it was removed."""

    accepted: int
    by_state: dict[str, int]
    purged: Annotated[dict[str, int], From(lambda it: {str(name): count for name, count in it.purged.items() if count})]
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
    server: str | None = Field(description="Of that attempt; null before the first.")
    attempt: Annotated[int, From("event.attempt")] = Field(description="Starts so far.")
    why: Annotated[str, From(lambda it: it.event.data.get("why"))] = Field(description="As of a job.")
    at: Annotated[Time, From("event.at_ms")]
    retry_in_ms: Annotated[int | None, From(lambda it: it.event.data.get("retry_in_ms"))] = Field(
        None, description="Only of a job that waits for its next attempt."
    )


def event_data(it: OutboxEvent) -> dict[str, Any]:
    """StreamEvent, without what it has nothing to say of."""
    told = JobEvent.build(it)
    if told["retry_in_ms"] is None:
        del told["retry_in_ms"]
    return told
