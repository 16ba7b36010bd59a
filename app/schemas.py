"""What is read and written, as documented.  Requests are checked by these; answers are only described by them.

What a field may hold beyond its type is checked once, by the use case, which names the field too.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from app.api.openapi import Model
from jobs.config import ModelConfig
from jobs.states import State

ServerState = Literal["online", "draining", "paused"]
Time = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]

_Priority = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "boolean"}, {"type": "null"}]}),
]
_Seconds = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]})]
_When = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "number", "minimum": 0}, {"type": "null"}]}
    ),
]
_BETWEEN: Any = Field(description="Earliest and latest start, seconds from now; it holds for nine jobs of ten.")
_Object = Annotated[Any, WithJsonSchema({"type": "object"})]


class Asked(Model):
    """A body: only what is listed, and nothing turned into another type."""

    model_config = ConfigDict(strict=True)


# -- jobs --------------------------------------------------------------------------------------------------


class SubmitBody(Asked):
    """A job."""

    model: str = Field(max_length=128, examples=["zimg"])
    payload: _Object = Field(description="What the inference server gets, as it is.", examples=[{"prompt": "a sunset"}])
    callback_url: str | None = Field(None, description="Where the end of the job is told, by a signed POST.")
    priority: _Priority = Field(None, description="1 (most urgent) to 9; true is 1; 5 if not given.")
    ttl: _Seconds = Field(None, description="Seconds from now after which the job expires.")
    not_before: _When = Field(None, description="ISO 8601 with its zone, or seconds from now.")


class BatchItem(SubmitBody):
    """One job of a batch."""

    idempotency_key: str | None = Field(None, description="Like the header Idempotency-Key, for this job.")


class Receipt(Model):
    """A job that was accepted: it is in the record."""

    job_id: str
    status: State
    position: int | None = Field(description="1: next.  null: it does not wait in line, or that is not known now.")
    deduplicated: bool = Field(description="It had been accepted before, under the same Idempotency-Key.")
    estimated_start_s: float | None = Field(description="Seconds from now, from the latest runs of its model.")
    estimated_start_between_s: list[float] | None = _BETWEEN
    links: dict[str, str]


class BatchReceiptItem(Model):
    job_id: str
    status: State
    deduplicated: bool


class BatchReceipt(Model):
    """All jobs of a batch were accepted, in this order."""

    accepted: int = Field(description="Jobs that had not been accepted before.")
    jobs: list[BatchReceiptItem]


class JobError(Model):
    code: str
    message: str | None
    last_code: str | None = Field(None, description="Of the last attempt, where `code` says why there is no further.")


class JobView(Model):
    """A job as it stands."""

    job_id: str
    model: str
    status: State
    why: str = Field(description="Of its last transition.")
    priority: int
    tenant: str
    attempts: int = Field(description="Runs that a server took up.")
    failures: int = Field(description="Counts against max_retries.")
    crashes: int = Field(description="Counts against max_crashes.")
    server: str | None
    slot: str | None
    error: JobError | None = Field(description="Why it ended without a result.")
    last_error: JobError | None = Field(description="Of the last attempt of a job that has not ended.")
    cancel_requested: bool
    callback_url: str | None
    created_at: Time
    started_at: Time | None
    completed_at: Time | None
    not_before: Time | None = Field(description="delayed: when it is queued.")
    deadline: Time | None


class JobDetail(JobView):
    """A job with its place or its result."""

    position: int | None = Field(description="1: next.  null: it does not wait in line, or that is not known now.")
    estimated_start_s: float | None
    estimated_start_between_s: list[float] | None = _BETWEEN
    result: Any


class JobList(Model):
    jobs: list[JobView]
    next_cursor: str | None = Field(description="null: this was the last page.")


class Attempt(Model):
    attempt: int
    server: str | None
    slot: str | None
    started_at: Time
    ended_at: Time | None
    outcome: str | None = Field(description="The reason of the transition that ended it; null: it is running.")
    error: JobError | None


class AttemptList(Model):
    job_id: str
    attempts: list[Attempt]


class CancelAnswer(Model):
    job_id: str
    status: Literal["canceled", "canceling"]


class PushAnswer(Model):
    status: str = Field(description="The job's state now; `ignored`: the push does not tell the end of the run.")


class JobPath(Model):
    job_id: str


class WaitQuery(Model):
    wait: float = Field(0, ge=0, le=60, description="Seconds to wait for the job to end before answering.")


class ListQuery(Model):
    status: State | None = None
    model: str | None = None
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=100, description="next_cursor of the page before.")


class DlqQuery(Model):
    model: str | None = None
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=100)


# -- servers and models ------------------------------------------------------------------------------------


class RegisterBody(Asked):
    """A server that serves a model."""

    model: str = Field(max_length=128, examples=["zimg"])
    server: str = Field(max_length=128, examples=["zimg-api4"])
    endpoint: str = Field(max_length=2048, examples=["http://10.0.0.4:9001/generate"])
    slots: int = Field(ge=1, le=1024, description="Jobs that the server runs at once, of all its models together.")


class ServerView(Model):
    server: str
    fleet: str
    state: ServerState
    slots: int
    models: dict[str, str] = Field(description="Model -> endpoint.")
    created_at: Time


class FleetView(Model):
    """The slots of servers that stand together, at this moment."""

    fleet: str
    free: int
    resting: int
    taken: int
    waiting: int


class ServerList(Model):
    servers: list[ServerView]
    fleets: list[FleetView] | None = Field(description="null: Redis is away.")


class ServerPath(Model):
    server: str


class ServerPatch(Asked):
    state: ServerState


class ModelPath(Model):
    model: str


class ModelView(Model):
    model: str
    fleet: str
    model_type: str
    policy: str
    servers: list[str]
    slots: int = Field(description="Of servers that are online.")
    waiting: int | None = Field(description="null: Redis is away.")


class ModelList(Model):
    models: list[ModelView]


class ConfigView(Model):
    """How a model's jobs are treated."""

    model: str
    config: dict[str, Any] = Field(description="What is in force.")
    overrides: dict[str, Any]
    defaults: dict[str, Any]


class ConfigBody(ModelConfig):
    """The overrides, all of them: what is left out goes back to its default."""

    model_config = ConfigDict(strict=True)


class RetryAllAnswer(Model):
    retried: int
    more: bool = Field(description="There are dead jobs left: ask again.")


class Ledger(Model):
    """Every accepted job, in the state in which it stands or in which it was removed."""

    accepted: int
    by_state: dict[str, int]
    purged: dict[str, int]
    balanced: bool


class Part(Model):
    ok: bool
    why: str | None


class Health(Model):
    status: Literal["ok", "degraded", "unavailable"]
    parts: dict[str, Part]


class Alive(Model):
    status: Literal["ok"]
