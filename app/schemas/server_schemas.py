"""Request and response bodies for servers, their slots and checks, presets and probes."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from app.schemas.base import (
    MODEL_NAME,
    PROVIDED,
    BodySchema,
    From,
    RemovalProgress,
    ResponseSchema,
    Schema,
    StateView,
    Time,
    iso_time,
)
from routing.admission.constraints import CHOICE_SCHEMAS
from routing.dispatch.outcome import Outcome
from routing.queries import explain, server_status
from routing.queries.explain import describe_quarantine
from routing.queue.fleets import QueueCounts
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.registry import catalog, values
from slotkeeper.registry.catalog_removal import Removal
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.values import Server
from slotkeeper.urls import mask_url
from tasks.servers import Health, HealthKind, presets, probe

_VALUE: Any = {"pattern": f"^{values.VALUE_PATTERN}$"}


_Attributes = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 50,
            "additionalProperties": {"anyOf": CHOICE_SCHEMAS},
        }
    ),
]


Breaker = Literal["closed", "open", "half_open", "probing"]
OpenedBy = Literal["failures", "rate", "probe"]
_HEALTH_SENTENCES = {
    HealthKind.BUSY: "its health check says that it is busy or still loading; it is still offered jobs",
    HealthKind.DOWN: "its health check says that it cannot run jobs",
    HealthKind.FOREIGN: "what responds there does not know the path of its health check: wrong address or preset",
    HealthKind.GARBAGE: "the response to its health check is not what its description expects",
}


def attribute_value(attribute: str | float) -> str | float | list[str]:
    """Return an attribute as the client sent it: a list is stored as one comma-separated text."""
    return attribute.split(",") if isinstance(attribute, str) and "," in attribute else attribute


def removal_of_server(server: Server) -> dict[str, Any] | None:
    """Return RemovalProgress of a server; None: it is not being removed."""
    if server.leaving_ms is None:
        return None
    return RemovalProgress.build(since=iso_time(server.leaving_ms), by=server.leaving_by, remaining=None)


def removal(model: str, catalog: CatalogSnapshot, left: Mapping[str, int] | None) -> dict[str, Any] | None:
    """Return RemovalProgress of a model; None: it is not being removed.

    `left`: state -> number of its jobs that have not ended; None: they were not counted.
    """
    if not catalog.is_being_removed(model):
        return None
    closed = catalog.closed[model]
    return RemovalProgress.build(since=iso_time(closed.changed_ms), by=closed.changed_by, remaining=left and dict(left))


class ServerView(StateView, source=Server):
    server: Annotated[str, From("name")]
    removal: Annotated[RemovalProgress | None, From(removal_of_server)] = Field(
        description="null: it is not being removed."
    )
    fleet: str
    slots: int
    weight: float
    attributes: Annotated[
        dict[str, Any], From(lambda server: {name: attribute_value(value) for name, value in server.attributes.items()})
    ] = Field(description="`<model>:<name>` applies to one model only.")
    models: Annotated[
        dict[str, str], From(lambda server: {model: mask_url(url) for model, url in server.endpoints.items()})
    ] = Field(description="Model -> endpoint.")
    described: Annotated[dict[str, dict[str, Any]], From("overrides")] = Field(
        description="Model -> how the server is called for it, where that differs from the model's configuration."
    )
    created_at: Time


class ServerScore(ResponseSchema, source=server_status.Score):
    """The score of a server: the server with a free slot and the lowest `total` gets the next job."""

    load: float = Field(description="Taken slots as a share of all slots.")
    failures: float = Field(description="Recent failures; the weight of each halves every minute.")
    slowness: float = Field(description="0: runs take the model's mean time; 1: twice as long.")
    swap: float = Field(description="1: another model is loaded.")
    silence: float = Field(description="10000: its last health check was not answered in time; 0: it was answered.")
    total: float = Field(description="(1 + load + failures + slowness + swap) / the server's weight + silence.")


class ServerStatusView(ResponseSchema, source=server_status.ServerStatus):
    """The status of a server in the queue at this moment."""

    free: int = Field(description="Slots without a lease and not in cooldown, even if a breaker is open.")
    cooling: int = Field(description="Slots in cooldown: for a time they are not offered.")
    cooldown_until: Time | None = Field(description="When the first of them can be offered again.")
    taken: int = Field(description="Slots with a run, and quarantined slots.")
    away_since: Time | None = Field(
        description="Since when the server is unreachable or its health check reports that it cannot run jobs; null: "
        "its last check was good."
    )
    away_why: Annotated[str | None, From(lambda status: status.away_why or None)] = Field(
        description="The problem that its health check reports; null: none."
    )
    silent_since: Time | None = Field(
        description="Since when its health check is not answered in time, so that it gets jobs last; null: it was "
        "answered."
    )
    breaker: Breaker
    breaker_until: Annotated[Time | None, From("open_until_ms")] = Field(
        description="When one job may test it; null: the breaker is closed."
    )
    breaker_why: Annotated[OpenedBy | None, From(lambda status: status.open_why or None)] = Field(
        description="What opened the breaker: `failures`, consecutive failed runs; `rate`, too many failures among the "
        "latest runs; `probe`, the failure of the test job."
    )
    breaker_opened: Annotated[int, From("opened")] = Field(
        description="How many times in a row the breaker was opened."
    )
    loaded: Annotated[str | None, From(lambda status: status.loaded or None)] = Field(
        description="The model of its last run."
    )
    swaps: int = Field(description="How many times it has changed models.")
    scores: dict[str, ServerScore] = Field(description="By model.")


class QuarantinedSlotView(ResponseSchema, source=QuarantinedSlot):
    """A quarantined slot: its run has ended here, but the server may still run the job."""

    slot: str
    job_id: str
    attempt: int
    reason: str = Field(description="What ended the run here: `timed_out`, `canceled`, `deadline_passed`, …")
    since: Time
    until: Time = Field(
        description="When the quarantine ends at the latest.  It ends earlier if the server's health report does not "
        "list the run any more."
    )
    sentence: Annotated[str, From(describe_quarantine)]


class ServerDetail(ServerView):
    status: Annotated[ServerStatusView | None, PROVIDED] = Field(description="null: Redis is unavailable.")
    quarantined: Annotated[list[QuarantinedSlotView], PROVIDED]
    running: Annotated[int | None, PROVIDED] = Field(description="Slots with a run; null: Redis is unavailable.")
    free: Annotated[int | None, PROVIDED] = Field(
        description="Slots that the next job can get; 0 while the whole server is blocked; null: Redis is unavailable."
    )
    blocked_by: Annotated[str | None, PROVIDED] = Field(
        description="Why none of its slots can take the next job: its state, `busy` (jobs run there), `withheld` (the "
        "taken slots are quarantined), `away`, `in cooldown`, `breaker open`, `being tried by one job`; null: a slot "
        "is free, or Redis is unavailable."
    )


class FleetView(ResponseSchema, source=QueueCounts):
    """The slots of a fleet at this moment."""

    fleet: Annotated[str, PROVIDED]
    free: int
    cooling: int = Field(description="Slots in cooldown: for a time they are not offered.")
    taken: int
    waiting: Annotated[int, From(lambda counts: sum(counts.waiting.values()))]


class ServerList(ResponseSchema):
    servers: list[ServerDetail]
    fleets: list[FleetView] | None = Field(description="null: Redis is unavailable.")


class HealthReport(ResponseSchema, source=Health):
    """The report of a server that was requested just now."""

    kind: str = Field(description="up, busy, down, foreign, garbage, unknown")
    active_jobs: int | None = Field(description="null: it did not report it.")
    job_ids: Annotated[
        list[str] | None, From(lambda health: None if health.job_ids is None else sorted(health.job_ids))
    ]
    message: str


class PresetView(ResponseSchema, source=presets.PresetInfo):
    """A preset: how to call a known kind of inference server."""

    name: Annotated[str, PROVIDED]
    title: str
    servers: str = Field(description="The servers and releases that it supports.")
    evidence: Literal["live", "recorded", "documented"] = Field(
        description="How the preset was tested.  live: with a running server; recorded: with recorded responses of a "
        "real server; documented: it follows the documentation or source code."
    )
    checked: str
    notes: list[str]
    endpoint: str = Field(
        description="An example of the endpoint to register; MODEL stands for the name of the model on the server."
    )
    slots: int
    payload: dict[str, Any] = Field(description="An example of a job's payload.")


class OutdatedPreset(ResponseSchema, source=catalog.Model):
    """A model whose configuration was stored with an older version of its preset."""

    model: Annotated[str, From("name")]
    preset: Annotated[str, From("config.preset")]


class PresetList(ResponseSchema):
    presets: list[PresetView]
    outdated: list[OutdatedPreset] = Field(
        description="Models whose stored preset is older than the one of this release."
    )


class PresetDetail(PresetView):
    description: Annotated[dict[str, Any], PROVIDED] = Field(description="The equivalent `description` of a model.")


class PresetPath(Schema):
    preset: str


class ProbeBody(BodySchema):
    """The address of an inference server to probe, and optionally a job to run there."""

    url: str = Field(max_length=2048, examples=["http://10.0.0.4:8000"])
    preset: str | None = Field(
        None, max_length=100, description="If omitted, the preset that matches its responses best."
    )
    model: str | None = Field(
        None, max_length=128, description="The model whose secrets may be used.", json_schema_extra=MODEL_NAME
    )
    payload: Any = Field(None, description="Payload of a job to run there; null: no job is run.")
    patience: float = Field(10.0, gt=0, le=25, description="Time limit of that job, in seconds.")


class ExchangeView(ResponseSchema, source=probe.ProbedExchange):
    """One request to the server and its response.  Headers are left out, and secrets are masked."""

    step: Literal["look", "health", "submit", "status", "result", "cancel"]
    request: str
    sent: str | None
    status: int | None = Field(description="null: there was no complete response.")
    answer: str
    took_ms: int
    rule: str | None = Field(description="The rule that matched the response: one of the description, or a default.")
    means: str | None


class PresetCandidate(ResponseSchema, source=probe.Candidate):
    preset: str
    weight: int = Field(description="How well it matches; higher is better.")
    because: str


class ProbeOutcome(ResponseSchema, source=Outcome):
    """The outcome of the job."""

    kind: str
    code: str
    message: str
    result: Annotated[str | None, PROVIDED] = Field(description="The beginning of the result.")


class ProbeView(ResponseSchema, source=probe.Recognition):
    reachable: Annotated[bool, From("is_there")]
    candidates: list[PresetCandidate]
    preset: Annotated[str | None, PROVIDED] = Field(description="The requested preset, or the proposed one.")
    endpoint: Annotated[str | None, PROVIDED] = Field(description="The endpoint to register.")
    model: str | None = Field(description="Name of the model on the server; null: it does not report one.")
    health: Annotated[HealthReport | None, PROVIDED]
    outcome: Annotated[ProbeOutcome | None, PROVIDED]
    exchanges: Annotated[list[ExchangeView], PROVIDED]


class IdleReason(ResponseSchema, source=explain.Blocker):
    """One reason why a server gets no jobs.  `code` is stable."""

    code: str
    sentence: str
    subject: str | None = Field(description="The server, model or slot that causes it.")
    until: Time | None = Field(description="When it may end.")


class ServerCheck(ResponseSchema):
    """Why a server gets no jobs.  If `reasons` is empty, it can get jobs."""

    server: str
    sentence: str
    reasons: list[IdleReason]
    health: HealthReport | None = Field(
        description="null: it serves no model, or its description allows no health check."
    )


def check_result(server: Server, reasons: Sequence[explain.Blocker], health: Health | None) -> dict[str, Any]:
    """Return ServerCheck.  `health` None: no health check was made."""
    all_reasons = list(reasons)
    if health is not None and health.kind in _HEALTH_SENTENCES:
        all_reasons.insert(0, explain.Blocker(f"health_{health.kind}", _health_sentence(health), server.name))
    sentence = (
        f"{server.name}: " + "; ".join(reason.sentence for reason in all_reasons)
        if all_reasons
        else "Nothing keeps it from getting jobs."
    )
    return ServerCheck.build(
        server=server.name,
        sentence=sentence,
        reasons=[IdleReason.build(reason) for reason in all_reasons],
        health=health and HealthReport.build(health),
    )


def _health_sentence(health: Health) -> str:
    if health.is_silent:
        return "its health check is not answered in time; it gets jobs only if no other server can run them"
    sentence = _HEALTH_SENTENCES[health.kind] if health.answered else "its health check gets no response"
    return f"{sentence} ({health.message})" if health.message else sentence


class DescriptionSchema(Schema):
    """A JSON schema (2020-12)."""

    model_config = ConfigDict(extra="allow")


class RemovalQuery(Schema):
    """What to do with jobs that have not ended."""

    drain: bool = Field(False, description="Take no new jobs, and remove it when all its jobs have ended.")


class ServerRemovalQuery(RemovalQuery):
    force: bool = Field(
        False,
        description="Remove it at once: its runs end, and their jobs run on other servers without using up a retry.",
    )


class RemovalView(ResponseSchema, source=Removal):
    """The progress of a removal."""

    name: str
    state: Annotated[Literal["done", "leaving"], From(lambda removal: "done" if removal.is_over else "leaving")] = (
        Field(description="leaving: it is removed when its remaining jobs have ended.")
    )
    remaining: dict[str, int] = Field(description="Jobs that have not ended, by state.")
    quarantined: int = Field(description="Quarantined slots of the server.")
    lost: list[str] = Field(description="Jobs whose runs were ended by the removal.")
    idle: list[str] = Field(description="Servers that have no model any more.")


class RegisterBody(BodySchema):
    """A server that serves a model."""

    model: str = Field(max_length=128, examples=["zimg"], json_schema_extra=MODEL_NAME)
    server: str = Field(max_length=128, examples=["zimg-api4"], json_schema_extra=MODEL_NAME)
    endpoint: str = Field(max_length=2048, examples=["http://10.0.0.4:9001/generate"])
    slots: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Number of jobs that the server runs at the same time, for all its models together; initially 1.  "
        "If omitted, it is not changed.",
    )
    attributes: _Attributes | None = Field(
        None,
        description="Attributes that constraints of jobs can name: each a string, a number, or a list of strings.  If "
        "omitted, they are not changed.",
        examples=[{"gpu": "A100", "memory": 80, "labels": ["fast", "testnet"]}],
    )
    weight: float | None = Field(
        None,
        ge=0.001,
        le=1000,
        description="Preference among servers: higher is chosen more often; initially 1.  If omitted, it "
        "is not changed.",
    )
    model_version: str | None = Field(
        None,
        description="Version of the model on this server; constraints of jobs can name it.",
        examples=["2.1"],
        json_schema_extra=_VALUE,
    )
    runtime: str | None = Field(
        None,
        description="Software that runs the model on this server; constraints of jobs can name it.",
        json_schema_extra=_VALUE,
    )
    preset: str | None = Field(
        None,
        max_length=100,
        description="The preset that describes how to call this server for this model, instead of the one in the "
        "model's configuration.  If omitted, it is not changed; null: the model's configuration applies.",
    )
    description: dict[str, Any] | None = Field(
        None,
        description="How to call this server for this model, instead of `preset`.  With `preset`: the differences "
        "from it.",
    )


class ReleaseSlotsBody(BodySchema):
    """The quarantined slots of a server to release."""

    slot: str | None = Field(None, description="One slot, such as `gpu1-slot0`; if omitted, all.")


class ServerPath(Schema):
    server: str = Field(json_schema_extra=MODEL_NAME)
