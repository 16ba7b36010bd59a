"""The catalog of a simulation, in memory, and the changes of a what-if variant."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from pydantic import ValidationError

from app.simulate.load_plan import Plan, ServerPlan, describe_first_error
from app.simulate.scenario import Arrival, SimulationError
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import Server

_COUNT = re.compile(r"[1-9]\d{0,5}")


@dataclass(frozen=True, slots=True)
class Variant:
    """The changes of a what-if variant.  `slots`: "32" for the whole fleet, or "gpu1=4,gpu2=8"."""

    policy: str | None = None
    slots: str | None = None
    settings: Sequence[str] = ()
    """`model.field=value`; * for every model."""
    speed_ups: Sequence[str] = ()
    """`2` or `model=2`: the factor by which run times are divided."""

    @property
    def name(self) -> str:
        """The heading of the variant: the changes that may differ between variants."""
        slots = f"{self.slots} slots" if self.slots and "=" not in self.slots else self.slots
        return ", ".join(part for part in (self.policy, slots) if part) or "as configured"


def from_plan(plan: Plan) -> CatalogSnapshot:
    """Return the catalog of a plan.  Raises SimulationError if a model's configuration is invalid."""
    servers, fleets = plan.fleet(), _fleets(plan.fleet())
    models = {model.name: _model(model.name, fleets[model.name], model.config) for model in plan.models}
    return CatalogSnapshot(
        1,
        models,
        {
            server.name: Server(
                name=server.name,
                fleet=fleets[server.models[0]],
                slots=server.slots,
                state="online",
                endpoints=dict.fromkeys(server.models, ""),
                created_ms=0,
            )
            for server in servers
        },
    )


def apply_variant(catalog: CatalogSnapshot, changes: Variant) -> CatalogSnapshot:
    """Return the catalog with the changes of a variant.  Raises SimulationError."""
    overrides = {name: dict(model.overrides) for name, model in catalog.models.items()}
    for setting in changes.settings:
        for name, field, value in _setting(setting, overrides):
            overrides[name][field] = value
    if changes.policy is not None:
        for fields in overrides.values():
            fields["policy"] = changes.policy
    models = {name: _model(name, model.fleet, overrides[name], model) for name, model in catalog.models.items()}
    servers = catalog.servers if changes.slots is None else _with_slots(catalog.servers, changes.slots)
    return replace(catalog, models=models, servers=servers)


def scale_run_times(arrivals: Sequence[Arrival], models: Iterable[str], speed_ups: Sequence[str]) -> Sequence[Arrival]:
    """Return the arrivals with run times divided by the factors.  Raises SimulationError."""
    names = sorted(models)
    factors = dict.fromkeys(names, 1.0)
    for text in speed_ups:
        name, _, number = text.rpartition("=")
        factor = _factor(number, text)
        if name and name not in factors:
            raise SimulationError(f"--speed-up {text}: there is no model {name!r} among {', '.join(names)}.")
        for model in [name] if name else names:
            factors[model] *= factor
    if all(factor == 1 for factor in factors.values()):
        return arrivals
    return [replace(arrival, run_ms=max(round(arrival.run_ms / factors[arrival.model]), 1)) for arrival in arrivals]


def _factor(number: str, text: str) -> float:
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not 0.001 <= factor <= 1000:
        raise SimulationError(f"--speed-up {text}: write a number from 0.001 to 1000, or MODEL=NUMBER.")
    return factor


def _model(name: str, fleet: str, overrides: Mapping[str, Any], original: Model | None = None) -> Model:
    """Return a model with these overrides: a changed `original`, or a new model.  Raises SimulationError."""
    try:
        config = ModelConfig(**overrides)
    except ValidationError as error:
        raise SimulationError(f"Model {name} cannot have this configuration: {describe_first_error(error)}.") from None
    return replace(original, overrides=overrides, config=config) if original else Model(name, fleet, overrides, config)


def _setting(text: str, models: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return (model, field, value) for each model that `model.field=value` names.  Raises SimulationError."""
    key, equals, value = text.partition("=")
    name, dot, field = key.strip().rpartition(".")
    if not (equals and dot and name):
        raise SimulationError(f"--set {text}: write MODEL.FIELD=VALUE, for example demo.tier_head_start=30.")
    if field not in ModelConfig.model_fields:
        raise SimulationError(
            f"--set {text}: a model has no field {field!r}; there are {', '.join(ModelConfig.model_fields)}."
        )
    if name != "*" and name not in models:
        raise SimulationError(f"--set {text}: there is no model {name!r} among {', '.join(sorted(models))}.")
    try:
        parsed = orjson.loads(value)
    except ValueError:
        parsed = value.strip()
    return [(model, field, parsed) for model in (models if name == "*" else [name])]


def _with_slots(servers: Mapping[str, Server], text: str) -> dict[str, Server]:
    """Return the servers with changed numbers of slots.  Raises SimulationError."""
    if _COUNT.fullmatch(text.strip()):
        return _spread(servers, int(text))
    counts = {}
    for part in text.split(","):
        name, _, count = (word.strip() for word in part.rpartition("="))
        if not name or not _COUNT.fullmatch(count):
            raise SimulationError(f"--slots {text}: write the number of slots, or SERVER=NUMBER with commas between.")
        if name not in servers:
            raise SimulationError(f"--slots {text}: there is no server {name!r} among {', '.join(sorted(servers))}.")
        counts[name] = int(count)
    return {name: replace(server, slots=counts.get(name, server.slots)) for name, server in servers.items()}


def _spread(servers: Mapping[str, Server], total: int) -> dict[str, Server]:
    """Distribute `total` slots in proportion to the current numbers: by largest remainder, at least one each."""
    current = sum(server.slots for server in servers.values())
    if total < len(servers):
        raise SimulationError(
            f"--slots {total}: the fleet has {len(servers)} servers, and each needs at least one slot."
        )
    exact = {name: server.slots * total / current for name, server in servers.items()}
    slots = {name: max(int(share), 1) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: (int(exact[name]) - exact[name], name)):
        if sum(slots.values()) < total:
            slots[name] += 1
    while sum(slots.values()) > total:
        slots[max(slots, key=lambda name: (slots[name], name))] -= 1
    return {name: replace(server, slots=slots[name]) for name, server in servers.items()}


def _fleets(servers: Sequence[ServerPlan]) -> dict[str, str]:
    """Return model -> fleet.  Models that share a server are in one fleet, with the name of the first model."""
    fleet: dict[str, str] = {}
    for server in servers:
        merged = {fleet.get(name, name) for name in server.models}
        first = min(merged)
        fleet.update(dict.fromkeys(server.models, first))
        for name, current in fleet.items():
            if current in merged:
                fleet[name] = first
    return fleet
