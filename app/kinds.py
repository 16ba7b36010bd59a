"""Request and response bodies for presets, for probes of servers, and for the health that servers report."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from app.api.openapi import Schema
from app.schemas.base import PROVIDED, From, ResponseSchema, Time
from app.schemas.job_schemas import MODEL_NAME, BodySchema
from routing.dispatch.outcome import Outcome
from routing.queries import explain
from slotkeeper.registry import catalog
from slotkeeper.registry.values import Server
from tasks.servers import Health, HealthKind, presets, probe


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
    behind: list[OutdatedPreset] = Field(
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


_HEALTH_SENTENCES = {
    HealthKind.BUSY: "its health check says that it is busy or still loading; it is still offered jobs",
    HealthKind.DOWN: "its health check says that it cannot run jobs",
    HealthKind.FOREIGN: "what responds there does not know the path of its health check: wrong address or preset",
    HealthKind.GARBAGE: "the response to its health check is not what its description expects",
}


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
