"""Request and response bodies for models, their configuration and its defaults."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from app.schemas.base import (
    MODEL_NAME,
    PROVIDED,
    From,
    RemovalProgress,
    ResponseSchema,
    Schema,
    StateView,
    Time,
    drop_excess_unknown,
    integral_floats_to_int,
    remember_fields,
    seconds,
)
from app.schemas.server_schemas import Breaker, OpenedBy, removal
from routing.queries.model_status import ModelLoad
from routing.queue.fleets import QueueCounts
from slotkeeper.registry import catalog as registered
from slotkeeper.registry.model_config import (
    KIND,
    ConfigSource,
    Defaults,
    ModelConfig,
    parse_overrides,
    resolve_inherited,
)
from slotkeeper.registry.policies import PRIORITIES, longest_overtaking_s, longest_wait
from slotkeeper.registry.snapshot import CatalogSnapshot
from tasks.server_adapters import effective_description, is_preset_outdated
from tasks.servers import from_shorthand


class ConfigBody(ModelConfig):
    """All overrides of a model's configuration: an omitted field gets its default."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _normalize_input(cls, body: Any) -> Any:
        if isinstance(body, dict):
            body = {name: integral_floats_to_int(value) for name, value in body.items()}
        return integral_floats_to_int(drop_excess_unknown(body, cls.model_fields))

    @field_validator("poll_endpoint_template", "id_field")
    @classmethod
    def _check_shorthand(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Refuse a template or field from which a worker cannot build requests, before it is stored."""
        template, id_field = (value, None) if info.field_name == "poll_endpoint_template" else (None, value)
        from_shorthand("async", template, id_field)
        return value


remember_fields(ConfigBody)


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


class ModelPath(Schema):
    model: str = Field(json_schema_extra=MODEL_NAME)


class ModelView(StateView, source=registered.Model):
    model: Annotated[str, From("name")]
    fleet: str
    model_type: Annotated[str, From("config.model_type")]
    policy: Annotated[str, From("config.policy")]
    servers: Annotated[list[str], PROVIDED]
    removal: Annotated[RemovalProgress | None, PROVIDED] = Field(description="null: it is not being removed.")
    slots: Annotated[int, PROVIDED] = Field(
        description="Slots of the model's servers that are online, and of its nodes that are connected."
    )
    waiting: Annotated[int | None, PROVIDED] = Field(description="null: Redis is unavailable.")


class ModelList(ResponseSchema):
    models: list[ModelView]


class ModelLoadView(ResponseSchema, source=ModelLoad):
    """The load of a model at this moment: its waiting work and its breaker."""

    mean_run_s: Annotated[float | None, From(lambda load: load.run_ms and load.run_ms / 1000)] = Field(
        description="Mean slot time of its latest runs; null: no run has succeeded yet."
    )
    work_s: Annotated[float | None, From(lambda load: None if load.work_ms is None else seconds(load.work_ms))] = Field(
        description="How long the waiting jobs will occupy its slots; null: not known."
    )
    limit: int | None = Field(
        description="Number of jobs that may wait, per tenant with the policy `fair`; null: no limit."
    )
    breaker: Breaker
    breaker_until: Annotated[Time | None, From("open_until_ms")] = Field(
        description="When one job may test it; null: the breaker is closed."
    )
    breaker_why: Annotated[OpenedBy | None, From(lambda status: status.open_why or None)] = Field(
        description="What opened the breaker: consecutive failed runs, or the failure of the test job."
    )


class ModelDetail(ModelView):
    """A model, and bounds of how long its jobs may wait."""

    load: Annotated[ModelLoadView | None, PROVIDED] = Field(description="null: Redis is unavailable.")
    longest_overtaking_s: Annotated[
        dict[str, float | None],
        From(lambda model: {str(level): longest_overtaking_s(level, model.config) for level in PRIORITIES}),
    ] = Field(
        description="Priority -> seconds: a job may be overtaken by jobs accepted at most this much later; null: no "
        "bound."
    )
    longest_wait: Annotated[str, From(lambda model: longest_wait(model.config))] = Field(
        description="The longest wait that the order of the queue can cause, in terms of the load."
    )


class ConfigView(ResponseSchema, source=registered.Model):
    """The configuration of a model."""

    model: Annotated[str, From("name")]
    config: Annotated[dict[str, Any], From(lambda model: model.config.model_dump())] = Field(
        description="The values in force."
    )
    overrides: dict[str, Any]
    defaults: Annotated[dict[str, Any], PROVIDED] = Field(
        description="The values of fields that the model does not override."
    )
    sources: Annotated[
        dict[str, str],
        From(
            lambda model: {
                name: str(model.sources.get(name, ConfigSource.RELEASE)) for name in ModelConfig.model_fields
            }
        ),
    ] = Field(description="Field -> where its value is set: model, kind, installation, built-in.")
    description: Annotated[
        dict[str, Any] | None, From(lambda model: effective_description(model.config, model.described_by))
    ] = Field(description="How its servers are called, with all defaults; null: the stored description cannot be read.")
    described_by: str | None = Field(
        description="Version of the description, as runs refer to it; null: the slot protocol."
    )
    preset_behind: Annotated[bool, From(lambda model: is_preset_outdated(model.config, model.described_by))] = Field(
        description="The preset has changed since this configuration was stored; store it again to use the new preset."
    )


def model_view(
    model: registered.Model, catalog: CatalogSnapshot, slots: int, counts: QueueCounts | None
) -> dict[str, Any]:
    """Return ModelView.  `slots`: on which it can run now.  `counts`: of its fleet; None: Redis is unavailable."""
    waiting = None if counts is None else counts.waiting.get(model.name, 0)
    return ModelView.build(model, **_catalog_fields(model, catalog, None), slots=slots, waiting=waiting)


def model_detail(
    model: registered.Model,
    catalog: CatalogSnapshot,
    slots: int,
    load: ModelLoad | None,
    left: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return ModelDetail.  `slots`: on which it can run now.  `load` None: Redis is unavailable.

    left: as for `removal`.
    """
    load_view = load and ModelLoadView.build(load)
    return ModelDetail.build(
        model, **_catalog_fields(model, catalog, left), slots=slots, waiting=load and load.waiting, load=load_view
    )


def _catalog_fields(
    model: registered.Model, catalog: CatalogSnapshot, left: Mapping[str, int] | None
) -> dict[str, Any]:
    """Return the fields of ModelView that come from the catalog."""
    return {
        "servers": sorted(server.name for server in catalog.servers.values() if model.name in server.endpoints),
        "removal": removal(model.name, catalog, left),
    }


def config_view(model: registered.Model, catalog: CatalogSnapshot) -> dict[str, Any]:
    """Return ConfigView."""
    inherited = resolve_inherited(model.overrides, catalog.defaults)
    return ConfigView.build(model, defaults=parse_overrides(inherited.values)[0].model_dump())
