"""Read the status of a fleet's servers from Redis: slots, breaker and score.

All functions that read raise redis errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from routing.queue.slots import Slots
from slotkeeper.redis.scripts import Command, log_failures

NOT_CONNECTED = "not connected"
"""Why a node takes no jobs, also if its owner has paused it."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a server for a model: the lowest total gets the next job.  Each part is at least 0."""

    load: float
    failures: float
    slowness: float
    swap: float
    silence: float
    total: float


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The status of a server, as the scripts that make offers use it.  Times in ms since the epoch, 0: none.

    `absent`: a node that is not connected, or takes no jobs.
    `taken`: slots with a lease, including quarantined slots.  `cooldown_until_ms`: when the first slot in cooldown is
    offered again.  `away_since_ms`: since when the server could not be reached, or says that it cannot run jobs.
    `away_why`: what it says; "": nothing.  `silent_since_ms`: since when its health check is not answered in time.
    `breaker`: closed, open, half_open, probing.  `open_until_ms`: when its next probe is due.
    `open_why`: why the breaker opened: several runs failed in a row ("failures"), too large a share of them failed
    ("rate"), or the last probe failed ("probe"); "": the breaker is closed.
    `opened`: how often in a row.  `loaded`: the model that the server ran last.
    """

    server: str
    absent: bool
    free: int
    cooling: int
    taken: int
    cooldown_until_ms: int
    breaker: Literal["closed", "open", "half_open", "probing"]
    open_until_ms: int
    open_why: str
    opened: int
    loaded: str
    swaps: int
    away_since_ms: int
    away_why: str
    silent_since_ms: int
    scores: dict[str, Score]


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Counts of a server's slots.

    `running`: slots with a run.  `quarantined`: slots whose run has ended here, but perhaps not on the server.
    `free`: slots that the next job can get; 0 while the whole server is blocked.  `blocked_by`: why, for users.
    """

    running: int
    quarantined: int
    free: int
    blocked_by: str


class ServerScripts(Protocol):
    """The script in routing/lua that reads the status of servers."""

    def server_status(self, fleet: str) -> Command[list[ServerStatus]]: ...


def read_servers(slots: Slots, fleet: str) -> dict[str, ServerStatus]:
    """Return server -> status of a fleet's servers."""
    return {status.server: status for status in slots.scripts.run(_status_command(slots, fleet))}


def read_servers_of_fleets(slots: Slots, fleets: Sequence[str]) -> dict[str, dict[str, ServerStatus]]:
    """Return fleet -> server -> status, in few round trips.  Leaves out a fleet that cannot be read."""
    by_fleet, failed = slots.scripts.run_each({fleet: _status_command(slots, fleet) for fleet in fleets})
    log_failures("room_not_read", failed)
    return {fleet: {status.server: status for status in statuses} for fleet, statuses in by_fleet.items()}


def blocked_by(status: ServerStatus, quarantined: int) -> str:
    """Return why a server's slots cannot take the next job, for users; "": a slot is free.

    `quarantined`: number of its quarantined slots.
    """
    if status.absent:
        return NOT_CONNECTED
    if status.breaker in ("open", "probing"):
        return "breaker open" if status.breaker == "open" else "being tried by one job"
    if status.free:
        return ""
    if status.away_since_ms:
        return "away"
    if status.taken > quarantined:
        return "busy"
    return "withheld" if quarantined else "in cooldown"


def slot_use(state: str, status: ServerStatus, quarantined: int) -> SlotUse:
    """Count a server's slots.  `state`: its administrative state.  All views of slots use this function."""
    blocked = blocked_by(status, quarantined) if state == "online" else state
    return SlotUse(max(status.taken - quarantined, 0), quarantined, 0 if blocked else status.free, blocked)


def _status_command(slots: Slots, fleet: str) -> Command[list[ServerStatus]]:
    lua: ServerScripts = slots.scripts.bind(ServerScripts)
    return lua.server_status(fleet)
