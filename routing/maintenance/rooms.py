"""What maintenance asks of fleets' rooms, and does there; routing itself never does.  Redis errors pass through.

All fleets are asked together, in few round trips: one whose room cannot be read is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from redis.exceptions import RedisError

from routing.config import RoutingSettings
from routing.queue.leases import server_of_slot
from routing.queue.slots import Cooldown, Slots
from slotkeeper.redis.keys import FLEET_KEYS
from slotkeeper.redis.scripts import Command, Scripts, log_failures

FOREIGN_USE_MS = 12_000
"""How long slots that others use are withheld before the server is asked again."""


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """What stands in a fleet's room.  `open`: it is complete; False after Redis was emptied, started or failed over.

    `waiting`: jobs by model; models without any are left out.
    """

    open: bool
    free: int
    cooling: int
    taken: int
    waiting: dict[str, int]


@dataclass(frozen=True, slots=True)
class LeaseSpan:
    """When the first and the last of a fleet's leases expire, by Redis' clock; 0: there is none."""

    now_ms: int
    first_ms: int
    last_ms: int

    @property
    def has_expired(self) -> bool:
        return 0 < self.first_ms <= self.now_ms


@dataclass(frozen=True, slots=True)
class TroubledServers:
    """Servers of a fleet with slots in cooldown, and those that failed when they were last called or asked."""

    cooling: frozenset[str]
    failing: frozenset[str]


class RoomScripts(Protocol):
    """What lua/ does for maintenance: a script each."""

    def depths(self, fleet: str) -> Command[QueueCounts]: ...
    def span(self, fleet: str) -> Command[LeaseSpan]: ...
    def pull_back(self, fleet: str, *, lease_ms: int, cooldown_ms: int, open_ms: int) -> Command[int]: ...
    def reset(self, fleet: str, *, kind: Literal["server", "model"], name: str) -> Command[int]: ...
    def occupy(self, fleet: str, *, server: str, count: int, cooldown_ms: int) -> Command[int]: ...


def _bound(scripts: Scripts) -> RoomScripts:
    found: RoomScripts = scripts.bind(RoomScripts)
    return found


def depths(scripts: Scripts, fleet: str) -> QueueCounts:
    return scripts.run(_bound(scripts).depths(fleet))


def queue_counts(scripts: Scripts, fleets: Sequence[str]) -> dict[str, QueueCounts]:
    """The same of several fleets."""
    found, failed = scripts.run_each({fleet: _bound(scripts).depths(fleet) for fleet in fleets})
    log_failures("room_not_read", failed)
    return found


def lease_spans(scripts: Scripts, fleets: Sequence[str]) -> dict[str, LeaseSpan]:
    """Of the fleets that have leases, when the first and the last expire; of one at least, for Redis' time."""
    asked = scripts.existing("leases", fleets) or fleets[:1]
    found, failed = scripts.run_each({fleet: _bound(scripts).span(fleet) for fleet in asked})
    log_failures("lease_look_failed", failed)
    return found


def longest_lease_ms(settings: RoutingSettings) -> int:
    """How far ahead a lease or an offer can expire at most."""
    return max(settings.lease_ms, settings.offer_ms)


def clamp_times(scripts: Scripts, fleet: str, settings: RoutingSettings) -> int:
    """After Redis' clock was set back: end what would last longer than it ever may; answers how many."""
    cooldown_ms = max(settings.busy_cooldown_max_ms, settings.unreachable_cooldown_max_ms, FOREIGN_USE_MS)
    lease_ms, open_ms = longest_lease_ms(settings), settings.breaker_open_max_ms
    return scripts.run(_bound(scripts).pull_back(fleet, lease_ms=lease_ms, cooldown_ms=cooldown_ms, open_ms=open_ms))


def list_troubled(scripts: Scripts, fleets: Sequence[str]) -> dict[str, TroubledServers]:
    """Servers with slots in cooldown, and those that failed when they were last called or asked; in one round trip."""
    with scripts.redis.pipeline(transaction=False) as pipe:
        for fleet in fleets:
            keys = scripts.keys.fleet_keys(fleet)
            pipe.zrange(keys[FLEET_KEYS.index("cooling")], 0, -1)
            pipe.hkeys(keys[FLEET_KEYS.index("meta")])
        answers = pipe.execute(raise_on_error=False)
    found = dict(zip(fleets, zip(answers[::2], answers[1::2], strict=True), strict=True))
    failed = {fleet: it for fleet, both in found.items() for it in both if isinstance(it, RedisError)}
    log_failures("slots_not_read", failed)
    return {fleet: _trouble(*both) for fleet, both in found.items() if fleet not in failed}


def _trouble(cooling: Sequence[bytes], meta: Sequence[bytes]) -> TroubledServers:
    return TroubledServers(
        frozenset(server_of_slot(slot.decode()) for slot in cooling),
        frozenset(name.removeprefix(b"failures:").decode() for name in meta if name.startswith(b"failures:")),
    )


def cool_down_all(slots: Slots, servers: Sequence[tuple[str, str]]) -> None:
    """`Slots.cool_down` of many (fleet, server); a fleet that is at fault is only logged."""
    _run_all(slots, {it: slots.cool_down_command(*it) for it in servers})


def end_cooldowns(slots: Slots, servers: Sequence[tuple[str, str]]) -> None:
    """Servers, as (fleet, server), are well: offer their slots again; likewise."""
    _run_all(slots, {it: slots.end_cooldown_command(*it) for it in servers})


def _run_all(slots: Slots, commands: Mapping[tuple[str, str], Command[Cooldown]]) -> None:
    _, failed = slots.scripts.run_each(commands)
    log_failures("cooldown_postponed", {fleet: error for (fleet, _), error in failed.items()})


def mark_used_by_others(scripts: Scripts, fleet: str, server: str, count: int) -> int:
    """Others use `count` of a server's slots: offer so many fewer for a while; answers how many cool for it."""
    return scripts.run(_bound(scripts).occupy(fleet, server=server, count=count, cooldown_ms=FOREIGN_USE_MS))


def reset_breaker(scripts: Scripts, fleet: str, kind: Literal["server", "model"], name: str) -> int:
    """Close a breaker, as somebody says that all is well; answers how many slots of a server cooled."""
    return scripts.run(_bound(scripts).reset(fleet, kind=kind, name=name))


def remove_unknown(scripts: Scripts, fleets: Sequence[str]) -> list[str]:
    """Remove the rooms of all fleets but these, unless one holds a lease; answers whose.

    A fleet that comes just now finds its room new, and filled from the record.
    """
    redis, keys = scripts.redis, scripts.keys
    known = {name.decode() for name in redis.smembers(keys.known_fleets()) if isinstance(name, bytes)}
    gone = sorted(known.difference(fleets))
    holding = scripts.existing("leases", gone)
    empty = [fleet for fleet in gone if fleet not in holding]
    for fleet in empty:
        for key in redis.scan_iter(keys.fleet_pattern(fleet), count=1000):
            redis.unlink(key)
        redis.srem(keys.known_fleets(), fleet)
    return empty
