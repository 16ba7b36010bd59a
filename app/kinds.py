"""Views of kinds of servers, and of what a server reports about itself; see app.schemas.job_schemas."""

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
    """What a server says of itself, asked just now."""

    kind: str = Field(description="up, busy, down, foreign, garbage, unknown")
    active_jobs: int | None = Field(description="null: it did not say.")
    job_ids: Annotated[list[str] | None, From(lambda it: None if it.job_ids is None else sorted(it.job_ids))]
    message: str


class PresetView(ResponseSchema, source=presets.PresetInfo):
    """A kind of inference server that is known by name."""

    name: Annotated[str, PROVIDED]
    title: str
    servers: str = Field(description="Which servers and releases it fits.")
    evidence: Literal["live", "recorded", "documented"] = Field(
        description="live: run with this description; recorded: answers of a real server; documented: from its "
        "documents or source."
    )
    checked: str
    notes: list[str]
    endpoint: str = Field(description="An example of what to register; MODEL stands for the model's name there.")
    slots: int
    payload: dict[str, Any] = Field(description="An example.")


class OutdatedPreset(ResponseSchema, source=catalog.Model):
    """A model whose configuration was stored with an older form of its preset."""

    model: Annotated[str, From("name")]
    preset: Annotated[str, From("config.preset")]


class PresetList(ResponseSchema):
    presets: list[PresetView]
    behind: list[OutdatedPreset] = Field(description="Models whose copy of their preset is older than this release's.")


class PresetDetail(PresetView):
    description: Annotated[dict[str, Any], PROVIDED] = Field(
        description="What a model's `description` would say in its place."
    )


class PresetPath(Schema):
    preset: str


class ProbeBody(BodySchema):
    """An address at which an inference server answers, perhaps with a job to try."""

    url: str = Field(max_length=2048, examples=["http://10.0.0.4:8000"])
    preset: str | None = Field(None, max_length=100, description="Left out: the one that its answers speak for.")
    model: str | None = Field(
        None, max_length=128, description="Whose secrets may be put in.", json_schema_extra=MODEL_NAME
    )
    payload: Any = Field(None, description="Of a job to run there; null: none is run.")
    patience: float = Field(10.0, gt=0, le=25, description="Seconds for that job.")


class ExchangeView(ResponseSchema, source=probe.ProbedExchange):
    """One request to the server, and its answer.  Headers are not told, secrets are masked."""

    step: Literal["look", "health", "submit", "status", "result", "cancel"]
    request: str
    sent: str | None
    status: int | None = Field(description="null: it broke off.")
    answer: str
    took_ms: int
    rule: str | None = Field(description="What judged the answer: a rule of the description, or a default.")
    means: str | None


class PresetCandidate(ResponseSchema, source=probe.Candidate):
    preset: str
    weight: int = Field(description="The heavier, the surer.")
    because: str


class ProbeOutcome(ResponseSchema, source=Outcome):
    """What came of the job."""

    kind: str
    code: str
    message: str
    result: Annotated[str | None, PROVIDED] = Field(description="Its beginning.")


class ProbeView(ResponseSchema, source=probe.Recognition):
    reachable: Annotated[bool, From("is_there")]
    candidates: list[PresetCandidate]
    preset: Annotated[str | None, PROVIDED] = Field(description="The one that was asked for, or is proposed.")
    endpoint: Annotated[str | None, PROVIDED] = Field(description="What to register.")
    model: str | None = Field(description="What the server calls its model, if it tells.")
    health: Annotated[HealthReport | None, PROVIDED]
    outcome: Annotated[ProbeOutcome | None, PROVIDED]
    exchanges: Annotated[list[ExchangeView], PROVIDED]


class IdleReason(ResponseSchema, source=explain.Blocker):
    """One thing that keeps a server from getting jobs.  `code` is stable."""

    code: str
    sentence: str
    subject: str | None = Field(description="The server, model or slot that it is about.")
    until: Time | None = Field(description="When it may be over.")


class ServerCheck(ResponseSchema):
    """Why a server gets no jobs.  `reasons` is empty: nothing keeps it from them."""

    server: str
    sentence: str
    reasons: list[IdleReason]
    health: HealthReport | None = Field(description="null: it serves no model, or cannot be asked as it is described.")


_HEALTH_SENTENCES = {
    HealthKind.BUSY: "its health check says that it is busy, or still loading; jobs are offered all the same",
    HealthKind.DOWN: "its health check says that it cannot run jobs",
    HealthKind.FOREIGN: "what answers there does not know the path of its health check: wrong address, or wrong preset",
    HealthKind.GARBAGE: "its health check is answered with something else than its description expects",
}


def check_result(it: Server, reasons: Sequence[explain.Blocker], health: Health | None) -> dict[str, Any]:
    """ServerCheck."""
    found = list(reasons)
    if health is not None and health.kind in _HEALTH_SENTENCES:
        found.insert(0, explain.Blocker(f"health_{health.kind}", _health_sentence(health), it.name))
    said = f"{it.name}: " + "; ".join(one.sentence for one in found) if found else "Nothing keeps it from jobs."
    return ServerCheck.build(
        server=it.name,
        sentence=said,
        reasons=[IdleReason.build(one) for one in found],
        health=health and HealthReport.build(health),
    )


def _health_sentence(health: Health) -> str:
    if health.is_silent:
        return "its health check is not answered in time; it gets jobs only if no other server can run them"
    sentence = _HEALTH_SENTENCES[health.kind] if health.answered else "nobody answers its health check"
    return f"{sentence} ({health.message})" if health.message else sentence


class DescriptionSchema(Schema):
    """A JSON schema (2020-12)."""

    model_config = ConfigDict(extra="allow")
