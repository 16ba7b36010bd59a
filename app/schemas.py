"""What is read and written, as documented.  Requests are checked by these; answers are only described by them.

What a field may hold beyond its type is checked once, by the use case, which names the field too.
"""

from collections.abc import Collection
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from app.openapi import Model
from app.paging import CURSOR
from jobs.config import ModelConfig
from jobs.states import State
from jobs.tenants import LONGEST_NAME, SHOWN
from routing.policies.placement import VALUE
from routing.submission import MODEL
from tasks.servers import for_model

Stands = Literal["online", "paused", "draining", "frozen"]
Outlook = Literal["starting", "waiting", "later", "unknown"]
Breaker = Literal["closed", "open", "half_open", "probing"]
OpenedBy = Literal["failures", "rate", "probe"]
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
_ESTIMATE: Any = Field(
    description="Seconds from now, from the latest runs of its model; null: not known, or it cannot start as things "
    "stand."
)
_OUTLOOK: Any = Field(
    description="What comes next: `starting`: it has a slot and is being started; `waiting`: in line, at `position`; "
    "`later`: it is delayed; `unknown`: the waiting room cannot be reached, or has not taken it in yet.  null: it has "
    "started or ended, as `status` says."
)
_POSITION: Any = Field(description="1: next.  null: it does not wait in line, or that is not known now.")
_NOTICE: Any = Field(description="What keeps it from starting for now, such as constraints that no known server meets.")
_REASON: Any = Field(None, max_length=500, description="Why; shown wherever the state is.", examples=["new driver"])
MODEL_NAME: Any = {"pattern": f"^{MODEL}$"}
_VALUE: Any = {"pattern": f"^{VALUE}$"}
_CURSOR: Any = {"pattern": f"^{CURSOR}$"}
_Object = Annotated[Any, WithJsonSchema({"type": "object"})]
_One: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "pattern": f"^{VALUE}$"},
        {"type": "number", "exclusiveMinimum": -1e15, "exclusiveMaximum": 1e15},
    ]
}
_Constraints = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "maxProperties": 20,
                    "additionalProperties": {
                        "anyOf": [
                            *_One["anyOf"],
                            {"type": "array", "items": _One, "minItems": 1, "maxItems": 50},
                            {
                                "type": "object",
                                "properties": {"min": {"type": "number"}, "max": {"type": "number"}},
                                "additionalProperties": False,
                                "minProperties": 1,
                            },
                        ]
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]
_Attributes = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 50,
            "additionalProperties": {
                "anyOf": [*_One["anyOf"], {"type": "array", "items": _One, "minItems": 1, "maxItems": 50}]
            },
        }
    ),
]


_MOST_UNKNOWN = 20


class Asked(Model):
    """A body: only what is listed, and nothing turned into another type."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _fit_to_look_at(cls, given: Any) -> Any:
        return _with_whole_numbers(_with_few_unknown(given, cls.model_fields))


def _with_whole_numbers(given: Any) -> Any:
    """JSON makes no difference between 7 and 7.0."""
    if not isinstance(given, dict):
        return given
    return {name: int(it) if isinstance(it, float) and it.is_integer() else it for name, it in given.items()}


def _with_few_unknown(given: Any, known: Collection[str]) -> Any:
    """Of very many fields that are not known a few are enough to refuse it; each costs a sentence."""
    if not isinstance(given, dict) or len(given) <= len(known) + _MOST_UNKNOWN:
        return given
    unknown = islice((name for name in given if name not in known), _MOST_UNKNOWN)
    return {name: given[name] for name in (*unknown, *known) if name in given}


# -- jobs --------------------------------------------------------------------------------------------------


class SubmitBody(Asked):
    """A job."""

    model: str = Field(max_length=128, examples=["zimg"], json_schema_extra=MODEL_NAME)
    payload: _Object = Field(description="What the inference server gets, as it is.", examples=[{"prompt": "a sunset"}])
    callback_url: str | None = Field(None, description="Where the end of the job is told, by a signed POST.")
    priority: _Priority = Field(None, description="1 (most urgent) to 9; true is 1; 5 if not given.")
    constraints: _Constraints = Field(
        None,
        description="What its server must declare: a value, a list of which one is enough, or a range.  "
        "`model_version` and `runtime` are those of the model's own registration.",
        examples=[{"gpu": ["A100", "H100"], "memory": {"min": 40}, "region": "eu"}],
    )
    ttl: _Seconds = Field(None, description="Seconds from now after which the job expires.")
    not_before: _When = Field(None, description="ISO 8601 with its zone, or seconds from now.")


class BatchItem(SubmitBody):
    """One job of a batch."""

    idempotency_key: str | None = Field(
        None,
        description="Like the header Idempotency-Key, for this job.",
        json_schema_extra={"minLength": 1, "maxLength": 255, "pattern": f"^{SHOWN}$"},
    )


class Receipt(Model):
    """A job that was accepted: it is in the record."""

    job_id: str
    status: State
    outlook: Outlook | None = _OUTLOOK
    position: int | None = _POSITION
    deduplicated: bool = Field(description="It had been accepted before, under the same Idempotency-Key.")
    estimated_start_s: float | None = _ESTIMATE
    estimated_start_between_s: list[float] | None = _BETWEEN
    notice: str | None = _NOTICE
    links: dict[str, str]


class BatchReceiptItem(Model):
    job_id: str
    status: State
    deduplicated: bool
    notice: str | None = _NOTICE


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
    constraints: dict[str, Any]
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

    outlook: Outlook | None = _OUTLOOK
    position: int | None = _POSITION
    estimated_start_s: float | None = _ESTIMATE
    estimated_start_between_s: list[float] | None = _BETWEEN
    result: Any


class Blocker(Model):
    """One thing that a job waits for."""

    code: str = Field(description="A stable word for programs.")
    sentence: str
    subject: str | None = Field(description="The server, model or tenant that it is about.")
    until: Time | None = Field(description="When it may be over.")


class Explanation(Model):
    """What a job waits for."""

    job_id: str
    status: State
    sentence: str = Field(description="All of it in one sentence.")
    waits_for: list[Blocker]
    ahead: int | None = Field(description="Jobs of its model that come first; null: it does not wait in line.")
    before: list[str] = Field(
        description="Up to five jobs of its tenant and tier that come just before it; the last of them is the nearest."
    )
    policy: str | None
    longest_overtaking_s: float | None = Field(
        description="Jobs accepted up to so many seconds after it may come before it; null: there is no bound."
    )
    servers: dict[str, str | None] = Field(
        description="Each server of its model, and what keeps it from taking this job now; null: nothing does."
    )
    estimated_start_s: float | None = _ESTIMATE
    estimated_start_between_s: list[float] | None = _BETWEEN


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
    model: str | None = Field(None, json_schema_extra=MODEL_NAME)
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(
        None, max_length=20, description="next_cursor of the page before.", json_schema_extra=_CURSOR
    )


class DlqQuery(Model):
    model: str | None = Field(None, json_schema_extra=MODEL_NAME)
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=20, json_schema_extra=_CURSOR)


# -- servers and models ------------------------------------------------------------------------------------


class RegisterBody(Asked):
    """A server that serves a model."""

    model: str = Field(max_length=128, examples=["zimg"], json_schema_extra=MODEL_NAME)
    server: str = Field(max_length=128, examples=["zimg-api4"], json_schema_extra=MODEL_NAME)
    endpoint: str = Field(max_length=2048, examples=["http://10.0.0.4:9001/generate"])
    slots: int = Field(ge=1, le=1024, description="Jobs that the server runs at once, of all its models together.")
    attributes: _Attributes | None = Field(
        None,
        description="What jobs can ask for, each a text, a number, or a list of texts.  Left out: they stay.",
        examples=[{"gpu": "A100", "memory": 80, "labels": ["fast", "testnet"]}],
    )
    weight: float | None = Field(
        None, ge=0.001, le=1000, description="How gladly it is chosen; 1 at first.  Left out: it stays."
    )
    model_version: str | None = Field(
        None, description="Of the model there; jobs can ask for it.", examples=["2.1"], json_schema_extra=_VALUE
    )
    runtime: str | None = Field(
        None, description="What runs the model there; jobs can ask for it.", json_schema_extra=_VALUE
    )
    preset: str | None = Field(
        None,
        max_length=100,
        description="The kind of server it is, for this model, in place of what the model's configuration says.  Left "
        "out: that stays; null: what the configuration says holds.",
    )
    description: dict[str, Any] | None = Field(
        None, description="How it is spoken to for this model, as `preset`; with it: what differs from that."
    )


class StateView(Model):
    """Whether something takes part."""

    state: Stands = Field(
        description="paused: nothing new is started, submits are accepted.  draining: what waits goes on, and no new "
        "jobs are accepted; of a server: what runs there ends, and nothing new is sent.  frozen: neither."
    )
    reason: str | None
    changed_by: str | None = Field(description="The tenant that brought it into this state.")
    changed_at: Time | None


class StateBody(Asked):
    """How something shall stand."""

    state: Stands
    reason: str | None = _REASON


class ServerView(StateView):
    server: str
    fleet: str
    slots: int
    weight: float
    attributes: dict[str, Any] = Field(description="`<model>:<name>` is that of one model alone.")
    models: dict[str, str] = Field(description="Model -> endpoint.")
    described: dict[str, dict[str, Any]] = Field(
        description="Model -> how it is spoken to for that, where the model's configuration does not say it."
    )
    created_at: Time


class Score(Model):
    """What a server is chosen by: of those with a free slot, that with the lowest total."""

    load: float = Field(description="Taken slots, as a share of all.")
    failures: float = Field(description="Recent failures; after a minute each counts half.")
    slowness: float = Field(description="0: as quick as the model's mean; 1: it takes twice as long.")
    swap: float = Field(description="1: another model is loaded.")
    total: float = Field(description="1 and all of these, over the server's weight.")


class ServerStanding(Model):
    """How a server stands in the waiting room at this moment."""

    free: int
    resting: int = Field(description="Slots that are offered to nobody for a while.")
    rested_at: Time | None = Field(description="When the first of them is offered again.")
    taken: int
    breaker: Breaker
    breaker_until: Time | None = Field(description="When one job may try it; null: it is closed.")
    breaker_why: OpenedBy | None = Field(
        description="What opened it: runs that failed one after another, too many of the latest, or the last trial."
    )
    breaker_opened: int = Field(description="How often in a row it was opened.")
    loaded: str | None = Field(description="The model that it ran last.")
    swaps: int = Field(description="How often it has changed models.")
    scores: dict[str, Score] = Field(description="By model.")


class WithheldSlot(Model):
    """A slot whose run has ended here, and of which its server has not let go."""

    slot: str
    job_id: str
    attempt: int
    reason: str = Field(description="What ended the run here: `timed_out`, `canceled`, `deadline_passed`, …")
    since: Time
    until: Time = Field(description="The longest; before, as soon as the server's report no longer shows the run.")
    sentence: str


class ListedServer(ServerView):
    standing: ServerStanding | None = Field(description="null: Redis is away.")
    withheld: list[WithheldSlot]


class FleetView(Model):
    """The slots of servers that stand together, at this moment."""

    fleet: str
    free: int
    resting: int
    taken: int
    waiting: int


class ServerList(Model):
    servers: list[ListedServer]
    fleets: list[FleetView] | None = Field(description="null: Redis is away.")


class ServerPath(Model):
    server: str = Field(json_schema_extra=MODEL_NAME)


class ModelPath(Model):
    model: str = Field(json_schema_extra=MODEL_NAME)


class ModelView(StateView):
    model: str
    fleet: str
    model_type: str
    policy: str
    servers: list[str]
    slots: int = Field(description="Of servers that are online.")
    waiting: int | None = Field(description="null: Redis is away.")


class ModelList(Model):
    models: list[ModelView]


class ModelLoad(Model):
    """What waits for a model at this moment, and what that means."""

    mean_run_s: float | None = Field(description="Slot time of its latest runs; null: none has ended well yet.")
    work_s: float | None = Field(description="For how long what waits keeps its slots busy; null: not known.")
    limit: int | None = Field(description="Jobs that may wait, of each tenant under `fair`; null: any number.")
    breaker: Breaker
    breaker_until: Time | None


class ModelDetail(ModelView):
    """A model, and how long its jobs may have to wait."""

    load: ModelLoad | None = Field(description="null: Redis is away.")
    longest_overtaking_s: dict[str, float | None] = Field(
        description="By tier: jobs accepted up to so many seconds after one may come before it; null: no bound."
    )
    longest_wait: str = Field(description="The longest that order can make a job wait, in terms of the load.")


class TenantPath(Model):
    tenant: str = Field(json_schema_extra={"maxLength": LONGEST_NAME, "pattern": f"^{SHOWN}$"})


class TenantView(StateView):
    tenant: str
    has_key: bool
    admin: bool
    rate_per_s: int | None = Field(description="Submits a second; null: no limit.")
    burst: int | None


class TenantList(Model):
    """Those that have a key, and those that do not stand online."""

    tenants: list[TenantView]


class WebhookSecretView(Model):
    """With what a tenant's webhooks are verified (Standard Webhooks)."""

    tenant: str
    secrets: list[str] = Field(description="`whsec_…`, the newest first; each message is signed with all of them.")
    rotation: int = Field(description="How often it was rotated.")
    former_until: str | None = Field(description="Until when a second secret, the one before, is signed with.")


class DescriptionSchema(Model):
    """A JSON schema (2020-12)."""

    model_config = ConfigDict(extra="allow")


class ConfigView(Model):
    """How a model's jobs are treated."""

    model: str
    config: dict[str, Any] = Field(description="What is in force.")
    overrides: dict[str, Any]
    defaults: dict[str, Any]
    description: dict[str, Any] | None = Field(
        description="How its servers are spoken to, with all defaults; null: it cannot be read."
    )
    described_by: str | None = Field(description="The version of that, as runs name it; null: the slot protocol.")


class ConfigBody(ModelConfig):
    """The overrides, all of them: what is left out goes back to its default."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _fit_to_look_at(cls, given: Any) -> Any:
        if isinstance(given, dict):
            given = {name: _with_whole_numbers(value) for name, value in given.items()}
        return _with_whole_numbers(_with_few_unknown(given, cls.model_fields))

    @field_validator("poll_endpoint_template", "id_field")
    @classmethod
    def _is_spoken_by(cls, value: str | None, info: ValidationInfo) -> str | None:
        """A worker must be able to make requests of it; later would be too late to say so."""
        template, id_field = (value, None) if info.field_name == "poll_endpoint_template" else (None, value)
        for_model("async", template, id_field)
        return value


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
