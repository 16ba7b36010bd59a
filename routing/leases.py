"""Leases: the right to use one slot for one job until it expires.

A lease is held by whoever knows its name and its owner; nobody else renews or frees it (LEASE-4).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

import structlog

from jobs.record import Waiting
from routing.config import RoutingSettings
from routing.pipeline import Pipeline
from routing.policies import order
from routing.queues import Offer, Offering, new_prefix, offering
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


class Released(NamedTuple):
    """Whether the lease was still held, and the offers made."""

    released: bool
    offers: list[Offer]


class _Renewed(NamedTuple):
    epoch: str
    offers: int
    answers: list[Renewal]


class _Running(NamedTuple):
    held: Held
    lane: str
    job: Waiting


class _Left(NamedTuple):
    held: Held
    left_ms: int


Kept = Literal["kept", "closed", "lost"]
_Seized = Literal["seized", "lost"]
_NOTHING = Held("", "", "", "", "")


class LeaseScripts(Protocol):
    """What lua/ does with leases: a script each."""

    def claim(self, fleet: str, *, offer: Offer, owner: str, lease_ms: int) -> Command[Offer | None]: ...
    def release(
        self,
        fleet: str,
        *,
        held: Held,
        back: bool,
        rest_ms: int,
        outcome: Outcome,
        settings: RoutingSettings,
        draining: Held,
        offering: Offering,
    ) -> Command[Released]: ...
    def renew(
        self, fleet: str, *, owner: str, lease_ms: int, known_epoch: str, known_offers: int, leases: Sequence[Held]
    ) -> Command[_Renewed]: ...
    def keep(self, fleet: str, *, held: Held, offer_ms: int, resumes: bool) -> Command[Kept]: ...
    def seize(
        self, fleet: str, *, held: Held, lease: str, owner: str, lease_ms: int, only_expired: bool
    ) -> Command[_Seized]: ...
    def restore(self, fleet: str, *, lease_ms: int, leases: Sequence[_Running]) -> Command[int]: ...
    def expired(self, fleet: str, *, limit: int) -> Command[list[Held]]: ...
    def held(self, fleet: str) -> Command[list[_Left]]: ...
    def span(self, fleet: str) -> Command[Span]: ...
    def pull_back(self, fleet: str, *, lease_ms: int, rest_ms: int, open_ms: int) -> Command[int]: ...


class Leases:
    """Talks to the leases.  Every method is one atomic script; redis errors pass through."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings, room: Room = unbounded) -> None:
        self._scripts = scripts
        self._acts: LeaseScripts = scripts.bound(LeaseScripts)
        self._settings = settings
        self._room = room
        self._seen: dict[str, tuple[str, int]] = {}  # fleet -> epoch of its room, and offers made in it, as last told

    def claim(self, offer: Offer, owner: str) -> Offer | None:
        """Make an open offer one's own; None: it is gone, another's, or one's own already."""
        return self._scripts.run(self.claiming(offer, owner))

    def claiming(self, offer: Offer, owner: str) -> Command[Offer | None]:
        """The command of `claim`."""
        return self._acts.claim(offer.fleet, offer=offer, owner=owner, lease_ms=self._settings.lease_ms)

    def pipeline(self, loop: asyncio.AbstractEventLoop) -> Pipeline:
        """A way for the commands of these leases that an event loop has for itself."""
        return Pipeline(loop, self._scripts, self._settings.redis_timeout_s)

    def renew(self, fleet: str, owner: str, held: Sequence[Held]) -> list[Renewal]:
        """Renew all of one owner's leases in a fleet; one answer each, in order."""
        epoch, offers = self._seen.get(fleet, ("", 0))
        lease_ms = self._settings.lease_ms
        answer = self._scripts.run(
            self._acts.renew(fleet, owner=owner, lease_ms=lease_ms, known_epoch=epoch, known_offers=offers, leases=held)
        )
        self._seen[fleet] = answer.epoch, answer.offers
        return answer.answers

    def release(
        self,
        held: Held,
        *,
        back: bool,
        rest_ms: int = 0,
        taker: str = "",
        limit: int = 8,
        outcome: Outcome = "",
    ) -> Released:
        """Free the slot and make the next offers; the first goes straight to `taker`, if one is named.

        `back`: the job returns to its place in its lane.  `outcome`: what the run tells of its server and model.
        """
        return self._scripts.run(
            self.releasing(held, back=back, rest_ms=rest_ms, taker=taker, limit=limit, outcome=outcome)
        )

    def withhold(self, held: Held, draining: Held, *, back: bool, taker: str, outcome: Outcome) -> Released:
        """Give up a lease whose slot stays taken, by the lease `draining`.  Answers as `release`."""
        return self._scripts.run(self.releasing(held, back=back, taker=taker, outcome=outcome, draining=draining))

    def releasing(
        self,
        held: Held,
        *,
        back: bool,
        rest_ms: int = 0,
        taker: str = "",
        limit: int = 8,
        outcome: Outcome = "",
        draining: Held = _NOTHING,
    ) -> Command[Released]:
        """The command of `release` and of `withhold`.  It may have to ask Redis how much room there is."""
        return self._acts.release(
            held.fleet,
            held=held,
            back=back,
            rest_ms=rest_ms,
            outcome=outcome,
            settings=self._settings,
            draining=draining,
            offering=offering(self._settings, self._room(), limit, taker),
        )

    def keep(self, held: Held, *, resumes: bool) -> Kept:
        """Give an open offer more time: "kept"; "closed": nothing is started there now; "lost": it is not open.

        `resumes`: its server may be at the job already, so that it stays where it is.
        """
        return self._scripts.run(
            self._acts.keep(held.fleet, held=held, offer_ms=self._settings.offer_ms, resumes=resumes)
        )

    def expired(self, fleet: str, limit: int = 256) -> list[Held]:
        """Leases whose time is over.  `owner` "": nobody took the offer up."""
        return self._scripts.run(self._acts.expired(fleet, limit=limit))

    def spans(self, fleets: Sequence[str]) -> dict[str, Span]:
        """Of the fleets that have leases, when the first and the last expire; of one at least, for Redis' time.

        A fleet that cannot be read is left out.
        """
        asked = self._scripts.existing("leases", fleets) or fleets[:1]
        found, failed = self._scripts.run_each({fleet: self._acts.span(fleet) for fleet in asked})
        say_failed("lease_look_failed", failed)
        return found

    def pull_back(self, fleet: str) -> int:
        """After Redis' clock was set back: end what would last longer than it ever may; answers how many."""
        settings = self._settings
        rest_ms = max(settings.busy_rest_max_ms, settings.unreachable_rest_max_ms, OCCUPIED_MS)
        open_ms = settings.breaker_open_max_ms
        return self._scripts.run(
            self._acts.pull_back(fleet, lease_ms=self.longest_ms, rest_ms=rest_ms, open_ms=open_ms)
        )

    @property
    def longest_ms(self) -> int:
        """How far ahead a lease or an offer can expire at most."""
        return max(self._settings.lease_ms, self._settings.offer_ms)

    def all_of(self, fleets: Sequence[str]) -> dict[str, list[tuple[Held, int]]]:
        """Every lease of these fleets, and for how many ms it has not been renewed (below 0: longer than usual).

        In few round trips; a fleet that cannot be read is left out.
        """
        holding = self._scripts.existing("leases", fleets)
        found, failed = self._scripts.run_each({fleet: self._acts.held(fleet) for fleet in holding})
        say_failed("leases_not_read", failed)
        lease_ms = self._settings.lease_ms
        read = {fleet: [(it.held, lease_ms - it.left_ms) for it in leases] for fleet, leases in found.items()}
        return {fleet: read.get(fleet, []) for fleet in fleets if fleet not in failed}

    def seize(self, held: Held, owner: str, ttl_ms: int, *, only_expired: bool) -> Held | None:
        """Take a lease over under a new name; None: its holder has renewed or released it."""
        lease = f"{new_prefix()}-s"
        answer = self._scripts.run(
            self._acts.seize(
                held.fleet, held=held, lease=lease, owner=owner, lease_ms=ttl_ms, only_expired=only_expired
            )
        )
        return replace(held, lease=lease, owner=owner) if answer == "seized" else None

    def having(self, jobs: Mapping[str, Sequence[str]]) -> dict[str, list[bool]]:
        """For jobs of several fleets, whether each has a lease, in one round trip.  Raises redis errors."""
        return self._scripts.members("leases", jobs)

    def restore(self, fleet: str, leases: Sequence[Restored], lasts_ms: int | None = None) -> int:
        """Write leases again that Redis has lost; answers how many were missing.  `lasts_ms`: other than the usual."""
        rows = [_Running(it.held, order.lane(it.job), it.job) for it in leases]
        lease_ms = lasts_ms or self._settings.lease_ms
        return self._scripts.run(self._acts.restore(fleet, lease_ms=lease_ms, leases=rows)) if rows else 0
