"""What is read, as documented: requests are checked by these.  What is answered stands in the modules `…_answers`.

What a field may hold beyond its type is checked once, by the use case, which names the field too.
"""

from collections.abc import Collection
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from app.api.openapi import Schema
from app.schemas.cursors import BATCH, CURSOR
from routing.admission.constraints import CHOICE_SCHEMAS, VALUE_PATTERN
from routing.admission.job_request import MODEL_PATTERN, JobRequest
from routing.admission.labels import MAX_LABELS
from slotkeeper.jobs.states import State
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.tenants import MAX_NAME_LENGTH, PRINTABLE_PATTERN
from tasks.servers import from_shorthand

AdminStateName = Literal["online", "paused", "draining", "frozen"]

_REASON: Any = Field(None, max_length=500, description="Why; shown wherever the state is.", examples=["new driver"])
MODEL_NAME: Any = {"pattern": f"^{MODEL_PATTERN}$"}
_VALUE: Any = {"pattern": f"^{VALUE_PATTERN}$"}
_CURSOR: Any = {"pattern": f"^{CURSOR}$"}
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


_MAX_UNKNOWN_FIELDS = 20


class BodySchema(Schema):
    """A body: only what is listed, and nothing turned into another type."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _fit_to_look_at(cls, given: Any) -> Any:
        return _integral_floats_to_int(_drop_excess_unknown(given, cls.model_fields))


def _integral_floats_to_int(given: Any) -> Any:
    """JSON makes no difference between 7 and 7.0."""
    if not isinstance(given, dict):
        return given
    return {name: int(it) if isinstance(it, float) and it.is_integer() else it for name, it in given.items()}


def _drop_excess_unknown(given: Any, known: Collection[str]) -> Any:
    """Of very many fields that are not known a few are enough to refuse it; each costs a sentence."""
    if not isinstance(given, dict) or len(given) <= len(known) + _MAX_UNKNOWN_FIELDS:
        return given
    unknown = islice((name for name in given if name not in known), _MAX_UNKNOWN_FIELDS)
    return {name: given[name] for name in (*unknown, *known) if name in given}


# -- jobs --------------------------------------------------------------------------------------------------


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
        description="The batch that the jobs belong to: a UUIDv7 of the client's own, or the `batch` of an earlier "
        "answer.  Left out: a new one.",
        json_schema_extra={"pattern": f"^{BATCH}$"},
    )


class JobPath(Schema):
    job_id: str


class WaitQuery(Schema):
    wait: float = Field(0, ge=0, le=60, description="Seconds to wait for the job to end before answering.")


class ListQuery(Schema):
    status: State | None = None
    model: str | None = Field(None, json_schema_extra=MODEL_NAME)
    batch: str | None = Field(None, json_schema_extra={"pattern": f"^{BATCH}$"})
    label: list[str] = Field(
        [],
        max_length=MAX_LABELS,
        description="`NAME=VALUE`: only jobs with this label; again: with this one, too.",
        examples=[["team=search"]],
    )
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(
        None, max_length=20, description="next_cursor of the page before.", json_schema_extra=_CURSOR
    )


class DlqQuery(Schema):
    model: str | None = Field(None, json_schema_extra=MODEL_NAME)
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, max_length=20, json_schema_extra=_CURSOR)


# -- servers and models ------------------------------------------------------------------------------------


class RegisterBody(BodySchema):
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


class ReleaseSlotsBody(BodySchema):
    """Which withheld slots of a server may be used again."""

    slot: str | None = Field(None, description="One of them, such as `gpu1-slot0`; left out: all.")


class StateBody(BodySchema):
    """How something shall stand."""

    state: AdminStateName
    reason: str | None = _REASON


class TenantBody(BodySchema):
    """How a tenant shall stand, and its limits.  What is left out stays as it is."""

    state: AdminStateName | None = None
    reason: str | None = _REASON
    rate_per_s: int | None = Field(None, ge=1, le=1_000_000, description="Submits a second; null: no limit.")
    burst: int | None = Field(None, ge=1, le=1_000_000, description="Submits at once; it goes with a rate.")

    @property
    def limits(self) -> dict[str, int | None]:
        """The limits that are given."""
        return {name: getattr(self, name) for name in ("rate_per_s", "burst") if name in self.model_fields_set}


class ServerPath(Schema):
    server: str = Field(json_schema_extra=MODEL_NAME)


class ModelPath(Schema):
    model: str = Field(json_schema_extra=MODEL_NAME)


class TenantPath(Schema):
    tenant: str = Field(json_schema_extra={"maxLength": MAX_NAME_LENGTH, "pattern": f"^{PRINTABLE_PATTERN}$"})


class ConfigBody(ModelConfig):
    """The overrides, all of them: what is left out goes back to its default."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _fit_to_look_at(cls, given: Any) -> Any:
        if isinstance(given, dict):
            given = {name: _integral_floats_to_int(value) for name, value in given.items()}
        return _integral_floats_to_int(_drop_excess_unknown(given, cls.model_fields))

    @field_validator("poll_endpoint_template", "id_field")
    @classmethod
    def _is_spoken_by(cls, value: str | None, info: ValidationInfo) -> str | None:
        """A worker must be able to make requests of it; later would be too late to say so."""
        template, id_field = (value, None) if info.field_name == "poll_endpoint_template" else (None, value)
        from_shorthand("async", template, id_field)
        return value
