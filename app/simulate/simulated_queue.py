"""The queue of the simulator: it runs the scripts of routing, with the arguments that routing passes to them.

This module does not interpret the arguments.  The classes of routing build the commands, and play.lua runs their
scripts at simulated times, thousands in one round trip.
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
from tasks.periods import PERIODS_S

_PREFIX = "simulation"
_CLAIMANT = "simulator"
_CLOCK = "local function now_ms() return NOW end\n"
_SIMULATOR_KEYS = ("ends", "runs", "lasts", "loaded", "state")
_SWEEP_MS = round(PERIODS_S["sweep"] * 1000)
_LEASE_MS = 100 * 365 * 86_400_000  # Longer than any run, because the simulator does not renew leases.
_PATIENCE_MS = 3_600_000  # how long a job may wait while no slot runs: longer than any cooldown


class RunRecord(NamedTuple):
    """One run of a job.  `broken`: an outage ended it."""

    job: int
    slot: str
    start_ms: int
    end_ms: int
    turn: int
    broken: bool


class SimulationEvent(NamedTuple):
    """An external event, in the format of play.lua: an arrival, or a change of servers."""

    at_ms: int
    words: list[Any]


class SimulatedQueue:
    """The queue of one fleet.  `play` makes one round trip.  Raises redis errors."""

    def __init__(self, redis: Redis, fleet: str, catalog: CatalogSnapshot, start_latency_ms: int, swap_ms: int) -> None:
        settings, keys = RoutingSettings(lease_ms=_LEASE_MS), Keys(_PREFIX)
        scripts = make_scripts(redis, keys)
        self.fleet = fleet
        self._redis, self._catalog, self._version = redis, catalog, 1
        self._queues, self._leases = Queues(scripts, settings), Leases(scripts, settings)
        self._slots = Slots(scripts, settings)
        simulator_keys = [f"{_PREFIX}:{{{fleet}}}:simulator:{name}" for name in _SIMULATOR_KEYS]
        self._keys = [*keys.fleet_keys(fleet), *simulator_keys]
        commands = self._commands()
        self._settings_json = orjson.dumps(
            {
                "claimant": _CLAIMANT,
                "latency_ms": start_latency_ms,
                "swap_ms": swap_ms,
                "sweep_ms": _SWEEP_MS,
                "patience_ms": _PATIENCE_MS,
                "scripts": {name: command.target.script for name, command in commands.items()},
                "templates": {name: [str(word) for word in command.args] for name, command in commands.items()},
            }
        )
        self._sha = redis.script_load(_assemble_play({command.target.script for command in commands.values()}))
        fleets = Fleets(scripts, settings)
        fleets.begin_rebuild([fleet], catalog.database_id)
        fleets.open({fleet: 1})

    def opening(self, at_ms: int) -> SimulationEvent:
        """Return the event in which all servers of the fleet start."""
        return self.changed(at_ms, "", self._catalog)

    def arrival(self, job: QueuedJob, at_ms: int, run_ms: int) -> SimulationEvent:
        """Return the event in which a job is submitted.  The id of the job is a number, as a text."""
        words = self._queues.enqueue_command(self.fleet, [job]).args
        return SimulationEvent(at_ms, [at_ms, "arrive", job.id, run_ms, len(words), *words])

    def changed(self, at_ms: int, down: str, catalog: CatalogSnapshot) -> SimulationEvent:
        """Return the event in which the catalog changes.  `down`: the server whose runs are interrupted; "": none."""
        self._version += 1
        versioned = replace(catalog, version=self._version)
        words = self._slots.sync_command(self.fleet, versioned).args
        online = sum(server.slots for server in catalog.servers_of(self.fleet) if server.state == "online")
        return SimulationEvent(at_ms, [at_ms, "down" if down else "up", down, online, len(words), *words])

    def play(
        self, events: Sequence[SimulationEvent], till_ms: int | None, max_scripts: int
    ) -> tuple[int, bool, list[RunRecord]]:
        """Simulate until `till_ms` (None: until all jobs have ended), or until `max_scripts` scripts have run.

        Returns the number of processed events, whether the end was reached, and the runs that ended.
        """
        words = chain.from_iterable(event.words for event in events)
        arguments = [self._settings_json, "" if till_ms is None else till_ms, max_scripts]
        taken, done, *rows = self._redis.evalsha(self._sha, len(self._keys), *self._keys, *arguments, *words)
        fields = iter(rows)
        return taken, bool(done), [_run_record(*row) for row in zip(*[fields] * 6, strict=True)]

    def _commands(self) -> dict[str, Command[Any]]:
        """Return the commands of play.lua by name.  @job, @lease, @owner and @slot are replaced by those of a run."""
        job = QueuedJob("@job", 0, next(iter(self._catalog.models), ""), 1, "")
        lease = Lease(self.fleet, "@job", "@lease", "@owner", "@slot")
        offer = Offer(self.fleet, "@job", "@lease", "@slot", "", "", 0)
        return {
            "enqueue": self._queues.enqueue_command(self.fleet, [job]),
            "claim": self._leases.claim_command(offer, _CLAIMANT),
            "release": self._leases.release_command(lease, return_to_lane=False, claimant=_CLAIMANT, signal="ok"),
            "back": self._leases.release_command(lease, return_to_lane=True),
            "offer": self._queues.offer_command(self.fleet),
            "sync": self._slots.sync_command(self.fleet, self._catalog),
        }


def _run_record(job: bytes, slot: bytes, start: bytes, end: bytes, turn: bytes, fate: bytes) -> RunRecord:
    return RunRecord(int(job), slot.decode(), int(start), int(end), int(turn), fate == b"broken")


def _assemble_play(scripts: Iterable[str]) -> str:
    """Return play.lua after the scripts of routing as functions, whose parameters hide the globals KEYS and ARGV."""
    fragments = {"lib/now_ms": _CLOCK}
    functions = [
        f'scripts["{name}"] = function(KEYS, ARGV)\n{LIBRARY.assemble(name, fragments)}\nend\n'
        for name in sorted(scripts)
    ]
    play = files("app.simulate").joinpath("play.lua").read_text("utf-8")
    return "".join(["local NOW\nlocal scripts = {}\n", *functions, play])
