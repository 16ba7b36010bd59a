"""What is answered about servers, models and tenants."""

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
    """An attribute as it was given: a list is kept as one text."""
    return attribute.split(",") if isinstance(attribute, str) and "," in attribute else attribute


def removal_of_server(it: Server) -> dict[str, Any] | None:
    """Of a server that is being removed."""
    if it.leaving_ms is None:
        return None
    return RemovalProgress.build(since=iso_time(it.leaving_ms), by=it.leaving_by, remaining=None)


def removal(model: str, catalog: CatalogSnapshot, left: Mapping[str, int] | None) -> dict[str, Any] | None:
    """Of a model that is being removed.  `left`: its jobs that have not ended; None: they were not counted."""
    if not catalog.is_being_removed(model):
        return None
    closed = catalog.closed[model]
    return RemovalProgress.build(since=iso_time(closed.changed_ms), by=closed.changed_by, remaining=left and dict(left))


class StateView(ResponseSchema):
    """Whether something takes part."""

    state: AdminStateName = Field(
        description="paused: nothing new is started, submits are accepted.  draining: what waits goes on, and no new "
        "jobs are accepted; of a server: what runs there ends, and nothing new is sent.  frozen: neither."
    )
    reason: str | None
    changed_by: str | None = Field(description="The tenant that brought it into this state.")
    changed_at: Time | None


class RemovalProgress(ResponseSchema):
    """Something is being removed: it takes nothing new, and goes when what it has is over."""

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
        dict[str, Any], From(lambda it: {name: attribute_value(own) for name, own in it.attributes.items()})
    ] = Field(description="`<model>:<name>` is that of one model alone.")
    models: Annotated[
        dict[str, str], From(lambda it: {model: mask_url(url) for model, url in it.endpoints.items()})
    ] = Field(description="Model -> endpoint.")
    described: Annotated[dict[str, dict[str, Any]], From("overrides")] = Field(
        description="Model -> how it is spoken to for that, where the model's configuration does not say it."
    )
    created_at: Time


class ServerScore(ResponseSchema, source=server_status.Score):
    """What a server is chosen by: of those with a free slot, that with the lowest total."""

    load: float = Field(description="Taken slots, as a share of all.")
    failures: float = Field(description="Recent failures; after a minute each counts half.")
    slowness: float = Field(description="0: as quick as the model's mean; 1: it takes twice as long.")
    swap: float = Field(description="1: another model is loaded.")
    silence: float = Field(description="10000: its last health check was not answered in time; 0: it was.")
    total: float = Field(description="1 and the first four, divided by the server's weight; and the silence.")


class ServerStatusView(ResponseSchema, source=server_status.ServerStatus):
    """How a server stands in the waiting room at this moment."""

    free: int = Field(description="Slots without a lease and not in cooldown, also where a breaker is open.")
    cooling: int = Field(description="Slots in cooldown: they are offered to nobody for a while.")
    cooldown_until: Time | None = Field(description="When the first of them is offered again.")
    taken: int = Field(description="Slots with a run, and those that are withheld.")
    away_since: Time | None = Field(
        description="Since when it could not be reached, or says that it cannot run jobs; null: it can, as last asked."
    )
    away_why: Annotated[str | None, From(lambda status: status.away_why or None)] = Field(
        description="What its health check says is wrong; null: nothing."
    )
    silent_since: Time | None = Field(
        description="Since when its health check is not answered in time, so that it gets jobs last; null: it was."
    )
    breaker: Breaker
    breaker_until: Annotated[Time | None, From("open_until_ms")] = Field(
        description="When one job may try it; null: it is closed."
    )
    breaker_why: Annotated[OpenedBy | None, From(lambda it: it.open_why or None)] = Field(
        description="What opened it: runs that failed one after another, too many of the latest, or the last trial."
    )
    breaker_opened: Annotated[int, From("opened")] = Field(description="How often in a row it was opened.")
    loaded: Annotated[str | None, From(lambda it: it.loaded or None)] = Field(description="The model that it ran last.")
    swaps: int = Field(description="How often it has changed models.")
    scores: dict[str, ServerScore] = Field(description="By model.")


class QuarantinedSlotView(ResponseSchema, source=QuarantinedSlot):
    """A slot whose run has ended here, and of which its server has not let go."""

    slot: str
    job_id: str
    attempt: int
    reason: str = Field(description="What ended the run here: `timed_out`, `canceled`, `deadline_passed`, …")
    since: Time
    until: Time = Field(description="The longest; before, as soon as the server's report no longer shows the run.")
    sentence: Annotated[str, From(describe_quarantine)]


class ServerDetail(ServerView):
    status: Annotated[ServerStatusView | None, PROVIDED] = Field(description="null: Redis is away.")
    quarantined: Annotated[list[QuarantinedSlotView], PROVIDED]
    running: Annotated[int | None, PROVIDED] = Field(description="Slots that hold a run; null: Redis is away.")
    free: Annotated[int | None, PROVIDED] = Field(
        description="Slots that the next job can have: 0 while the whole server is kept from it; null: Redis is away."
    )
    blocked_by: Annotated[str | None, PROVIDED] = Field(
        description="What keeps its slots from the next job: its state, busy (jobs run there), withheld, away, in "
        "cooldown, breaker open, being tried by one job; null: one is free, or it is not known."
    )


class FleetView(ResponseSchema, source=QueueCounts):
    """The slots of servers that stand together, at this moment."""

    fleet: Annotated[str, PROVIDED]
    free: int
    cooling: int = Field(description="Slots in cooldown: they are offered to nobody for a while.")
    taken: int
    waiting: Annotated[int, From(lambda it: sum(it.waiting.values()))]


class ServerList(ResponseSchema):
    servers: list[ServerDetail]
    fleets: list[FleetView] | None = Field(description="null: Redis is away.")


class ModelView(StateView, source=registered.Model):
    model: Annotated[str, From("name")]
    fleet: str
    model_type: Annotated[str, From("config.model_type")]
    policy: Annotated[str, From("config.policy")]
    servers: Annotated[list[str], PROVIDED]
    removal: Annotated[RemovalProgress | None, PROVIDED] = Field(description="null: it is not being removed.")
    slots: Annotated[int, PROVIDED] = Field(description="Of servers that are online.")
    waiting: Annotated[int | None, PROVIDED] = Field(description="null: Redis is away.")


class ModelList(ResponseSchema):
    models: list[ModelView]


class ModelLoadView(ResponseSchema, source=ModelLoad):
    """What waits for a model at this moment, and what that means."""

    mean_run_s: Annotated[float | None, From(lambda it: it.run_ms and it.run_ms / 1000)] = Field(
        description="Slot time of its latest runs; null: none has ended well yet."
    )
    work_s: Annotated[float | None, From(lambda it: None if it.work_ms is None else seconds(it.work_ms))] = Field(
        description="For how long what waits keeps its slots busy; null: not known."
    )
    limit: int | None = Field(description="Jobs that may wait, of each tenant under `fair`; null: any number.")
    breaker: Breaker
    breaker_until: Annotated[Time | None, From("open_until_ms")] = Field(
        description="When one job may try it; null: it is closed."
    )
    breaker_why: Annotated[OpenedBy | None, From(lambda it: it.open_why or None)] = Field(
        description="What opened it: runs that failed in a row, or the last trial."
    )


class ModelDetail(ModelView):
    """A model, and how long its jobs may have to wait."""

    load: Annotated[ModelLoadView | None, PROVIDED] = Field(description="null: Redis is away.")
    longest_overtaking_s: Annotated[
        dict[str, float | None], From(lambda it: {str(one): longest_overtaking_s(one, it.config) for one in PRIORITIES})
    ] = Field(
        description="By priority: jobs accepted up to so many seconds after one may come before it; null: no bound."
    )
    longest_wait: Annotated[str, From(lambda it: longest_wait(it.config))] = Field(
        description="The longest that order can make a job wait, in terms of the load."
    )


class TenantView(StateView, source=TenantState):
    tenant: Annotated[str, From("name")]
    has_key: Annotated[bool, PROVIDED]
    admin: Annotated[bool, PROVIDED]
    rate_per_s: Annotated[int | None, PROVIDED] = Field(description="Submits a second; null: no limit.")
    burst: Annotated[int | None, PROVIDED]


class TenantList(ResponseSchema):
    """Those that have a key, and those that do not stand online."""

    tenants: list[TenantView]


class WebhookSecretView(ResponseSchema):
    """With what a tenant's webhooks are verified (Standard Webhooks)."""

    tenant: str
    secrets: list[str] = Field(description="`whsec_…`, the newest first; each message is signed with all of them.")
    rotation: int = Field(description="How often it was rotated.")
    former_until: str | None = Field(description="Until when a second secret, the one before, is signed with.")


class ConfigView(ResponseSchema, source=registered.Model):
    """How a model's jobs are treated."""

    model: Annotated[str, From("name")]
    config: Annotated[dict[str, Any], From(lambda it: it.config.model_dump())] = Field(description="What is in force.")
    overrides: dict[str, Any]
    defaults: Annotated[dict[str, Any], PROVIDED] = Field(description="What holds where the model says nothing.")
    sources: Annotated[
        dict[str, str],
        From(lambda it: {name: str(it.sources.get(name, ConfigSource.RELEASE)) for name in ModelConfig.model_fields}),
    ] = Field(description="Of each field: model, kind, installation, built-in.")
    description: Annotated[
        dict[str, Any] | None, From(lambda it: effective_description(it.config, it.described_by))
    ] = Field(description="How its servers are spoken to, with all defaults; null: it cannot be read.")
    described_by: str | None = Field(description="The version of that, as runs name it; null: the slot protocol.")
    preset_behind: Annotated[bool, From(lambda it: is_preset_outdated(it.config, it.described_by))] = Field(
        description="Its preset has changed since this was stored: store it again to renew it."
    )


def model_view(it: registered.Model, catalog: CatalogSnapshot, depths: QueueCounts | None) -> dict[str, Any]:
    """ModelView.  `depths`: of its fleet; None: not known now."""
    waiting = None if depths is None else depths.waiting.get(it.name, 0)
    return ModelView.build(it, **_in_catalog(it, catalog, None), waiting=waiting)


def model_detail(
    it: registered.Model, catalog: CatalogSnapshot, load: ModelLoad | None, left: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """ModelDetail.  `load` None: not known now."""
    shown = load and ModelLoadView.build(load)
    return ModelDetail.build(it, **_in_catalog(it, catalog, left), waiting=load and load.waiting, load=shown)


def _in_catalog(it: registered.Model, catalog: CatalogSnapshot, left: Mapping[str, int] | None) -> dict[str, Any]:
    """What the catalog says of a model."""
    return {
        "servers": sorted(found.name for found in catalog.servers.values() if it.name in found.endpoints),
        "removal": removal(it.name, catalog, left),
        "slots": catalog.count_slots(it.name),
    }


def config_view(it: registered.Model, catalog: CatalogSnapshot) -> dict[str, Any]:
    """ConfigView."""
    known = resolve_inherited(it.overrides, catalog.defaults)
    return ConfigView.build(it, defaults=parse_overrides(known.values)[0].model_dump())


def tenant_view(name: str, known: Tenant | None, stands: TenantState | None) -> dict[str, Any]:
    """TenantView.  `known`: it has a key; `stands`: it does not stand online."""
    return TenantView.build(
        stands or TenantState(name, AdminState.ONLINE),
        has_key=known is not None,
        admin=known is not None and known.admin,
        rate_per_s=known and known.rate_per_s,
        burst=known and known.burst,
    )


def webhook_secret_view(name: str, rotation: SecretRotation, secrets: list[str], now_ms: int) -> dict[str, Any]:
    """WebhookSecretView."""
    until = iso_time(rotation.former_until_ms) if len(rotation.list_valid(now_ms)) > 1 else None
    return WebhookSecretView.build(tenant=name, secrets=secrets, rotation=rotation.number, former_until=until)
