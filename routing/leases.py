"""Leases: the right to use one slot for one job until it expires.

A lease is held by whoever knows its name and its owner; nobody else renews or frees it (LEASE-4).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

import structlog

from jobs.record import Waiting
from routing.config import RoutingSettings
from routing.pipeline import Pipeline
from routing.policies import order
from routing.queues import Offer, new_prefix, offers
from routing.scripts import Command, Scripts, say_failed
from routing.workers import Room, unbounded

log = structlog.get_logger(__name__)

Outcome = Literal["ok", "failed", "busy", ""]

OCCUPIED_MS = 12_000
"""How long slots that others use are withheld before the server is asked again."""


class Renewal(StrEnum):
    """Answer of a renewal."""

    RENEWED = "renewed"
    CANCEL = "cancel"  # renewed, and the job shall be canceled
    LOST = "lost"
    UNKNOWN = "unknown"  # Redis was emptied, or lost its last moments, and is not filled yet: carry on


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
class Span:
    """When the first and the last of a fleet's leases expire, by Redis' clock; 0: there is none."""

    now_ms: int
    first_ms: int
    last_ms: int

    @property
    def has_expired(self) -> bool:
        return 0 < self.first_ms <= self.now_ms


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
        self._seen: dict[str, tuple[str, int]] = {}  # fleet -> epoch of its room, and offers made in it, as last told

    def claim(self, offer: Offer, owner: str) -> Offer | None:
        """Make an open offer one's own; None: it is gone, another's, or one's own already."""
        return self._scripts.run_command(self.claiming(offer, owner))

    def claiming(self, offer: Offer, owner: str) -> Command:
        """The command of `claim`."""

        def read(answer: Any) -> Offer | None:
            if answer[0] != b"claimed":
                return None
            slot, server = answer[1].decode(), answer[2].decode()
            return replace(offer, owner=owner, slot=slot, server=server, number=int(answer[3]))

        keys = self._scripts.keys.fleet(offer.fleet)
        return Command("claim", keys, [offer.job_id, offer.lease, owner, self._settings.lease_ms], read)

    def pipeline(self, loop: asyncio.AbstractEventLoop) -> Pipeline:
        """A way for the commands of these leases that an event loop has for itself."""
        return Pipeline(loop, self._scripts, self._settings.redis_timeout_s)

    def renew(self, fleet: str, owner: str, held: Sequence[Held]) -> list[Renewal]:
        """Renew all of one owner's leases in a fleet; one answer each, in order."""
        args: list[Any] = [owner, self._settings.lease_ms, *self._seen.get(fleet, ("", 0))]
        for lease in held:
            args += [lease.job_id, lease.lease]
        epoch, offers, answers = self._scripts.run("renew", fleet, args)
        self._seen[fleet] = epoch.decode(), offers
        return [Renewal(answer.decode()) for answer in answers]

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
        return self._scripts.run_command(
            self.releasing(held, back=back, rest_ms=rest_ms, taker=taker, limit=limit, outcome=outcome)
        )

    def withhold(
        self, held: Held, draining: Held, *, back: bool, taker: str, outcome: Outcome
    ) -> tuple[bool, list[Offer]]:
        """Give up a lease whose slot stays taken, by the lease `draining`.  Answers as `release`."""
        return self._scripts.run_command(
            self.releasing(held, back=back, taker=taker, outcome=outcome, draining=draining)
        )

    def releasing(
        self,
        held: Held,
        *,
        back: bool,
        rest_ms: int = 0,
        taker: str = "",
        limit: int = 8,
        outcome: Outcome = "",
        draining: Held | None = None,
    ) -> Command:
        """The command of `release` and of `withhold`.  It may have to ask Redis how much room there is."""
        settings = self._settings
        args = [held.job_id, held.lease, held.owner, int(back), rest_ms, new_prefix(), limit]
        args += [self._room(), settings.offer_ms, taker, settings.lease_ms, outcome, settings.breaker_failures]
        args += [settings.breaker_rate, settings.breaker_open_ms, settings.breaker_open_max_ms]
        args += [settings.busy_rest_max_ms]
        args += [draining.job_id, draining.lease, draining.owner] if draining else [""] * 3

        def read(answer: Any) -> tuple[bool, list[Offer]]:
            return answer[0] == b"released", offers(held.fleet, answer[1])

        return Command("release", self._scripts.keys.fleet(held.fleet), args, read)

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

    def spans(self, fleets: Sequence[str]) -> dict[str, Span]:
        """Of the fleets that have leases, when the first and the last expire; of one at least, for Redis' time.

        A fleet that cannot be read is left out.
        """
        asked = self._scripts.existing("leases", fleets) or fleets[:1]
        found, failed = self._scripts.run_each("span", dict.fromkeys(asked, ()))
        say_failed("lease_look_failed", failed)
        return {fleet: Span(*map(int, answer)) for fleet, answer in found.items()}

    def pull_back(self, fleet: str) -> int:
        """After Redis' clock was set back: end what would last longer than it ever may; answers how many."""
        settings = self._settings
        longest_lease = max(settings.lease_ms, settings.offer_ms)
        longest_rest = max(settings.busy_rest_max_ms, settings.unreachable_rest_max_ms, OCCUPIED_MS)
        return int(self._scripts.run("pull_back", fleet, [longest_lease, longest_rest, settings.breaker_open_max_ms]))

    @property
    def longest_ms(self) -> int:
        """How far ahead a lease or an offer can expire at most."""
        return max(self._settings.lease_ms, self._settings.offer_ms)

    def all_of(self, fleets: Sequence[str]) -> dict[str, list[tuple[Held, int]]]:
        """Every lease of these fleets, and for how many ms it has not been renewed (below 0: longer than usual).

        In few round trips; a fleet that cannot be read is left out.
        """
        holding = self._scripts.existing("leases", fleets)
        found, failed = self._scripts.run_each("held", dict.fromkeys(holding, ()))
        say_failed("leases_not_read", failed)
        read = {fleet: self._all(fleet, answer) for fleet, answer in found.items()}
        return {fleet: read.get(fleet, []) for fleet in fleets if fleet not in failed}

    def _all(self, fleet: str, answer: Any) -> list[tuple[Held, int]]:
        now, rows = answer
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

    def having(self, jobs: Mapping[str, Sequence[str]]) -> dict[str, list[bool]]:
        """For jobs of several fleets, whether each has a lease, in one round trip.  Raises redis errors."""
        return self._scripts.members("leases", jobs)

    def restore(self, fleet: str, leases: Sequence[Restored], lasts_ms: int | None = None) -> int:
        """Write leases again that Redis has lost; answers how many were missing.  `lasts_ms`: other than the usual."""
        args: list[Any] = [lasts_ms or self._settings.lease_ms]
        for it in leases:
            args += [it.held.job_id, it.held.lease, it.held.owner, it.held.slot]
            args += [order.lane(it.job), it.job.needs, it.job.seq, it.job.created_ms]
        return self._scripts.run("restore", fleet, args) if leases else 0
