"""Slots: which of a fleet's slots can be offered, and by which rules."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from routing.config import RoutingSettings
from routing.queue.lanes import account_name, encode_tenant
from slotkeeper.redis.scripts import Command, Scripts, log_failures
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import AdminState, Server, format_attribute

_ACCOUNTS_AT_ONCE = 500


class SyncResult(NamedTuple):
    """How the room took a catalog.  `foreign`: it is another record's; `stale`: it has the version `newest` already."""

    answer: Literal["synced", "stale", "foreign"]
    newest: int


class Cooldown(NamedTuple):
    """How long it is, and how many slots it concerns."""

    cooldown_ms: int
    moved: int


class _Server(NamedTuple):
    name: str
    entry: str
    slots: int


class SlotScripts(Protocol):
    """What lua/ does with slots: a script each."""

    def sync(
        self,
        fleet: str,
        *,
        record: str,
        version: int,
        servers: Sequence[_Server],
        rules: Mapping[str, str],
    ) -> Command[SyncResult]: ...
    def resort(self, fleet: str, *, limit: int) -> Command[int]: ...
    def close(self, fleet: str, *, version: int) -> Command[Literal["closed", "changed"]]: ...
    def cool_down(self, fleet: str, *, server: str, first_ms: int, max_ms: int) -> Command[Cooldown]: ...


class Slots:
    """Talks to the fleets' slots.  Every method is one atomic script; redis errors pass through."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings) -> None:
        self.scripts = scripts
        self._lua: SlotScripts = scripts.bind(SlotScripts)
        self._settings = settings

    def sync_all(self, fleets: Sequence[str], catalog: CatalogSnapshot) -> dict[str, SyncResult]:
        """Bring these fleets' servers, slots and rules to what the catalog says, in few round trips.

        A fleet whose room cannot take it is left out.
        """
        if fleets:
            self.scripts.redis.sadd(self.scripts.keys.known_fleets(), *fleets)
        synced, failed = self.scripts.run_each({fleet: self.sync_command(fleet, catalog) for fleet in fleets})
        log_failures("registry_not_brought", failed)
        self._resort([fleet for fleet, it in synced.items() if it.answer == "synced"])
        return synced

    def sync_command(self, fleet: str, catalog: CatalogSnapshot) -> Command[SyncResult]:
        """The command of `sync_all` for one of them."""
        servers = [_Server(it.name, server_entry(it), it.slots) for it in catalog.servers_of(fleet)]
        return self._lua.sync(
            fleet,
            record=catalog.database_id,
            version=catalog.version,
            servers=servers,
            rules=_rules(fleet, catalog),
        )

    def _resort(self, fleets: Sequence[str]) -> None:
        """In parts: with very many tenants all at once would keep everybody waiting."""
        while fleets:
            asked = {fleet: self._lua.resort(fleet, limit=_ACCOUNTS_AT_ONCE) for fleet in fleets}
            left, failed = self.scripts.run_each(asked)
            log_failures("lanes_not_sorted", failed)
            fleets = [fleet for fleet, count in left.items() if count]

    def close(self, fleet: str, version: int) -> bool:
        """Let nothing be offered until the room has been filled again.  False: its catalog is no more `version`."""
        return self.scripts.run(self._lua.close(fleet, version=version)) == "closed"

    def cool_down_command(self, fleet: str, server: str) -> Command[Cooldown]:
        """A command: a server failed, offer its slots to no job for a while, longer each time in a row."""
        first_ms, max_ms = self._settings.unreachable_cooldown_ms, self._settings.unreachable_cooldown_max_ms
        return self._lua.cool_down(fleet, server=server, first_ms=first_ms, max_ms=max_ms)

    def end_cooldown_command(self, fleet: str, server: str) -> Command[Cooldown]:
        """A command: a server is well, offer its slots again."""
        return self._lua.cool_down(fleet, server=server, first_ms=0, max_ms=0)


def server_entry(server: Server) -> str:
    """A server as the scripts read it, see lua/lib/slots.lua."""
    models = "".join(f"{model}\n" for model in sorted(server.endpoints))
    attributes = "".join(f"@{name}={format_attribute(value)}\n" for name, value in sorted(server.attributes.items()))
    state = server.state if server.leaving_ms is None else AdminState.DRAINING
    return f"{state} {server.slots} {server.weight!r}\n{models}{attributes}"


def _rules(fleet: str, catalog: CatalogSnapshot) -> dict[str, str]:
    """What is configured, as lua/lib/rules.lua reads it."""
    rules = {f"tenant {encode_tenant(name)}": it.state for name, it in catalog.tenants.items()}
    for name in catalog.models_of(fleet):
        rules |= model_rules(catalog.models[name])
    return rules


def model_rules(model: Model) -> dict[str, str]:
    """A model's rules, and those of tenants that it treats unlike the others."""
    config = model.config
    step_ms, affinity_ms = round(config.tier_head_start * 1000), round(config.affinity * 1000)
    rules = {
        f"model {model.name}": f"{config.policy} {step_ms} {model.state} {config.tenant_slots or 0} {affinity_ms} "
        f"{config.breaker_failures}"
    }
    for tenant in config.weights.keys() | config.tenant_slot_limits.keys():
        terms = f"{config.weights.get(tenant, 1)!r} {config.tenant_slot_limits.get(tenant, 0)}"
        rules[f"account {account_name(tenant, model.name)}"] = terms
    return rules
