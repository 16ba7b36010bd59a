"""Leases: the right to use one slot for one job until it expires.

A lease is held by whoever knows its name and its owner; nobody else renews or frees it (LEASE-4).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

import structlog

from routing.config import RoutingSettings
from routing.queue import lanes
from routing.queue.queues import Offer, OfferTerms, new_lease_prefix, offering
from routing.queue.worker_capacity import CapacitySource, unlimited
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.redis.pipeline import Pipeline
from slotkeeper.redis.scripts import Command, Scripts, log_failures

log = structlog.get_logger(__name__)

HealthSignal = Literal["ok", "refused", "failed", "busy", "told", ""]


class Renewal(StrEnum):
    """Answer of a renewal."""

    RENEWED = "renewed"
    CANCEL = "cancel"  # renewed, and the job shall be canceled
    LOST = "lost"
    UNKNOWN = "unknown"  # Redis was emptied, or lost its last moments, and is not filled yet: carry on


def server_of_slot(slot: str) -> str:
    """Return the name of the server that a slot belongs to."""
    return slot.rsplit("-slot", 1)[0]


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as its holder, or the reaper, sees it."""

    fleet: str
    job_id: str
    name: str
    owner: str
    slot: str

    @property
    def server(self) -> str:
        return server_of_slot(self.slot)

    @property
    def stored_text(self) -> str:
        """The holder's name for the record, from which a lost Redis is rebuilt."""
        return f"{self.name} {self.owner}"

    @classmethod
    def from_offer(cls, offer: Offer, owner: str) -> "Lease":
        """Return the lease of an offer that `owner` has claimed."""
        return cls(offer.fleet, offer.job_id, offer.lease, owner, offer.slot)

    @classmethod
    def from_stored_text(cls, fleet: str, job_id: str, tag: str, slot: str) -> "Lease":
        """Return the lease that the record knows by its tag."""
        name, owner = tag.split(" ", 1)
        return cls(fleet, job_id, name, owner, slot)


@dataclass(frozen=True, slots=True)
class LeasedJob:
    """A running job's lease, as the record knows it."""

    lease: Lease
    job: QueuedJob


class Released(NamedTuple):
    """Whether the lease was still held, and the offers made."""

    released: bool
    offers: list[Offer]


class _Release(NamedTuple):
    lease: Lease
    back: bool
    cooldown_ms: int
    outcome: HealthSignal
    draining: Lease
    offering: OfferTerms


class _Renewed(NamedTuple):
    epoch: str
    offers: int
    answers: list[Renewal]


class _Running(NamedTuple):
    lease: Lease
    lane: str
    job: QueuedJob


class _Left(NamedTuple):
    lease: Lease
    left_ms: int


ExtendResult = Literal["kept", "closed", "lost"]
LeaseCheck = Literal["held", "beside", "lost"]
_Seized = Literal["seized", "lost"]
_NOTHING = Lease("", "", "", "", "")


class LeaseScripts(Protocol):
    """What lua/ does with leases: a script each."""

    def claim(self, fleet: str, *, offer: Offer, owner: str, lease_ms: int) -> Command[Offer | None]: ...
    def release(
        self, fleet: str, *, settings: RoutingSettings, releases: Sequence[_Release]
    ) -> Command[list[Released]]: ...
    def renew(
        self, fleet: str, *, owner: str, lease_ms: int, known_epoch: str, known_offers: int, leases: Sequence[Lease]
    ) -> Command[_Renewed]: ...
    def keep(self, fleet: str, *, lease: Lease, offer_ms: int, resumes: bool) -> Command[ExtendResult]: ...
    def seize(
        self, fleet: str, *, lease: Lease, new_name: str, owner: str, lease_ms: int, only_expired: bool
    ) -> Command[_Seized]: ...
    def restore(self, fleet: str, *, lease_ms: int, leases: Sequence[_Running]) -> Command[int]: ...
    def expired(self, fleet: str, *, limit: int) -> Command[list[Lease]]: ...
    def leases(self, fleet: str) -> Command[list[_Left]]: ...
    def swaps(self, fleet: str, *, lease: Lease) -> Command[bool]: ...
    def hold(self, fleet: str, *, lease: Lease, lease_ms: int) -> Command[LeaseCheck]: ...


class Leases:
    """Talks to the leases.  Every method is one atomic script; redis errors pass through."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings, room: CapacitySource = unlimited) -> None:
        self.scripts = scripts
        self._lua: LeaseScripts = scripts.bind(LeaseScripts)
        self._settings = settings
        self._room = room
        self._last_renewal: dict[
            str, tuple[str, int]
        ] = {}  # fleet -> epoch of its room, and offers made in it, as last told

    def claim_command(self, offer: Offer, owner: str) -> Command[Offer | None]:
        """Return the command that makes an open offer one's own.

        It returns None: the offer is gone, another's, or one's own already.
        """
        return self._lua.claim(offer.fleet, offer=offer, owner=owner, lease_ms=self._settings.lease_ms)

    def swaps(self, lease: Lease) -> Command[bool]:
        """Asks whether the server's last job, before this one, was of another model, or is not known."""
        return self._lua.swaps(lease.fleet, lease=lease)

    def check_command(self, lease: Lease) -> Command[LeaseCheck]:
        """Gives the lease more time if its slot may be used for its job now."""
        return self._lua.hold(lease.fleet, lease=lease, lease_ms=self._settings.lease_ms)

    def open_pipeline(self, loop: asyncio.AbstractEventLoop) -> Pipeline:
        """A way for the commands of these leases that an event loop has for itself."""
        return Pipeline(loop, self.scripts, self._settings.redis_timeout_s)

    def renew(self, fleet: str, owner: str, leases: Sequence[Lease]) -> list[Renewal]:
        """Renew all of one owner's leases in a fleet; one answer each, in order."""
        epoch, offers = self._last_renewal.get(fleet, ("", 0))
        lease_ms = self._settings.lease_ms
        answer = self.scripts.run(
            self._lua.renew(
                fleet, owner=owner, lease_ms=lease_ms, known_epoch=epoch, known_offers=offers, leases=leases
            )
        )
        self._last_renewal[fleet] = answer.epoch, answer.offers
        return answer.answers

    def release_command(
        self,
        lease: Lease,
        *,
        back: bool,
        cooldown_ms: int = 0,
        claimant: str = "",
        limit: int = 8,
        outcome: HealthSignal = "",
        draining: Lease = _NOTHING,
    ) -> Command[list[Released]]:
        """Return the command that frees the slot and makes the next offers, the first for `claimant`, if one is named.

        `back`: the job returns to its place in its lane.  `outcome`: what the run tells of its server and model.
        `draining`: the lease by which the slot stays taken.  It may have to ask Redis how much room there is.
        """
        making = offering(self._settings, self._room(), limit, claimant)
        one = _Release(lease, back, cooldown_ms, outcome, draining, making)
        return self._lua.release(lease.fleet, settings=self._settings, releases=[one])

    def extend_offer(self, lease: Lease, *, resumes: bool) -> ExtendResult:
        """Give an open offer more time: "kept"; "closed": nothing is started there now; "lost": it is not open.

        `resumes`: its server may be at the job already, so that it stays where it is.
        """
        return self.scripts.run(
            self._lua.keep(lease.fleet, lease=lease, offer_ms=self._settings.offer_ms, resumes=resumes)
        )

    def list_expired(self, fleet: str, limit: int = 256) -> list[Lease]:
        """Leases whose time is over.  `owner` "": nobody took the offer up."""
        return self.scripts.run(self._lua.expired(fleet, limit=limit))

    def list_all(self, fleets: Sequence[str]) -> dict[str, list[tuple[Lease, int]]]:
        """Every lease of these fleets, and for how many ms it has not been renewed (below 0: longer than usual).

        In few round trips; a fleet that cannot be read is left out.
        """
        holding = self.scripts.existing("leases", fleets)
        found, failed = self.scripts.run_each({fleet: self._lua.leases(fleet) for fleet in holding})
        log_failures("leases_not_read", failed)
        lease_ms = self._settings.lease_ms
        read = {fleet: [(it.lease, lease_ms - it.left_ms) for it in leases] for fleet, leases in found.items()}
        return {fleet: read.get(fleet, []) for fleet in fleets if fleet not in failed}

    def seize(self, lease: Lease, owner: str, ttl_ms: int, *, only_expired: bool) -> Lease | None:
        """Take a lease over under a new name; None: its holder has renewed or released it."""
        name = f"{new_lease_prefix()}-s"
        answer = self.scripts.run(
            self._lua.seize(
                lease.fleet, lease=lease, new_name=name, owner=owner, lease_ms=ttl_ms, only_expired=only_expired
            )
        )
        return replace(lease, name=name, owner=owner) if answer == "seized" else None

    def have_lease(self, jobs: Mapping[str, Sequence[str]]) -> dict[str, list[bool]]:
        """For jobs of several fleets, whether each has a lease, in one round trip.  Raises redis errors."""
        return self.scripts.members("leases", jobs)

    def restore(self, fleet: str, leases: Sequence[LeasedJob], lasts_ms: int | None = None) -> int:
        """Write leases again that Redis has lost; answers how many were missing.  `lasts_ms`: other than the usual."""
        rows = [_Running(it.lease, lanes.lane_name(it.job), it.job) for it in leases]
        lease_ms = lasts_ms or self._settings.lease_ms
        return self.scripts.run(self._lua.restore(fleet, lease_ms=lease_ms, leases=rows)) if rows else 0

    def restore_offers(self, fleet: str, leases: Sequence[LeasedJob]) -> int:
        """Write open offers again that Redis has lost, under new names; answers how many were missing."""
        prefix = new_lease_prefix()
        named = [replace(it, lease=replace(it.lease, name=f"{prefix}-{n}", owner="")) for n, it in enumerate(leases)]
        return self.restore(fleet, named, self._settings.offer_ms)
