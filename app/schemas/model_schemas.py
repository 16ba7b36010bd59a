"""Request and response bodies for defaults of model configurations."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from app.api.openapi import Schema
from app.schemas.base import PROVIDED, From, ResponseSchema, Time
from app.schemas.job_schemas import MODEL_NAME, ConfigBody
from slotkeeper.registry.model_config import KIND, Defaults, ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot


class DefaultsBody(ConfigBody):
    """All defaults for models that do not set a field themselves: an omitted field has no default here."""

    @field_validator("kind")
    @classmethod
    def _refuse_kind(cls, value: str | None) -> str | None:
        raise ValueError("only a model has a kind; leave it out")


class DefaultsView(ResponseSchema, source=Defaults):
    kind: Annotated[str | None, From(lambda defaults: defaults.name or None)] = Field(
        description="null: for all models."
    )
    overrides: dict[str, Any] = Field(description="The fields that were set.")
    built_in: Annotated[dict[str, Any], From(lambda _: ModelConfig().model_dump())] = Field(
        description="The values that apply where no field is set."
    )
    described_by: str | None = Field(
        description="The version of the server description that results from these defaults."
    )
    changed_by: str | None
    changed_at: Time | None


class KindView(DefaultsView):
    models: Annotated[list[str], PROVIDED]


class KindList(ResponseSchema):
    kinds: list[KindView]


class KindPath(Schema):
    kind: str = Field(json_schema_extra=MODEL_NAME)


def kind_view(defaults: Defaults, catalog: CatalogSnapshot) -> dict[str, Any]:
    """Return KindView for the defaults of a kind of models."""
    models = sorted(model.name for model in catalog.models.values() if model.overrides.get(KIND) == defaults.name)
    return KindView.build(defaults, models=models)
