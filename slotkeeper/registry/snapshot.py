"""The whole catalog at one version: models with their configuration, servers, and what concerns them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from slotkeeper.errors import UnknownModel
from slotkeeper.jobs.closed_models import ClosedModel
from slotkeeper.registry.model_config import ConfigSource, Defaults, ModelConfig
from slotkeeper.registry.prices import Price
from slotkeeper.registry.server_descriptions import Secret, find_version
from slotkeeper.registry.tenant_limits import INSTALLATION, NO_LIMITS, TenantLimits, resolve_limits
from slotkeeper.registry.values import AdminState, Server, TenantState

_MAX_RESOLVED = 10_000
_SIMILAR_LENGTH, _MAX_COMPARED = 3, 200  # A comparison takes up to 0.1 ms, and any client may mistype.


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and how its jobs are treated.

    overrides: what the operator set, different from the defaults.  config: the whole configuration.
    sources: where each field of `config` comes from, unless it is the release's default.
    described_by: version of the description of how its servers are called; None: the slot protocol.
    """

    name: str
    fleet: str
    overrides: Mapping[str, Any]
    config: ModelConfig
    state: str = AdminState.ONLINE
    reason: str | None = None
    changed_by: str | None = None
    changed_ms: int | None = None
    described_by: str | None = None
    sources: Mapping[str, ConfigSource] = field(default_factory=dict)


@dataclass(frozen=True)
class CatalogSnapshot:
    """The catalog at one version.

    tenants: only those that are not online.  closed: names under which no jobs are accepted.
    database_id: identifies the database, so that a new one is not taken for the one before.
    defaults: of the installation and of each kind of models.  mark: see catalog_changes.Edition.  limits: of tenants
    that have some, and of INSTALLATION.  metered: tenants whose jobs cost something.
    """

    version: int
    models: Mapping[str, Model]
    servers: Mapping[str, Server]
    tenants: Mapping[str, TenantState] = field(default_factory=dict)
    database_id: str = ""
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    closed: Mapping[str, ClosedModel] = field(default_factory=dict)
    defaults: Mapping[str, Defaults] = field(default_factory=dict)
    mark: str | None = None
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)
    prices: Sequence[Price] = ()
    metered: frozenset[str] = frozenset()

    def fleets(self) -> list[str]:
        return sorted({m.fleet for m in self.models.values()} | {s.fleet for s in self.servers.values()})

    def models_of(self, fleet: str) -> list[str]:
        return self._models_by_fleet.get(fleet, [])

    def servers_of(self, fleet: str) -> list[Server]:
        return self._servers_by_fleet.get(fleet, [])

    @cached_property
    def _models_by_fleet(self) -> Mapping[str, list[str]]:
        found = defaultdict[str, list[str]](list)
        for name in sorted(self.models):
            found[self.models[name].fleet].append(name)
        return found

    @cached_property
    def _servers_by_fleet(self) -> Mapping[str, list[Server]]:
        found = defaultdict[str, list[Server]](list)
        for name in sorted(self.servers):
            found[self.servers[name].fleet].append(self.servers[name])
        return found

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return the limits that apply to a tenant."""
        if not self.limits:
            return NO_LIMITS
        if tenant not in self._resolved_limits:
            known = self.limits
            resolved = resolve_limits(known.get(tenant, NO_LIMITS), known.get(INSTALLATION, NO_LIMITS))
            if len(self._resolved_limits) >= _MAX_RESOLVED:
                self._resolved_limits.clear()
            self._resolved_limits[tenant] = resolved
        return self._resolved_limits[tenant]

    @cached_property
    def _resolved_limits(self) -> dict[str, TenantLimits]:
        return {}

    def has_pair(self, server: str, model: str) -> bool:
        return server in self.servers and model in self.models

    def model(self, name: str) -> Model | None:
        return self.models.get(name)

    def resolve(self, name: str) -> Model:
        """Return the model of this name.  Raises UnknownModel."""
        if name not in self.models:
            raise UnknownModel("model", _explain_unknown(name, self.models))
        return self.models[name]

    def is_being_removed(self, model: str) -> bool:
        return model in self.models and model in self.closed

    def find_description(self, server: str, model: str) -> str | None:
        """Return the version of the description for this server and model; None: the slot protocol."""
        if server in self.servers and (own := self.servers[server].overrides.get(model)):
            return find_version(own)
        return self.models[model].described_by if model in self.models else None

    def endpoint(self, server: str, model: str) -> str | None:
        """Return the server's URL for this model; None if it does not serve the model."""
        found = self.servers.get(server)
        return None if found is None else found.endpoints.get(model)

    def servers_for(self, model: str) -> list[Server]:
        """Return the servers of a model that take jobs; nodes that are not connected are among them."""
        return self._servers_by_model.get(model, [])

    @cached_property
    def _servers_by_model(self) -> Mapping[str, list[Server]]:
        found = defaultdict[str, list[Server]](list)
        for server in self.servers.values():
            if server.takes_jobs:
                for model in server.endpoints:
                    found[model].append(server)
        return found


def _explain_unknown(name: str, known: Iterable[str]) -> str:
    similar = [other for other in known if abs(len(other) - len(name)) <= _SIMILAR_LENGTH]
    if near := get_close_matches(name, similar[:_MAX_COMPARED], n=1):
        return f"No model {name!r} is registered; did you mean {near[0]!r}?"
    return (
        f"No model {name!r} is registered; `slotkeeper models list` (GET /admin/models) names those that are, "
        "`slotkeeper servers register` (POST /admin/register) adds one with its server."
    )
