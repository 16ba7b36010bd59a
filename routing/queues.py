"""The waiting room: lanes of queued jobs, and offers of the job whose turn it is."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs.config import Policy
from jobs.record import Waiting
from routing.config import RoutingSettings
from routing.policies import order
from routing.scripts import Scripts

_CHUNK = 1000
_AWAY_S = 1.0


@dataclass(frozen=True, slots=True)
class Offer:
    """A job and a slot, taken together.  `owner` "": open, for the worker that claims it first."""

    fleet: str
    job_id: str
    lease: str
    slot: str
    server: str
    model: str
    number: int
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Depths:
    """What stands in a fleet's room.  `open`: it is complete; False after Redis was emptied."""

    open: bool
    free: int
    resting: int
    taken: int
    lanes: dict[str, int]

    def waiting(self, model: str) -> int:
        return sum(count for lane, count in self.lanes.items() if order.model_of(lane) == model)


def offers(fleet: str, rows: Sequence[Sequence[Any]]) -> list[Offer]:
    """Read offers as the scripts return them: job, lease, slot, server, model, number, owner."""
    return [_offer(fleet, *row) for row in rows]


def _offer(
    fleet: str, job: bytes, lease: bytes, slot: bytes, server: bytes, model: bytes, number: int, owner: bytes
) -> Offer:
    return Offer(
        fleet, job.decode(), lease.decode(), slot.decode(), server.decode(), model.decode(), number, owner.decode()
    )


def new_prefix() -> str:
    """Text that makes the names of leases unique, also across an emptied Redis."""
    return secrets.token_hex(6)


class Queues:
    """Talks to the waiting rooms.  Every method is one atomic script; redis errors pass through."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings) -> None:
        self._scripts = scripts
        self._settings = settings
        self._away_until = 0.0

    @property
    def away(self) -> bool:
        """Whether Redis failed a moment ago: its time-out is paid once, not at every submit."""
        return time.monotonic() < self._away_until

    def note_away(self) -> None:
        self._away_until = time.monotonic() + _AWAY_S

    def enqueue(self, fleet: str, jobs: Sequence[Waiting], policies: dict[str, Policy], limit: int = 8) -> list[Offer]:
        """Put queued jobs in their lanes and offer up to `limit`.  A job that is there already stays as it is."""
        made: list[Offer] = []
        for start in range(0, max(len(jobs), 1), _CHUNK):
            args: list[Any] = [new_prefix(), limit - len(made), self._settings.offer_ms]
            for job in jobs[start : start + _CHUNK]:
                args += [order.lane(job), order.offset(policies[job.model], job.tier), job.seq, job.id]
            made += offers(fleet, self._scripts.run("enqueue", fleet, args)[1])
        self._away_until = 0.0
        return made

    def offer(self, fleet: str, limit: int = 256) -> list[Offer]:
        """Offer what can be offered: the sweep (SLOT-2)."""
        return offers(fleet, self._scripts.run("offer", fleet, [new_prefix(), limit, self._settings.offer_ms]))

    def withdraw(self, fleet: str, job: Waiting) -> str:
        """Take a job out: "withdrawn"; "asked": it is offered or runs, its holder is told; "absent"."""
        return self._scripts.run("withdraw", fleet, [job.id, order.lane(job)])[0].decode()

    def ahead(self, fleet: str, job: Waiting) -> int | None:
        """How many jobs of its model come before it; None: it does not wait in the room, or Redis is away."""
        if self.away:
            return None
        answer = self._scripts.run("position", fleet, [job.id, order.lane(job)])
        return int(answer[1]) if answer[0] == b"waiting" else None

    def depths(self, fleet: str) -> Depths:
        is_open, free, resting, taken, lanes = self._scripts.run("depths", fleet)
        return Depths(bool(is_open), free, resting, taken, {lane.decode(): count for lane, count in lanes})

    def reorder(self, fleet: str, policies: dict[str, Policy]) -> int:
        """Give every lane the offset of its model's present policy; answers how many lanes there are."""
        args: list[Any] = []
        for lane in self.depths(fleet).lanes:
            policy = policies.get(order.model_of(lane))
            if policy is not None:
                args += [lane, order.offset(policy, order.tier_of(lane))]
        return self._scripts.run("reorder", fleet, args) if args else 0

    def open(self, fleet: str) -> bool:
        """Declare the room complete.  False: it was open."""
        return self._scripts.run("open", fleet, [new_prefix()])[0] == b"opened"
