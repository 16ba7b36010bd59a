"""Leases: the right to use one slot for one job until it expires.

A lease is held by whoever knows its name and its owner; nobody else renews or frees it (LEASE-4).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from jobs.record import Waiting
from routing.config import RoutingSettings
from routing.policies import order
from routing.queues import Offer, new_prefix, offers
from routing.scripts import Scripts
from routing.workers import Room, unbounded

Outcome = Literal["ok", "failed", "busy", ""]


class Renewal(StrEnum):
    """Answer of a renewal."""

    RENEWED = "renewed"
    CANCEL = "cancel"  # renewed, and the job shall be canceled
    LOST = "lost"
    UNKNOWN = "unknown"  # Redis was emptied and is not rebuilt yet: carry on


@dataclass(frozen=True, slots=True)
class Held:
    """A lease as its holder, or the reaper, sees it."""

    fleet: str
    job_id: str
    lease: str
    owner: str
    slot: str

    @property
    def server(self) -> str:
        return self.slot.rsplit("-slot", 1)[0]

    @property
    def tag(self) -> str:
        """The holder's name for the record, from which a lost Redis is rebuilt."""
        return f"{self.lease} {self.owner}"


@dataclass(frozen=True, slots=True)
class Restored:
    """A running job's lease, as the record knows it."""

    held: Held
    job: Waiting


class Leases:
    """Talks to the leases.  Every method is one atomic script; redis errors pass through."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings, room: Room = unbounded) -> None:
        self._scripts = scripts
        self._settings = settings
        self._room = room

    def claim(self, offer: Offer, owner: str) -> Offer | None:
        """Make an open offer one's own; None: it is gone, another's, or one's own already."""
        args = [offer.job_id, offer.lease, owner, self._settings.lease_ms]
        answer = self._scripts.run("claim", offer.fleet, args)
        if answer[0] != b"claimed":
            return None
        return replace(offer, owner=owner, slot=answer[1].decode(), server=answer[2].decode(), number=int(answer[3]))

    def renew(self, fleet: str, owner: str, held: Sequence[Held]) -> list[Renewal]:
        """Renew all of one owner's leases in a fleet; one answer each, in order."""
        args: list[Any] = [owner, self._settings.lease_ms]
        for lease in held:
            args += [lease.job_id, lease.lease]
        return [Renewal(answer.decode()) for answer in self._scripts.run("renew", fleet, args)]

    def release(
        self,
        held: Held,
        *,
        back: bool,
        rest_ms: int = 0,
        taker: str = "",
        limit: int = 8,
        outcome: Outcome = "",
    ) -> tuple[bool, list[Offer]]:
        """Free the slot and make the next offers; the first goes straight to `taker`, if one is named.

        `back`: the job returns to its place in its lane.  `outcome`: what the run tells of its server and model.
        Answers whether the lease was still held, and the offers.
        """
        settings = self._settings
        args = [held.job_id, held.lease, held.owner, int(back), rest_ms, new_prefix(), limit]
        args += [self._room(), settings.offer_ms, taker, settings.lease_ms, outcome, settings.breaker_failures]
        args += [settings.breaker_rate, settings.breaker_open_ms, settings.breaker_open_max_ms]
        args += [settings.busy_rest_max_ms]
        answer, rows = self._scripts.run("release", held.fleet, args)
        return answer == b"released", offers(held.fleet, rows)

    def keep(self, held: Held, *, resumes: bool) -> str:
        """Give an open offer more time: "kept"; "closed": nothing is started there now; "lost": it is not open.

        `resumes`: its server may be at the job already, so that it stays where it is.
        """
        args = [held.job_id, held.lease, self._settings.offer_ms, int(resumes)]
        return self._scripts.run("keep", held.fleet, args)[0].decode()

    def expired(self, fleet: str, limit: int = 256) -> list[Held]:
        """Leases whose time is over.  `owner` "": nobody took the offer up."""
        rows = self._scripts.run("expired", fleet, [limit])
        return [Held(fleet, *(field.decode() for field in row)) for row in rows]

    def all(self, fleet: str) -> list[tuple[Held, int]]:
        """Every lease of a fleet, and for how many ms it has not been renewed (below 0: longer than usual)."""
        now, rows = self._scripts.run("held", fleet)
        return [
            (Held(fleet, *(field.decode() for field in row[:4])), self._settings.lease_ms - (int(row[4]) - int(now)))
            for row in rows
        ]

    def seize(self, held: Held, owner: str, ttl_ms: int, *, only_expired: bool) -> Held | None:
        """Take a lease over under a new name; None: its holder has renewed or released it."""
        lease = f"{new_prefix()}-s"
        args = [held.job_id, held.lease, held.owner, lease, owner, ttl_ms, int(only_expired)]
        if self._scripts.run("seize", held.fleet, args)[0] != b"seized":
            return None
        return replace(held, lease=lease, owner=owner)

    def restore(self, fleet: str, leases: Sequence[Restored]) -> int:
        """Write leases again after Redis was emptied; answers how many were missing."""
        args: list[Any] = [self._settings.lease_ms]
        for it in leases:
            args += [it.held.job_id, it.held.lease, it.held.owner, it.held.slot]
            args += [order.lane(it.job), it.job.needs, it.job.seq, it.job.created_ms]
        return self._scripts.run("restore", fleet, args) if leases else 0
