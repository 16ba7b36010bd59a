"""Request and response bodies for validations."""

from typing import Annotated, Any, Literal

from pydantic import Field

from app.schemas.base import MODEL_NAME, BodySchema, From, ResponseSchema, Schema, Time
from slotkeeper.registry.validations import ServerAnswers, Validation

NAME: Any = {"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}
_COMPARE: Any = Field(
    "subset",
    description="`equal`; `subset`: objects may have further fields; `close`: numbers may differ by `tolerance`.",
)


class ValidationPath(Schema):
    name: str = Field(max_length=64, json_schema_extra=NAME)


class ValidationBody(BodySchema):
    """A job with a known answer."""

    model: str = Field(max_length=128, json_schema_extra=MODEL_NAME, examples=["zimg"])
    payload: dict[str, Any] = Field(description="As that of a job.", examples=[{"prompt": "2 + 2"}])
    expected: Any = Field(description="The result; `*` in it fits any value.", examples=[{"answer": 4, "took": "*"}])
    every_s: int = Field(ge=10, le=86_400, description="It is submitted about every so many seconds, at random times.")
    compare: Literal["equal", "subset", "close"] = _COMPARE
    tolerance: float = Field(0.0, ge=0)
    enabled: bool = True


class ValidationView(ResponseSchema, source=Validation):
    name: str
    model: str
    payload: dict[str, Any]
    expected: Any
    every_s: int
    compare: Literal["equal", "subset", "close"]
    tolerance: float
    enabled: Annotated[bool, From("is_enabled")]
    changed_by: str | None = Field(description="The tenant of the operator's key.")
    changed_at: Time


class ValidationList(ResponseSchema):
    validations: list[ValidationView]


class ServerAnswersView(ResponseSchema, source=ServerAnswers):
    """The latest answers of a server, 20 at most."""

    server: str
    right: int
    wrong: int
    none: int = Field(description="Without a result, which says nothing of the server.")
    last_wrong_at: Time | None
    last_wrong: str | None = Field(description="Where the latest wrong answer differs.")


class ValidationReport(ResponseSchema):
    servers: list[ServerAnswersView]
