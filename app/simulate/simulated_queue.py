"""The waiting room that the simulator plays on: the scripts of routing, and the arguments that routing gives them.

Nothing here knows what a script's arguments mean.  Routing's own classes make the commands; play.lua runs the scripts
with what those would send, at simulated times, thousands in one round trip.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import chain
from typing import Any, NamedTuple

import orjson
from redis import Redis

from routing.config import RoutingSettings
from routing.queue.fleets import Fleets
from routing.queue.leases import Lease, Leases
from routing.queue.queues import Offer, Queues
from routing.queue.slots import Slots
from routing.scripts import LIBRARY, make_scripts
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.redis.keys import Keys
from slotkeeper.redis.scripts import Command
from slotkeeper.registry.snapshot import CatalogSnapshot

_PREFIX = "simulation"
_TAKER = "simulator"
_CLOCK = "local function now_ms() return NOW end\n"
_OWN_KEYS = ("ends", "runs", "lasts", "loaded", "state")
_SWEEP_MS = 2_000  # as celeryconfig.beat_schedule has it
_LEASE_MS = 100 * 365 * 86_400_000  # Longer than any run: a worker renews its leases, and the simulator does not.
_PATIENCE_MS = 3_600_000  # for a job that no slot seems to run: longer than any cooldown


class RunRecord(NamedTuple):
    """One run of a job; `broken`: an outage ended it."""

    job: int
    slot: str
    start_ms: int
    end_ms: int
    turn: int
    broken: bool


class SimulationEvent(NamedTuple):
    """Something that comes from outside, as play.lua reads it."""

    at_ms: int
    words: list[Any]


class SimulatedQueue:
    """One fleet's waiting room.  `play` is one round trip; redis errors pass through."""

    def __init__(self, redis: Redis, fleet: str, catalog: CatalogSnapshot, start_latency_ms: int, swap_ms: int) -> None:
        settings, keys = RoutingSettings(lease_ms=_LEASE_MS), Keys(_PREFIX)
        scripts = make_scripts(redis, keys)
        self.fleet = fleet
        self._redis, self._catalog, self._version = redis, catalog, 1
        self._queues, self._leases = Queues(scripts, settings), Leases(scripts, settings)
        self._slots = Slots(scripts, settings)
        own = [f"{_PREFIX}:{{{fleet}}}:simulator:{name}" for name in _OWN_KEYS]
        self._keys = [*keys.fleet_keys(fleet), *own]
        acts = self._acts()
        self._order = orjson.dumps(
            {
                "claimant": _TAKER,
                "latency_ms": start_latency_ms,
                "swap_ms": swap_ms,
                "sweep_ms": _SWEEP_MS,
                "patience_ms": _PATIENCE_MS,
                "scripts": {act: command.target.script for act, command in acts.items()},
                "templates": {act: [str(word) for word in command.args] for act, command in acts.items()},
            }
        )
        self._sha = redis.script_load(_assembled({command.target.script for command in acts.values()}))
        fleets = Fleets(scripts, settings)
        fleets.begin_rebuild([fleet], catalog.database_id)
        fleets.open({fleet: 1})

    def opening(self, at_ms: int) -> SimulationEvent:
        """The fleet's servers come up."""
        return self.changed(at_ms, "", self._catalog)

    def arrival(self, job: QueuedJob, at_ms: int, run_ms: int) -> SimulationEvent:
        """A job is submitted.  Its id is a number, as a text."""
        words = self._queues.enqueue_command(self.fleet, [job]).args
        return SimulationEvent(at_ms, [at_ms, "arrive", job.id, run_ms, len(words), *words])

    def changed(self, at_ms: int, down: str, catalog: CatalogSnapshot) -> SimulationEvent:
        """The catalog changes; `down`: the server whose runs it breaks off, if any."""
        self._version += 1
        known = replace(catalog, version=self._version)
        words = self._slots.sync_command(self.fleet, known).args
        online = sum(server.slots for server in catalog.servers_of(self.fleet) if server.state == "online")
        return SimulationEvent(at_ms, [at_ms, "down" if down else "up", down, online, len(words), *words])

    def play(
        self, events: Sequence[SimulationEvent], till_ms: int | None, acts: int
    ) -> tuple[int, bool, list[RunRecord]]:
        """Go on until `till_ms` (None: until all has ended), or until so many scripts have run.

        Answers how many of the events have happened, whether it came to the end, and the runs that ended.
        """
        words = chain.from_iterable(event.words for event in events)
        order = [self._order, "" if till_ms is None else till_ms, acts]
        taken, done, *rows = self._redis.evalsha(self._sha, len(self._keys), *self._keys, *order, *words)
        fields = iter(rows)
        return taken, bool(done), [_ran(*row) for row in zip(*[fields] * 6, strict=True)]

    def _acts(self) -> dict[str, Command[Any]]:
        """All that play.lua does, by the names that it has there; @job and the like stand for those of a run."""
        job = QueuedJob("@job", 0, next(iter(self._catalog.models), ""), 1, "")
        lease = Lease(self.fleet, "@job", "@lease", "@owner", "@slot")
        offer = Offer(self.fleet, "@job", "@lease", "@slot", "", "", 0)
        return {
            "enqueue": self._queues.enqueue_command(self.fleet, [job]),
            "claim": self._leases.claim_command(offer, _TAKER),
            "release": self._leases.release_command(lease, return_to_lane=False, claimant=_TAKER, signal="ok"),
            "back": self._leases.release_command(lease, return_to_lane=True),
            "offer": self._queues.offer_command(self.fleet),
            "sync": self._slots.sync_command(self.fleet, self._catalog),
        }


def _ran(job: bytes, slot: bytes, start: bytes, end: bytes, turn: bytes, fate: bytes) -> RunRecord:
    return RunRecord(int(job), slot.decode(), int(start), int(end), int(turn), fate == b"broken")


def _assembled(scripts: Iterable[str]) -> str:
    """play.lua with routing's scripts as functions before it.  Lua lets parameters hide the globals KEYS and ARGV."""
    fragments = {"lib/now_ms": _CLOCK}
    functions = [
        f'scripts["{name}"] = function(KEYS, ARGV)\n{LIBRARY.assemble(name, fragments)}\nend\n'
        for name in sorted(scripts)
    ]
    play = files("app.simulate").joinpath("play.lua").read_text("utf-8")
    return "".join(["local NOW\nlocal scripts = {}\n", *functions, play])
