"""Request bodies and queries for jobs, servers, models and tenants.  Requests are validated against them.

The schemas check types and sizes.  The use case checks further rules, and its error names the field too.
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

_REASON: Any = Field(
    None, max_length=500, description="The reason for the state; shown with it.", examples=["new driver"]
)
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
    """Base class of request bodies: unknown fields are refused, and values are not converted to another type."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _normalize_input(cls, body: Any) -> Any:
        return _integral_floats_to_int(_drop_excess_unknown(body, cls.model_fields))


def _integral_floats_to_int(body: Any) -> Any:
    """Convert floats without a fraction to int: JSON does not distinguish 7 from 7.0."""
    if not isinstance(body, dict):
        return body
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in body.items()
    }


def _drop_excess_unknown(body: Any, known: Collection[str]) -> Any:
    """Keep only the first unknown fields: a few are enough to refuse the body, and each lengthens the error."""
    if not isinstance(body, dict) or len(body) <= len(known) + _MAX_UNKNOWN_FIELDS:
        return body
    unknown = islice((name for name in body if name not in known), _MAX_UNKNOWN_FIELDS)
    return {name: body[name] for name in (*unknown, *known) if name in body}


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
        description="The batch that the jobs belong to: a UUID that the client chooses, as 36 lowercase hexadecimal "
        "digits and hyphens, or the `batch` of an earlier response.  If omitted, a new batch.",
        json_schema_extra={"pattern": f"^{BATCH}$"},
    )


class JobPath(Schema):
    job_id: str


class WaitQuery(Schema):
    wait: float = Field(
        0, ge=0, le=60, description="Seconds to wait for the end of the job before the response is sent."
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


# -- servers and models ------------------------------------------------------------------------------------


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


class StateBody(BodySchema):
    """The new state of a server or a model."""

    state: AdminStateName
    reason: str | None = _REASON


class TenantBody(BodySchema):
    """The new state of a tenant, and its limits.  Omitted fields are not changed."""

    state: AdminStateName | None = None
    reason: str | None = _REASON
    rate_per_s: int | None = Field(
        None, ge=1, le=1_000_000, description="Jobs that may be submitted per second; null: no limit."
    )
    burst: int | None = Field(
        None, ge=1, le=1_000_000, description="Jobs that may be submitted at once; requires a rate."
    )

    @property
    def limits(self) -> dict[str, int | None]:
        """The limits in the body, by name."""
        return {name: getattr(self, name) for name in ("rate_per_s", "burst") if name in self.model_fields_set}


class ServerPath(Schema):
    server: str = Field(json_schema_extra=MODEL_NAME)


class ModelPath(Schema):
    model: str = Field(json_schema_extra=MODEL_NAME)


class TenantPath(Schema):
    tenant: str = Field(json_schema_extra={"maxLength": MAX_NAME_LENGTH, "pattern": f"^{PRINTABLE_PATTERN}$"})


class ConfigBody(ModelConfig):
    """All overrides of a model's configuration: an omitted field gets its default."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _normalize_input(cls, body: Any) -> Any:
        if isinstance(body, dict):
            body = {name: _integral_floats_to_int(value) for name, value in body.items()}
        return _integral_floats_to_int(_drop_excess_unknown(body, cls.model_fields))

    @field_validator("poll_endpoint_template", "id_field")
    @classmethod
    def _check_shorthand(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Refuse a template or field from which a worker cannot build requests, before it is stored."""
        template, id_field = (value, None) if info.field_name == "poll_endpoint_template" else (None, value)
        from_shorthand("async", template, id_field)
        return value
