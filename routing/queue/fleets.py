"""The state of whole fleets: counts, lease times, opening after a rebuild, removal; errors of one fleet isolated.

Methods for several fleets take few round trips, and leave out a fleet that fails.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import structlog
from redis.exceptions import ConnectionError, TimeoutError

from routing.config import RoutingSettings
from routing.queue.queues import new_lease_prefix
from routing.queue.slots import FOREIGN_USE_MS
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.redis.scripts import Command, Scripts, log_failures

log = structlog.get_logger(__name__)

OUTAGES = (ConnectionError, TimeoutError, DatabaseUnavailable)
"""Errors of Redis or the database as a whole."""


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """What a fleet has in Redis.  `is_open`: it is complete; False after Redis was emptied, restarted or failed over.

    `epoch`: the number of its last filling that was opened in this Redis; 0: none was.
    `waiting`: jobs by model; models without any are left out.  `free`, `cooling`, `taken`: slots.
    """

    is_open: bool
    free: int
    cooling: int
    taken: int
    waiting: dict[str, int]
    epoch: int


class Begun(NamedTuple):
    """How the rebuild of a queue has begun, see lua/begin_rebuild.lua."""

    answer: Literal["open", "ready", "emptied", "cleared"]
    filling: str
    epoch: int


@dataclass(frozen=True, slots=True)
class LeaseSpan:
    """When the first of a fleet's leases expires, ms by Redis' clock; 0: there is none."""

    now_ms: int
    first_ms: int

    @property
    def has_expired(self) -> bool:
        """Whether a lease has expired."""
        return 0 < self.first_ms <= self.now_ms


class FleetScripts(Protocol):
    """The scripts of this module."""

    def queue_counts(self, fleet: str) -> Command[QueueCounts]: ...
    def lease_span(self, fleet: str) -> Command[LeaseSpan]: ...
    def clamp_times(self, fleet: str, *, lease_ms: int, cooldown_ms: int, open_ms: int) -> Command[int]: ...
    def begin_rebuild(self, fleet: str, *, database_id: str, filling: str) -> Command[Begun]: ...
    def open_queue(self, fleet: str, *, epoch: int) -> Command[Literal["opened", "open", "lost"]]: ...
    def discard_queue(self, fleet: str, *, epoch: int) -> Command[Literal["closed", "changed"]]: ...
    def close_queue(self, fleet: str, *, version: int) -> Command[Literal["closed", "changed"]]: ...


class Fleets:
    """What Redis has of each fleet.  Redis errors pass through."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings) -> None:
        self.scripts = scripts
        self._lua: FleetScripts = scripts.bind(FleetScripts)
        self._settings = settings

    def counts(self, fleets: Sequence[str]) -> dict[str, QueueCounts]:
        """Return what waits in each fleet, and how its slots stand."""
        found, failed = self.scripts.run_each({fleet: self._lua.queue_counts(fleet) for fleet in fleets})
        log_failures("queue_not_read", failed)
        return found

    def lease_spans(self, fleets: Sequence[str]) -> dict[str, LeaseSpan]:
        """Return when the first lease expires, of fleets that have some; of one at least, for Redis' time."""
        asked = self.scripts.existing("leases", fleets) or fleets[:1]
        found, failed = self.scripts.run_each({fleet: self._lua.lease_span(fleet) for fleet in asked})
        log_failures("lease_span_not_read", failed)
        return found

    def clamp_times(self, fleets: Sequence[str]) -> dict[str, int]:
        """End what would last longer than it may, as Redis' clock was set back; return how many times that was."""
        settings = self._settings
        lease_ms = max(settings.lease_ms, settings.offer_ms)
        cooldown_ms = max(settings.busy_cooldown_max_ms, settings.unreachable_cooldown_max_ms, FOREIGN_USE_MS)
        open_ms = settings.breaker_open_max_ms
        found, failed = self.scripts.run_each(
            {
                fleet: self._lua.clamp_times(fleet, lease_ms=lease_ms, cooldown_ms=cooldown_ms, open_ms=open_ms)
                for fleet in fleets
            }
        )
        log_failures("times_not_clamped", failed)
        return found

    def begin_rebuild(self, fleets: Sequence[str], database_id: str) -> dict[str, Begun]:
        """Make closed queues ready to be filled from this database, and return those that were not open."""
        found, failed = self.scripts.run_each(
            {
                fleet: self._lua.begin_rebuild(fleet, database_id=database_id, filling=new_lease_prefix())
                for fleet in fleets
            }
        )
        log_failures("rebuild_not_begun", failed)
        return {fleet: begun for fleet, begun in found.items() if begun.answer != "open"}

    def open(self, epochs: Mapping[str, int]) -> dict[str, bool]:
        """Declare queues complete under these epochs, so that jobs are offered.

        False: it was open, or Redis has lost what was filled.
        """
        found, failed = self.scripts.run_each(
            {fleet: self._lua.open_queue(fleet, epoch=epoch) for fleet, epoch in epochs.items()}
        )
        log_failures("queue_not_opened", failed)
        return {fleet: answer == "opened" for fleet, answer in found.items()}

    def close(self, fleet: str, version: int) -> bool:
        """Let nothing be offered until the queue has been filled again.  False: its catalog is not this version."""
        return self.scripts.run(self._lua.close_queue(fleet, version=version)) == "closed"

    def discard(self, fleet: str, epoch: int) -> bool:
        """Close a queue of this epoch, to be filled from nothing.  False: it has another epoch."""
        return self.scripts.run(self._lua.discard_queue(fleet, epoch=epoch)) == "closed"

    def remove_unknown(self, fleets: Sequence[str]) -> list[str]:
        """Remove all fleets but these from Redis, unless one holds a lease; return their names.

        A fleet that is registered at this moment finds its queue new, and filled from the database.
        """
        redis, keys = self.scripts.redis, self.scripts.keys
        known = {name.decode() for name in redis.smembers(keys.known_fleets()) if isinstance(name, bytes)}
        unknown = sorted(known.difference(fleets))
        holding = self.scripts.existing("leases", unknown)
        removed = [fleet for fleet in unknown if fleet not in holding]
        for fleet in removed:
            for key in redis.scan_iter(keys.fleet_pattern(fleet), count=1000):
                redis.unlink(key)
            redis.srem(keys.known_fleets(), fleet)
        return removed


@contextmanager
def isolate_errors(act: str, **subject: str) -> Iterator[None]:
    """Log an error of one fleet or job, and go on with the others.  Raises OUTAGES, which concern all of them."""
    try:
        yield
    except OUTAGES:
        raise
    except Exception as error:
        log.error(f"{act}_failed", error=repr(error), **subject)
