"""Request and response bodies for the secrets that server descriptions name."""

from typing import Annotated, Any

from pydantic import Field

from app.api.openapi import Schema
from app.schemas.base import From, ResponseSchema, Time
from app.schemas.job_schemas import MODEL_NAME, BodySchema
from slotkeeper.registry.server_descriptions import Secret
from tasks.security.vault import MAX_LENGTH, MIN_LENGTH, NAME_PATTERN, VALUE_PATTERN

_SECRET: Any = {"pattern": f"^{NAME_PATTERN}$"}


_Named = Annotated[str, Field(max_length=128, json_schema_extra=MODEL_NAME)]


class SecretPath(Schema):
    name: str = Field(json_schema_extra=_SECRET)


class SecretBody(BodySchema):
    """A secret.  A server description refers to it as {{secret/NAME}}."""

    value: str = Field(
        description="The value.  It is stored encrypted, sent to servers, and never returned by the API.",
        json_schema_extra={
            "minLength": MIN_LENGTH,
            "maxLength": MAX_LENGTH,
            "pattern": f"^{VALUE_PATTERN}$",
            "writeOnly": True,
        },
    )
    models: list[_Named] | None = Field(
        description="Models whose descriptions may refer to it; null: all models.",
        min_length=1,
        max_length=100,
        examples=[["flux"]],
    )


class SecretView(ResponseSchema, source=Secret):
    secret: Annotated[str, From("name")]
    models: Annotated[
        list[str] | None, From(lambda secret: None if secret.models is None else sorted(secret.models))
    ] = Field(description="null: all models.")
    set_by: str | None = Field(description="The tenant that set it.")
    set_at: Time


class SecretList(ResponseSchema):
    secrets: list[SecretView]
