"""Request and response bodies for jobs, batches, dead jobs and explanations."""

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from app.schemas.base import MODEL_NAME, PROVIDED, BodySchema, From, ResponseSchema, Schema, Time, seconds
from app.schemas.credit_schemas import CostView
from app.schemas.cursors import BATCH, CURSOR
from routing.admission.constraints import decode_constraints, environment_of
from routing.admission.job_request import JobRequest
from routing.admission.labels import MAX_LABELS, decode_labels
from routing.queries import explain, job_timeline
from routing.queries.positions import QueuePosition, StartEstimate
from slotkeeper.jobs.states import FINAL_STATES, Reason, State
from slotkeeper.jobs.terms import OnFailure, decode_terms
from slotkeeper.jobs.values import AcceptedJob, Job
from slotkeeper.registry.tenants import PRINTABLE_PATTERN
from slotkeeper.urls import mask_url

_CURSOR: Any = {"pattern": f"^{CURSOR}$"}
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
_BATCH_SCHEMA: Any = {"pattern": f"^{BATCH}$"}


class SubmitBody(JobRequest, BodySchema):
    """A job."""


class BatchItem(SubmitBody):
    """One job of a batch."""

    idempotency_key: str | None = Field(
        None,
        description="Like the header Idempotency-Key, for this job.",
        json_schema_extra={"minLength": 1, "maxLength": 255, "pattern": f"^{PRINTABLE_PATTERN}$"},
    )


class BatchNameQuery(Schema):
    batch: str | None = Field(
        None,
        description="The batch that the jobs belong to: a UUID that the client chooses, as 36 lowercase hexadecimal "
        "digits and hyphens, or the `batch` of an earlier response.  If omitted, a new batch.",
        json_schema_extra={"pattern": f"^{BATCH}$"},
    )


class SignedResultView(ResponseSchema):
    """A result that a node returned, with what proves it; `slotkeeper verify` checks it without a network."""

    job_id: str
    envelope: dict[str, Any] = Field(description="DSSE 1.0, signed with Ed25519.")
    key_id: str
    public_key: str | None = Field(description="As base64; null: the node was removed.")
    node: str | None = Field(description="The node's name; null: it was removed.")
    owner: str | None = Field(description="The tenant to which the node belongs.")
    payload: str | None = Field(description="As it was sent; null: it is another tenant's.")
    result: str = Field(description="As the node returned it.")
    verified_at: Time


class JobPath(Schema):
    job_id: str


class WaitQuery(Schema):
    wait: float = Field(
        0, ge=0, le=60, description="Seconds to wait for the end of the job before the response is sent."
    )
    include: Literal["payload"] | None = Field(
        None, description="What the response has besides: the payload that was submitted."
    )


class ListQuery(Schema):
    status: State | None = None
    model: str | None = Field(None, json_schema_extra=MODEL_NAME)
    batch: str | None = Field(None, json_schema_extra={"pattern": f"^{BATCH}$"})
    label: list[str] = Field(
        [],
        max_length=MAX_LABELS,
        description="`NAME=VALUE`: only jobs with this label.  May be repeated: only jobs with all of them.",
        examples=[["team=search"]],
    )
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(
        None, max_length=20, description="`next_cursor` of the previous page.", json_schema_extra=_CURSOR
    )


class DlqQuery(Schema):
    model: str | None = Field(None, json_schema_extra=MODEL_NAME)
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=20, json_schema_extra=_CURSOR)


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


def position_fields(state: State, position: QueuePosition) -> dict[str, Any]:
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


def _on_failure(job: Job) -> dict[str, Any] | None:
    on_failure = decode_terms(job.terms).on_failure
    return None if on_failure is None else on_failure.model_dump(exclude_none=True)


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
    environment: Annotated[str, From(lambda job: environment_of(job.constraints))] = Field(
        description="Its server must declare it; `production`: or declare none."
    )
    labels: Annotated[dict[str, str], From(lambda job: decode_labels(job.labels))]
    on_failure: Annotated[OnFailure | None, From(lambda job: _on_failure(job))] = Field(
        description="How it is retried, where it differs from its model's configuration; null: in nothing."
    )
    expected_output: Annotated[int | None, From(lambda job: decode_terms(job.terms).expected_output)]
    cancel_when_gone: Annotated[float | None, From(lambda job: decode_terms(job.terms).cancel_when_gone)] = Field(
        description="Seconds without a client that waits for it, after which it is canceled."
    )
    tenant: str
    source: str = Field(description="Where it came from: `rest`, `batch`, or `task` for Celery.")
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
    payload: Annotated[Any, PROVIDED] = Field(
        description="With `include=payload`; null: not asked for.  Who operates sees that of another tenant without "
        "what the model's `redact` names, and the audit log notes it."
    )
    cost: Annotated[CostView | None, PROVIDED] = Field(description="In micro-credits; null: it costs nothing.")
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
    attempt: int = Field(description="Number of the start, which its server gets as `X-Attempt`.")
    unreached: int = Field(
        description="0: an attempt.  Otherwise so many starts in a row met no server, and this entry is for all of "
        "them, with the number of the last; they are not among the job's `attempts`."
    )
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


class RetryAllQuery(Schema):
    model: str | None = Field(None, description="Only the jobs of this model.", json_schema_extra=MODEL_NAME)


class RetryAllResult(ResponseSchema):
    retried: int
    more: bool = Field(description="Dead jobs are left that can be queued again: repeat the request.")
    left_out: int = Field(description="Dead jobs that stay, because their models were removed; 1,000 at most.")
    unpaid: list[str] = Field(description="Tenants that have too few credits for some of their jobs, which stay.")
