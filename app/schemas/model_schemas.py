"""What is read and written about defaults of configurations; see app.schemas.job_schemas."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from app.api.openapi import Schema
from app.schemas.base import PROVIDED, From, ResponseSchema, Time
from app.schemas.job_schemas import MODEL_NAME, ConfigBody
from slotkeeper.registry.model_config import KIND, Defaults, ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot


class DefaultsBody(ConfigBody):
    """What holds where a model says nothing, all of it: what is left out is not said here."""

    @field_validator("kind")
    @classmethod
    def _says_no_kind(cls, value: str | None) -> str | None:
        raise ValueError("only a model is of a kind; leave it out")


class DefaultsView(ResponseSchema, source=Defaults):
    kind: Annotated[str | None, From(lambda it: it.name or None)] = Field(description="null: for all models.")
    overrides: dict[str, Any] = Field(description="What was said.")
    built_in: Annotated[dict[str, Any], From(lambda _: ModelConfig().model_dump())] = Field(
        description="What holds where nobody says anything."
    )
    described_by: str | None = Field(description="The version of the description that it makes.")
    changed_by: str | None
    changed_at: Time | None


class KindView(DefaultsView):
    models: Annotated[list[str], PROVIDED]


class KindList(ResponseSchema):
    kinds: list[KindView]


class KindPath(Schema):
    kind: str = Field(json_schema_extra=MODEL_NAME)


def kind_view(it: Defaults, catalog: CatalogSnapshot) -> dict[str, Any]:
    """KindView."""
    models = sorted(model.name for model in catalog.models.values() if model.overrides.get(KIND) == it.name)
    return KindView.build(it, models=models)
