"""Response bodies for servers, models and tenants."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from app.job_answers import seconds
from app.schemas.base import PROVIDED, From, ResponseSchema, Time, iso_time
from app.schemas.job_schemas import AdminStateName
from routing.queries import server_status
from routing.queries.explain import describe_quarantine
from routing.queries.model_status import ModelLoad
from routing.queue.fleets import QueueCounts
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.registry import catalog as registered
from slotkeeper.registry.model_config import ConfigSource, ModelConfig, parse_overrides, resolve_inherited
from slotkeeper.registry.policies import PRIORITIES, longest_overtaking_s, longest_wait
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.tenants import SecretRotation, Tenant
from slotkeeper.registry.values import AdminState, Server, TenantState
from slotkeeper.urls import mask_url
from tasks.server_adapters import effective_description, is_preset_outdated

Breaker = Literal["closed", "open", "half_open", "probing"]
OpenedBy = Literal["failures", "rate", "probe"]


def attribute_value(attribute: str | float) -> str | float | list[str]:
    """Return an attribute as the client sent it: a list is stored as one comma-separated text."""
    return attribute.split(",") if isinstance(attribute, str) and "," in attribute else attribute


def removal_of_server(server: Server) -> dict[str, Any] | None:
    """Return RemovalProgress of a server; None: it is not being removed."""
    if server.leaving_ms is None:
        return None
    return RemovalProgress.build(since=iso_time(server.leaving_ms), by=server.leaving_by, remaining=None)


def removal(model: str, catalog: CatalogSnapshot, left: Mapping[str, int] | None) -> dict[str, Any] | None:
    """Return RemovalProgress of a model; None: it is not being removed.

    `left`: state -> number of its jobs that have not ended; None: they were not counted.
    """
    if not catalog.is_being_removed(model):
        return None
    closed = catalog.closed[model]
    return RemovalProgress.build(since=iso_time(closed.changed_ms), by=closed.changed_by, remaining=left and dict(left))


class StateView(ResponseSchema):
    """The state of a server, a model or a tenant."""

    state: AdminStateName = Field(
        description="Model or tenant: `paused`: jobs are accepted and none is started.  `draining`: no job is "
        "accepted, and accepted jobs are started.  `frozen`: no job is accepted and none is started.  Server: only "
        "`online` starts new runs; in every state its current runs continue to their end."
    )
    reason: str | None
    changed_by: str | None = Field(description="The tenant that set this state.")
    changed_at: Time | None


class RemovalProgress(ResponseSchema):
    """The removal of a server or model: it gets no new jobs, and is deleted when its jobs have ended."""

    since: Time
    by: str | None
    remaining: dict[str, int] | None = Field(description="Jobs that have not ended, by state; null: not counted here.")


class ServerView(StateView, source=Server):
    server: Annotated[str, From("name")]
    removal: Annotated[RemovalProgress | None, From(removal_of_server)] = Field(
        description="null: it is not being removed."
    )
    fleet: str
    slots: int
    weight: float
    attributes: Annotated[
        dict[str, Any], From(lambda server: {name: attribute_value(value) for name, value in server.attributes.items()})
    ] = Field(description="`<model>:<name>` applies to one model only.")
    models: Annotated[
        dict[str, str], From(lambda server: {model: mask_url(url) for model, url in server.endpoints.items()})
    ] = Field(description="Model -> endpoint.")
    described: Annotated[dict[str, dict[str, Any]], From("overrides")] = Field(
        description="Model -> how the server is called for it, where that differs from the model's configuration."
    )
    created_at: Time


class ServerScore(ResponseSchema, source=server_status.Score):
    """The score of a server: the server with a free slot and the lowest `total` gets the next job."""

    load: float = Field(description="Taken slots as a share of all slots.")
    failures: float = Field(description="Recent failures; the weight of each halves every minute.")
    slowness: float = Field(description="0: runs take the model's mean time; 1: twice as long.")
    swap: float = Field(description="1: another model is loaded.")
    silence: float = Field(description="10000: its last health check was not answered in time; 0: it was answered.")
    total: float = Field(description="(1 + load + failures + slowness + swap) / the server's weight + silence.")


class ServerStatusView(ResponseSchema, source=server_status.ServerStatus):
    """The status of a server in the queue at this moment."""

    free: int = Field(description="Slots without a lease and not in cooldown, even if a breaker is open.")
    cooling: int = Field(description="Slots in cooldown: for a time they are not offered.")
    cooldown_until: Time | None = Field(description="When the first of them can be offered again.")
    taken: int = Field(description="Slots with a run, and quarantined slots.")
    away_since: Time | None = Field(
        description="Since when the server is unreachable or its health check reports that it cannot run jobs; null: "
        "its last check was good."
    )
    away_why: Annotated[str | None, From(lambda status: status.away_why or None)] = Field(
        description="The problem that its health check reports; null: none."
    )
    silent_since: Time | None = Field(
        description="Since when its health check is not answered in time, so that it gets jobs last; null: it was "
        "answered."
    )
    breaker: Breaker
    breaker_until: Annotated[Time | None, From("open_until_ms")] = Field(
        description="When one job may test it; null: the breaker is closed."
    )
    breaker_why: Annotated[OpenedBy | None, From(lambda status: status.open_why or None)] = Field(
        description="What opened the breaker: `failures`, consecutive failed runs; `rate`, too many failures among the "
        "latest runs; `probe`, the failure of the test job."
    )
    breaker_opened: Annotated[int, From("opened")] = Field(
        description="How many times in a row the breaker was opened."
    )
    loaded: Annotated[str | None, From(lambda status: status.loaded or None)] = Field(
        description="The model of its last run."
    )
    swaps: int = Field(description="How many times it has changed models.")
    scores: dict[str, ServerScore] = Field(description="By model.")


class QuarantinedSlotView(ResponseSchema, source=QuarantinedSlot):
    """A quarantined slot: its run has ended here, but the server may still run the job."""

    slot: str
    job_id: str
    attempt: int
    reason: str = Field(description="What ended the run here: `timed_out`, `canceled`, `deadline_passed`, …")
    since: Time
    until: Time = Field(
        description="When the quarantine ends at the latest.  It ends earlier if the server's health report does not "
        "list the run any more."
    )
    sentence: Annotated[str, From(describe_quarantine)]


class ServerDetail(ServerView):
    status: Annotated[ServerStatusView | None, PROVIDED] = Field(description="null: Redis is unavailable.")
    quarantined: Annotated[list[QuarantinedSlotView], PROVIDED]
    running: Annotated[int | None, PROVIDED] = Field(description="Slots with a run; null: Redis is unavailable.")
    free: Annotated[int | None, PROVIDED] = Field(
        description="Slots that the next job can get; 0 while the whole server is blocked; null: Redis is unavailable."
    )
    blocked_by: Annotated[str | None, PROVIDED] = Field(
        description="Why none of its slots can take the next job: its state, `busy` (jobs run there), `withheld` (the "
        "taken slots are quarantined), `away`, `in cooldown`, `breaker open`, `being tried by one job`; null: a slot "
        "is free, or Redis is unavailable."
    )


class FleetView(ResponseSchema, source=QueueCounts):
    """The slots of a fleet at this moment."""

    fleet: Annotated[str, PROVIDED]
    free: int
    cooling: int = Field(description="Slots in cooldown: for a time they are not offered.")
    taken: int
    waiting: Annotated[int, From(lambda counts: sum(counts.waiting.values()))]


class ServerList(ResponseSchema):
    servers: list[ServerDetail]
    fleets: list[FleetView] | None = Field(description="null: Redis is unavailable.")


class ModelView(StateView, source=registered.Model):
    model: Annotated[str, From("name")]
    fleet: str
    model_type: Annotated[str, From("config.model_type")]
    policy: Annotated[str, From("config.policy")]
    servers: Annotated[list[str], PROVIDED]
    removal: Annotated[RemovalProgress | None, PROVIDED] = Field(description="null: it is not being removed.")
    slots: Annotated[int, PROVIDED] = Field(description="Slots of the model's servers that are online.")
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


class TenantView(StateView, source=TenantState):
    tenant: Annotated[str, From("name")]
    has_key: Annotated[bool, PROVIDED]
    admin: Annotated[bool, PROVIDED]
    rate_per_s: Annotated[int | None, PROVIDED] = Field(
        description="Jobs that may be submitted per second; null: no limit."
    )
    burst: Annotated[int | None, PROVIDED]


class TenantList(ResponseSchema):
    """The tenants that have a key, and those whose state is not `online`."""

    tenants: list[TenantView]


class WebhookSecretView(ResponseSchema):
    """The secrets with which a tenant verifies its webhook messages (Standard Webhooks)."""

    tenant: str
    secrets: list[str] = Field(description="`whsec_…`, the newest first; each message is signed with all of them.")
    rotation: int = Field(description="How many times the secret was rotated.")
    former_until: str | None = Field(
        description="Until when messages are also signed with the previous secret; null: they are not."
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


def model_view(model: registered.Model, catalog: CatalogSnapshot, counts: QueueCounts | None) -> dict[str, Any]:
    """Return ModelView.  `counts`: those of its fleet; None: Redis is unavailable."""
    waiting = None if counts is None else counts.waiting.get(model.name, 0)
    return ModelView.build(model, **_catalog_fields(model, catalog, None), waiting=waiting)


def model_detail(
    model: registered.Model, catalog: CatalogSnapshot, load: ModelLoad | None, left: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return ModelDetail.  `load` None: Redis is unavailable.  `left`: as for `removal`."""
    load_view = load and ModelLoadView.build(load)
    return ModelDetail.build(
        model, **_catalog_fields(model, catalog, left), waiting=load and load.waiting, load=load_view
    )


def _catalog_fields(
    model: registered.Model, catalog: CatalogSnapshot, left: Mapping[str, int] | None
) -> dict[str, Any]:
    """Return the fields of ModelView that come from the catalog."""
    return {
        "servers": sorted(server.name for server in catalog.servers.values() if model.name in server.endpoints),
        "removal": removal(model.name, catalog, left),
        "slots": catalog.count_slots(model.name),
    }


def config_view(model: registered.Model, catalog: CatalogSnapshot) -> dict[str, Any]:
    """Return ConfigView."""
    inherited = resolve_inherited(model.overrides, catalog.defaults)
    return ConfigView.build(model, defaults=parse_overrides(inherited.values)[0].model_dump())


def tenant_view(name: str, tenant: Tenant | None, state: TenantState | None) -> dict[str, Any]:
    """Return TenantView.  `tenant` None: it has no key.  `state` None: it is online."""
    return TenantView.build(
        state or TenantState(name, AdminState.ONLINE),
        has_key=tenant is not None,
        admin=tenant is not None and tenant.admin,
        rate_per_s=tenant and tenant.rate_per_s,
        burst=tenant and tenant.burst,
    )


def webhook_secret_view(name: str, rotation: SecretRotation, secrets: list[str], now_ms: int) -> dict[str, Any]:
    """Return WebhookSecretView."""
    until = iso_time(rotation.former_until_ms) if len(rotation.list_valid(now_ms)) > 1 else None
    return WebhookSecretView.build(tenant=name, secrets=secrets, rotation=rotation.number, former_until=until)
