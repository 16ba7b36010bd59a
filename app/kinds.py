"""What is read and written about kinds of servers, and about what a server says of itself; see app.schemas."""

from typing import Any, Literal

from pydantic import Field

from app.openapi import Model
from app.schemas import MODEL_NAME, Asked, Time


class HealthReport(Model):
    """What a server says of itself, asked just now."""

    kind: str = Field(description="up, busy, down, foreign, garbage, unknown")
    active_jobs: int | None = Field(description="null: it did not say.")
    job_ids: list[str] | None
    message: str


class PresetView(Model):
    """A kind of inference server that is known by name."""

    name: str
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


class PresetList(Model):
    presets: list[PresetView]


class PresetDetail(PresetView):
    description: dict[str, Any] = Field(description="What a model's `description` would say in its place.")


class PresetPath(Model):
    preset: str


class ProbeBody(Asked):
    """An address at which an inference server answers, perhaps with a job to try."""

    url: str = Field(max_length=2048, examples=["http://10.0.0.4:8000"])
    preset: str | None = Field(None, max_length=100, description="Left out: the one that its answers speak for.")
    model: str | None = Field(
        None, max_length=128, description="Whose secrets may be put in.", json_schema_extra=MODEL_NAME
    )
    payload: Any = Field(None, description="Of a job to run there; null: none is run.")
    patience: float = Field(10.0, gt=0, le=25, description="Seconds for that job.")


class Exchange(Model):
    """One request to the server, and its answer.  Headers are not told, secrets are masked."""

    step: Literal["look", "health", "submit", "status", "result", "cancel"]
    request: str
    sent: str | None
    status: int | None = Field(description="null: it broke off.")
    answer: str
    took_ms: int
    rule: str | None = Field(description="What judged the answer: a rule of the description, or a default.")
    means: str | None


class Candidate(Model):
    preset: str
    weight: int = Field(description="The heavier, the surer.")
    because: str


class TrialView(Model):
    """What came of the job."""

    kind: str
    code: str
    message: str
    result: str | None = Field(description="Its beginning.")


class ProbeView(Model):
    reachable: bool
    candidates: list[Candidate]
    preset: str | None = Field(description="The one that was asked for, or is proposed.")
    endpoint: str | None = Field(description="What to register.")
    model: str | None = Field(description="What the server calls its model, if it tells.")
    health: HealthReport | None
    outcome: TrialView | None
    exchanges: list[Exchange]


class IdleReason(Model):
    """One thing that keeps a server from getting jobs.  `code` is stable."""

    code: str
    sentence: str
    subject: str | None = Field(description="The server, model or slot that it is about.")
    until: Time | None = Field(description="When it may be over.")


class ServerCheck(Model):
    """Why a server gets no jobs.  `reasons` is empty: nothing keeps it from them."""

    server: str
    sentence: str
    reasons: list[IdleReason]
    health: HealthReport | None = Field(description="null: it serves no model, or cannot be asked as it is described.")
