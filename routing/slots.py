"""Slots: which of a fleet's slots can be offered, and by which rules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from redis.exceptions import RedisError

from jobs.catalog import Model, Snapshot
from jobs.record import Server
from routing.config import RoutingSettings
from routing.keys import FLEET_KEYS
from routing.policies.order import account, safe
from routing.policies.placement import attribute_text
from routing.scripts import Command, Scripts, say_failed

_ACCOUNTS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Score:
    """The parts by which servers are compared for a model, each 0 or about that at its best; the lowest total wins."""

    load: float
    failures: float
    slowness: float
    swap: float
    total: float


@dataclass(frozen=True, slots=True)
class ServerStanding:
    """A server as the offers see it.  Times in ms since the epoch, 0: none.

    `rested_ms`: when the first resting slot is offered again.  `breaker`: closed, open, half_open, probing.
    `open_until_ms`: when its next probe is due.  `open_why`: what opened it: runs that failed one after another
    ("failures"), too many of them ("rate"), the last probe ("probe"); "": it is closed.  `opened`: how often in a row.
    `loaded`: the model that it ran last.
    """

    server: str
    free: int
    resting: int
    taken: int
    rested_ms: int
    breaker: Literal["closed", "open", "half_open", "probing"]
    open_until_ms: int
    open_why: str
    opened: int
    loaded: str
    swaps: int
    scores: dict[str, Score]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Servers of a fleet with slots that rest, and those that failed when they were last called or asked."""

    resting: frozenset[str]
    failing: frozenset[str]


class Synced(NamedTuple):
    """How the room took a catalog.  `foreign`: it is another record's; `stale`: it has the version `newest` already."""

    answer: Literal["synced", "stale", "foreign"]
    newest: int


class _Rested(NamedTuple):
    rest_ms: int
    moved: int


class _Server(NamedTuple):
    name: str
    entry: str
    slots: int


class SlotScripts(Protocol):
    """What lua/ does with slots: a script each."""

    def sync(
        self, fleet: str, *, record: str, version: int, servers: Sequence[_Server], rules: Mapping[str, str]
    ) -> Command[Synced]: ...
    def resort(self, fleet: str, *, limit: int) -> Command[int]: ...
    def close(self, fleet: str, *, version: int) -> Command[Literal["closed", "changed"]]: ...
    def servers(self, fleet: str) -> Command[list[ServerStanding]]: ...
    def rest(self, fleet: str, *, server: str, first_ms: int, max_ms: int) -> Command[_Rested]: ...
    def reset(self, fleet: str, *, kind: Literal["server", "model"], name: str) -> Command[int]: ...
    def occupy(self, fleet: str, *, server: str, count: int, rest_ms: int) -> Command[int]: ...


class Slots:
    """Talks to the fleets' slots.  Every method is one atomic script; redis errors pass through."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings) -> None:
        self._scripts = scripts
        self._acts: SlotScripts = scripts.bound(SlotScripts)
        self._settings = settings

    def sync_all(self, fleets: Sequence[str], catalog: Snapshot) -> dict[str, Synced]:
        """Bring these fleets' servers, slots and rules to what the catalog says, in few round trips.

        A fleet whose room cannot take it is left out.
        """
        if fleets:
            self._scripts.redis.sadd(self._scripts.keys.rooms(), *fleets)
        synced, failed = self._scripts.run_each({fleet: self.syncing(fleet, catalog) for fleet in fleets})
        say_failed("registry_not_brought", failed)
        self._resort([fleet for fleet, it in synced.items() if it.answer == "synced"])
        return synced

    def syncing(self, fleet: str, catalog: Snapshot) -> Command[Synced]:
        """The command of `sync_all` for one of them."""
        servers = [_Server(it.name, entry(it), it.slots) for it in catalog.servers_of(fleet)]
        rules = _rules(fleet, catalog)
        return self._acts.sync(fleet, record=catalog.record, version=catalog.version, servers=servers, rules=rules)

    def forget_gone(self, fleets: Sequence[str]) -> list[str]:
        """Remove the rooms of all fleets but these, unless one holds a lease; answers whose.

        A fleet that comes just now finds its room new, and filled from the record.
        """
        redis, keys = self._scripts.redis, self._scripts.keys
        known = {name.decode() for name in redis.smembers(keys.rooms()) if isinstance(name, bytes)}
        gone = sorted(known.difference(fleets))
        holding = self._scripts.existing("leases", gone)
        empty = [fleet for fleet in gone if fleet not in holding]
        for fleet in empty:
            for pattern in keys.patterns(fleet):
                for key in redis.scan_iter(pattern, count=1000):
                    redis.unlink(key)
            redis.srem(keys.rooms(), fleet)
        return empty

    def _resort(self, fleets: Sequence[str]) -> None:
        """In parts: with very many tenants all at once would keep everybody waiting."""
        while fleets:
            asked = {fleet: self._acts.resort(fleet, limit=_ACCOUNTS_AT_ONCE) for fleet in fleets}
            left, failed = self._scripts.run_each(asked)
            say_failed("lanes_not_sorted", failed)
            fleets = [fleet for fleet, count in left.items() if count]

    def close(self, fleet: str, version: int) -> bool:
        """Let nothing be offered until the room has been filled again.  False: its catalog is no more `version`."""
        return self._scripts.run(self._acts.close(fleet, version=version)) == "closed"

    def standings(self, fleet: str) -> dict[str, ServerStanding]:
        """How each of a fleet's servers stands."""
        return {it.server: it for it in self._scripts.run(self._acts.servers(fleet))}

    def rest(self, fleet: str, server: str) -> int:
        """A server failed: offer its slots to nobody for a while, longer each time in a row; answers ms."""
        return self._scripts.run(self._resting(fleet, server)).rest_ms

    def wake(self, fleet: str, server: str) -> int:
        """A server is well: offer its slots again; answers how many were resting."""
        return self._scripts.run(self._waking(fleet, server)).moved

    def rest_all(self, servers: Sequence[tuple[str, str]]) -> None:
        """`rest` of many (fleet, server), in few round trips; a fleet that is at fault is only logged."""
        self._rest_all({it: self._resting(*it) for it in servers})

    def wake_all(self, servers: Sequence[tuple[str, str]]) -> None:
        """`wake` of many, likewise."""
        self._rest_all({it: self._waking(*it) for it in servers})

    def _resting(self, fleet: str, server: str) -> Command[_Rested]:
        first_ms, max_ms = self._settings.unreachable_rest_ms, self._settings.unreachable_rest_max_ms
        return self._acts.rest(fleet, server=server, first_ms=first_ms, max_ms=max_ms)

    def _waking(self, fleet: str, server: str) -> Command[_Rested]:
        return self._acts.rest(fleet, server=server, first_ms=0, max_ms=0)

    def _rest_all(self, commands: Mapping[tuple[str, str], Command[_Rested]]) -> None:
        _, failed = self._scripts.run_each(commands)
        say_failed("rest_postponed", {fleet: error for (fleet, _), error in failed.items()})

    def reset(self, fleet: str, kind: Literal["server", "model"], name: str) -> int:
        """Close a breaker, as somebody says that all is well; answers how many slots of a server rest no more."""
        return self._scripts.run(self._acts.reset(fleet, kind=kind, name=name))

    def failing(self, fleet: str, server: str) -> bool:
        """Whether the server failed when it was last called or asked."""
        return self._scripts.failures(fleet, server) > 0

    def troubled(self, fleets: Sequence[str]) -> dict[str, "Trouble"]:
        """Servers whose slots rest, and those that failed when they were last called or asked; in one round trip.

        A fleet that cannot be read is left out.
        """
        with self._scripts.redis.pipeline(transaction=False) as pipe:
            for fleet in fleets:
                keys = self._scripts.keys.fleet(fleet)
                pipe.zrange(keys[FLEET_KEYS.index("resting")], 0, -1)
                pipe.hkeys(keys[FLEET_KEYS.index("meta")])
            answers = pipe.execute(raise_on_error=False)
        found = dict(zip(fleets, zip(answers[::2], answers[1::2], strict=True), strict=True))
        failed = {fleet: it for fleet, both in found.items() for it in both if isinstance(it, RedisError)}
        say_failed("slots_not_read", failed)
        return {fleet: _trouble(*both) for fleet, both in found.items() if fleet not in failed}

    def occupy(self, fleet: str, server: str, count: int, rest_ms: int) -> int:
        """Others use `count` of a server's slots: offer so many fewer for a while; answers how many rest."""
        return self._scripts.run(self._acts.occupy(fleet, server=server, count=count, rest_ms=rest_ms))


def _trouble(resting: Sequence[bytes], meta: Sequence[bytes]) -> Trouble:
    return Trouble(
        frozenset(slot.decode().rsplit("-slot", 1)[0] for slot in resting),
        frozenset(name.removeprefix(b"failures:").decode() for name in meta if name.startswith(b"failures:")),
    )


def entry(server: Server) -> str:
    """A server as the scripts read it, see lua/lib/slots.lua."""
    models = "".join(f"{model}\n" for model in sorted(server.endpoints))
    attributes = "".join(f"@{name}={attribute_text(value)}\n" for name, value in sorted(server.attributes.items()))
    return f"{server.state} {server.slots} {server.weight!r}\n{models}{attributes}"


def _rules(fleet: str, catalog: Snapshot) -> dict[str, str]:
    """What is configured, as lua/lib/rules.lua reads it."""
    rules = {f"tenant {safe(name)}": it.state for name, it in catalog.tenants.items()}
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
        rules[f"account {account(tenant, model.name)}"] = terms
    return rules
