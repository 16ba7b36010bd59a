"""Bring the catalog's servers and rules to Redis; cooldowns and breakers of servers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from redis.exceptions import RedisError

from routing.config import RoutingSettings
from routing.queue.lanes import account_name, encode_tenant
from slotkeeper.redis.keys import FLEET_KEYS
from slotkeeper.redis.scripts import Command, Scripts, log_failures
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import AdminState, Server, format_attribute

FOREIGN_USE_MS = 12_000
"""How long slots that others use are not offered before the server is asked again."""

_ACCOUNTS_AT_ONCE = 500
_NODE = "node"  # the state of a node that is online while it is connected


def slot_name(server: str, number: int) -> str:
    """Return the name of a server's slot; numbers begin with 0."""
    return f"{server}-slot{number}"


def server_of_slot(slot: str) -> str:
    """Return the name of the server that a slot belongs to."""
    return slot.rsplit("-slot", 1)[0]


class SyncResult(NamedTuple):
    """What a fleet did with a catalog; it has version `newest`.

    "foreign": it belongs to another database; "stale": it has a newer version; "behind": it lacks earlier changes.
    """

    answer: Literal["synced", "stale", "behind", "foreign"]
    newest: int


class Cooldown(NamedTuple):
    """How long a cooldown is, and how many slots have it."""

    cooldown_ms: int
    moved: int


@dataclass(frozen=True, slots=True)
class TroubledServers:
    """Servers of a fleet with slots in cooldown, and those that failed when they were last called or asked.

    silent: those whose last health check was not answered in time.
    """

    cooling: frozenset[str]
    failing: frozenset[str]
    silent: frozenset[str]


class _Server(NamedTuple):
    name: str
    entry: str


class _FleetCatalog(NamedTuple):
    """What the catalog says of one fleet.  rules: as lua/lib/rules.lua reads them."""

    database_id: str
    version: int
    servers: Mapping[str, Server]
    rules: Mapping[str, str]

    @classmethod
    def of(cls, fleet: str, catalog: CatalogSnapshot) -> "_FleetCatalog":
        servers = {server.name: server for server in catalog.servers_of(fleet)}
        return cls(catalog.database_id, catalog.version, servers, _rules(fleet, catalog))


class SlotScripts(Protocol):
    """The scripts of this module."""

    def sync_catalog(
        self,
        fleet: str,
        *,
        database_id: str,
        version: int,
        base: int,
        repairs: bool,
        rules_given: bool,
        servers: Sequence[_Server],
        rules: Mapping[str, str],
    ) -> Command[SyncResult]: ...
    def reindex_lanes(self, fleet: str, *, limit: int) -> Command[int]: ...
    def cool_down(self, fleet: str, *, server: str, first_ms: int, max_ms: int, why: str) -> Command[Cooldown]: ...
    def note_silence(self, fleet: str, *, server: str, silent: bool) -> Command[int]: ...
    def occupy_slots(self, fleet: str, *, server: str, count: int, cooldown_ms: int) -> Command[int]: ...
    def reset_breaker(self, fleet: str, *, kind: Literal["server", "model"], name: str) -> Command[int]: ...


class Slots:
    """The slots of all fleets.  Each method is one script, or one for each fleet; redis errors pass through."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings) -> None:
        self.scripts = scripts
        self._lua: SlotScripts = scripts.bind(SlotScripts)
        self._settings = settings
        self._synced: dict[str, _FleetCatalog] = {}  # Each fleet has this, or what a later version of it says.

    # -- the catalog -----------------------------------------------------------------------------------------

    def sync_all(
        self, fleets: Sequence[str], catalog: CatalogSnapshot, repaired: Collection[str] = ()
    ) -> dict[str, SyncResult]:
        """Make these fleets' servers, slots and rules equal to the catalog's, in few round trips.

        repaired: fleets whose unchanged servers are looked at as well, which takes long if they are many.  A fleet that
        fails is left out.
        """
        if fleets:
            self.scripts.redis.sadd(self.scripts.keys.known_fleets(), *fleets)
        given = {fleet: _FleetCatalog.of(fleet, catalog) for fleet in fleets}
        synced = self._sync_each(
            {
                fleet: self._changes_command(fleet, one, self._synced.get(fleet))
                if fleet not in repaired
                else self._whole_command(fleet, one, repairs=True)
                for fleet, one in given.items()
            }
        )
        behind = [fleet for fleet, result in synced.items() if result.answer == "behind"]
        synced |= self._sync_each({fleet: self._whole_command(fleet, given[fleet]) for fleet in behind})
        for fleet in [fleet for fleet, result in synced.items() if result.answer == "synced"]:
            self._synced[fleet] = given[fleet]
        self._reindex_lanes([fleet for fleet, result in synced.items() if result.answer == "synced"])
        return synced

    def _sync_each(self, commands: Mapping[str, Command[SyncResult]]) -> dict[str, SyncResult]:
        synced, failed = self.scripts.run_each(commands)
        log_failures("catalog_not_synced", failed)
        return synced

    def sync_command(self, fleet: str, catalog: CatalogSnapshot) -> Command[SyncResult]:
        """Return the command that makes one fleet equal to the whole catalog."""
        return self._whole_command(fleet, _FleetCatalog.of(fleet, catalog))

    def _whole_command(self, fleet: str, given: "_FleetCatalog", *, repairs: bool = False) -> Command[SyncResult]:
        """Return the command that makes one fleet equal to the whole catalog.  `repairs`: see the script."""
        servers = [_Server(name, server_entry(server)) for name, server in given.servers.items()]
        return self._lua.sync_catalog(
            fleet,
            database_id=given.database_id,
            version=given.version,
            base=-1,
            repairs=repairs,
            rules_given=True,
            servers=servers,
            rules=given.rules,
        )

    def _changes_command(self, fleet: str, given: "_FleetCatalog", base: "_FleetCatalog | None") -> Command[SyncResult]:
        """Return the command that brings what differs from `base` to a fleet that has `base` or a later catalog."""
        if base is None:
            return self._whole_command(fleet, given)
        rules_given = given.rules != base.rules
        return self._lua.sync_catalog(
            fleet,
            database_id=given.database_id,
            version=given.version,
            base=base.version,
            repairs=False,
            rules_given=rules_given,
            servers=_list_changed(given.servers, base.servers),
            rules=given.rules if rules_given else {},
        )

    def _reindex_lanes(self, fleets: Sequence[str]) -> None:
        """In parts: with very many tenants, all at once would block Redis."""
        while fleets:
            commands = {fleet: self._lua.reindex_lanes(fleet, limit=_ACCOUNTS_AT_ONCE) for fleet in fleets}
            left, failed = self.scripts.run_each(commands)
            log_failures("lanes_not_reindexed", failed)
            fleets = [fleet for fleet, count in left.items() if count]

    # -- cooldowns and breakers ------------------------------------------------------------------------------

    def cool_down_command(self, fleet: str, server: str, why: str = "") -> Command[Cooldown]:
        """Return the command after a failure: the server's slots are not offered, longer each time in a row."""
        first_ms, max_ms = self._settings.unreachable_cooldown_ms, self._settings.unreachable_cooldown_max_ms
        return self._lua.cool_down(fleet, server=server, first_ms=first_ms, max_ms=max_ms, why=why)

    def cool_down_all(self, servers: Mapping[tuple[str, str], str]) -> None:
        """Begin cooldowns of servers that failed; a fleet that fails is only logged.

        servers: (fleet, server) -> what its health check says is wrong; "": there was no answer.
        """
        self._run_all("cooldown_postponed", {key: self.cool_down_command(*key, why) for key, why in servers.items()})

    def note_silence(self, servers: Mapping[tuple[str, str], bool]) -> None:
        """Note of servers, (fleet, server), whether their last health check was not answered in time.

        A silent server gets jobs only if no other can run them.  A fleet that fails is only logged.
        """
        self._run_all(
            "silence_not_noted",
            {key: self._lua.note_silence(key[0], server=key[1], silent=silent) for key, silent in servers.items()},
        )

    def end_cooldowns(self, servers: Sequence[tuple[str, str]]) -> None:
        """End cooldowns of servers that are well, each (fleet, server); a fleet that fails is only logged."""
        self._run_all(
            "cooldown_postponed",
            {key: self._lua.cool_down(key[0], server=key[1], first_ms=0, max_ms=0, why="") for key in servers},
        )

    def _run_all(self, log_event: str, commands: Mapping[tuple[str, str], Command[Any]]) -> None:
        """Run the commands of servers, each (fleet, server); failures are logged as `log_event`."""
        _, failed = self.scripts.run_each(commands)
        log_failures(log_event, {fleet: error for (fleet, _), error in failed.items()})

    def list_troubled(self, fleets: Sequence[str]) -> dict[str, TroubledServers]:
        """Return servers in cooldown and servers that failed, in one round trip; a fleet that fails is left out."""
        with self.scripts.redis.pipeline(transaction=False) as pipe:
            for fleet in fleets:
                keys = self.scripts.keys.fleet_keys(fleet)
                pipe.zrange(keys[FLEET_KEYS.index("cooling")], 0, -1)
                pipe.hkeys(keys[FLEET_KEYS.index("meta")])
            answers = pipe.execute(raise_on_error=False)
        found = dict(zip(fleets, zip(answers[::2], answers[1::2], strict=True), strict=True))
        failed = {fleet: answer for fleet, both in found.items() for answer in both if isinstance(answer, RedisError)}
        log_failures("slots_not_read", failed)
        return {fleet: _troubled(*both) for fleet, both in found.items() if fleet not in failed}

    def mark_used_by_others(self, fleet: str, server: str, count: int) -> int:
        """Offer `count` fewer of a server's slots for a while, as others use them; return how many are in cooldown."""
        command = self._lua.occupy_slots(fleet, server=server, count=count, cooldown_ms=FOREIGN_USE_MS)
        return self.scripts.run(command)

    def reset_breaker(self, fleet: str, kind: Literal["server", "model"], name: str) -> int:
        """Close a breaker, and return how many slots of a server were in cooldown."""
        return self.scripts.run(self._lua.reset_breaker(fleet, kind=kind, name=name))


def _troubled(cooling: Sequence[bytes], meta: Sequence[bytes]) -> TroubledServers:
    return TroubledServers(
        frozenset(server_of_slot(slot.decode()) for slot in cooling),
        *(
            frozenset(name.removeprefix(prefix).decode() for name in meta if name.startswith(prefix))
            for prefix in (b"failures:", b"silent:")
        ),
    )


def _list_changed(servers: Mapping[str, Server], before: Mapping[str, Server]) -> list[_Server]:
    """Return the servers that differ from those before; one that is not there any more has no entry."""
    changed = [_Server(name, "") for name in before if name not in servers]
    for name, server in servers.items():
        known = before.get(name)
        # Most are the same object, which is seen sooner than that all its fields are equal.
        if server is not known and server != known:
            changed.append(_Server(name, server_entry(server)))
    return changed


def server_entry(server: Server) -> str:
    """Return a server in the form that the scripts read, see lua/lib/slots.lua."""
    models = "".join(f"{model}\n" for model in sorted(server.endpoints))
    attributes = "".join(f"@{name}={format_attribute(value)}\n" for name, value in sorted(server.attributes.items()))
    state: str = server.state if server.leaving_ms is None else AdminState.DRAINING
    if server.node is not None and state == AdminState.ONLINE:
        state = _NODE
    return f"{state} {server.slots} {server.weight!r}\n{models}{attributes}"


def _rules(fleet: str, catalog: CatalogSnapshot) -> dict[str, str]:
    """Return what is configured, in the form that lua/lib/rules.lua reads."""
    rules = {f"tenant {encode_tenant(name)}": tenant.state for name, tenant in catalog.tenants.items()}
    for name, limits in catalog.limits.items():
        if limits.max_slots is not None:
            rules[f"slots {encode_tenant(name)}"] = str(limits.max_slots)
    for name in catalog.models_of(fleet):
        rules |= model_rules(catalog.models[name])
    return rules


def model_rules(model: Model) -> dict[str, str]:
    """Return a model's rules, and those of tenants with a special weight or limit."""
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
