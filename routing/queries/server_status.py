"""How each server of a fleet stands in its room: slots, breaker, and what it is compared by.

Redis errors pass through.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from routing.queue.slots import Slots
from slotkeeper.redis.scripts import Command, log_failures


@dataclass(frozen=True, slots=True)
class Score:
    """The parts by which servers are compared for a model, each 0 or about that at its best; the lowest total wins."""

    load: float
    failures: float
    slowness: float
    swap: float
    total: float


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """A server as the offers see it.  Times in ms since the epoch, 0: none.

    `taken`: slots with a lease, those that are withheld among them.  `cooldown_until_ms`: when the first slot in
    cooldown is offered again.  `away_since_ms`: since when it could not be reached.
    `breaker`: closed, open, half_open, probing.  `open_until_ms`: when its next probe is due.  `open_why`: what opened
    it: runs that failed one after another ("failures"), too many of them ("rate"), the last probe ("probe"); "": it is
    closed.  `opened`: how often in a row.  `loaded`: the model that it ran last.
    """

    server: str
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
    scores: dict[str, Score]


def blocked_by(standing: ServerStatus, withheld: int) -> str:
    """Return what keeps a server's slots from the next job, for people; "": one is free.

    `withheld`: how many of its slots are.
    """
    if standing.breaker in ("open", "probing"):
        return "breaker open" if standing.breaker == "open" else "being tried by one job"
    if standing.free:
        return ""
    if standing.away_since_ms:
        return "away"
    if standing.taken > withheld:
        return "busy"
    return "withheld" if withheld else "in cooldown"


@dataclass(frozen=True, slots=True)
class SlotUse:
    """What a server's slots are used for at this moment.

    `running`: slots that hold a run.  `withheld`: slots that a run which has ended here may still use.  `free`: slots
    that the next job can have; 0 while anything keeps the whole server from it.  `hindrance`: what does, for people.
    """

    running: int
    withheld: int
    free: int
    blocked_by: str


def slot_use(state: str, standing: ServerStatus, withheld: int) -> SlotUse:
    """Count a server's slots; `state`: as an operator has set it.  All who show slots count them here."""
    word = blocked_by(standing, withheld) if state == "online" else state
    return SlotUse(max(standing.taken - withheld, 0), withheld, 0 if word else standing.free, word)


class ServerScripts(Protocol):
    """What lua/ says of servers."""

    def server_status(self, fleet: str) -> Command[list[ServerStatus]]: ...


def read_servers(slots: Slots, fleet: str) -> dict[str, ServerStatus]:
    """How each of a fleet's servers stands."""
    return {it.server: it for it in slots.scripts.run(_asking(slots, fleet))}


def read_servers_of_fleets(slots: Slots, fleets: Sequence[str]) -> dict[str, dict[str, ServerStatus]]:
    """The same of several fleets, in few round trips; one that cannot be read is left out."""
    found, failed = slots.scripts.run_each({fleet: _asking(slots, fleet) for fleet in fleets})
    log_failures("room_not_read", failed)
    return {fleet: {it.server: it for it in servers} for fleet, servers in found.items()}


def _asking(slots: Slots, fleet: str) -> Command[list[ServerStatus]]:
    scripts: ServerScripts = slots.scripts.bind(ServerScripts)
    return scripts.server_status(fleet)
