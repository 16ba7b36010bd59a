"""Claim, renew, release, seize and restore leases; quarantine leases.

A lease is the right to use one slot for one job until it expires.  Only its holder, who knows its name and its owner,
renews or releases it (LEASE-4).
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

import structlog

from routing.config import RoutingSettings
from routing.queue import lanes
from routing.queue.queues import Offer, OfferTerms, new_lease_prefix, offer_terms
from routing.queue.slots import server_of_slot
from routing.queue.worker_capacity import CapacitySource, unlimited
from slotkeeper.jobs.queue_epochs import make_lease_name
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.redis.pipeline import Pipeline
from slotkeeper.redis.scripts import Command, Scripts, log_failures

log = structlog.get_logger(__name__)

QUARANTINE_OWNER, _QUARANTINE_NAME = "draining", "withheld"
"""Owner and name of the leases of quarantined slots, as stored in Redis."""

HealthSignal = Literal["ok", "refused", "failed", "busy", "retry_after", ""]
"""What a run says of its server and model, see lua/release.lua."""

ExtendResult = Literal["kept", "closed", "lost"]
LeaseCheck = Literal["held", "displaced", "lost"]


class Renewal(StrEnum):
    """Result of a renewal."""

    RENEWED = "renewed"
    CANCEL = "cancel"  # renewed, and the job is to be canceled
    LOST = "lost"
    UNKNOWN = "unknown"  # Redis was emptied, or lost its last moments, and is not filled yet: carry on


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease.  `owner`: the worker that holds it; "": an offer that no worker has claimed."""

    fleet: str
    job_id: str
    name: str
    owner: str
    slot: str

    @property
    def server(self) -> str:
        """The server of its slot."""
        return server_of_slot(self.slot)

    @property
    def stored_text(self) -> str:
        """Name and owner as the database stores them, from which a lost lease is restored."""
        return f"{self.name} {self.owner}"

    @classmethod
    def from_offer(cls, offer: Offer, owner: str) -> "Lease":
        """Return the lease of an offer that `owner` has claimed."""
        return cls(offer.fleet, offer.job_id, offer.lease, owner, offer.slot)

    @classmethod
    def from_stored_text(cls, fleet: str, job_id: str, text: str, slot: str) -> "Lease":
        """Return the lease that the database stores as `text`."""
        name, owner = text.split(" ", 1)
        return cls(fleet, job_id, name, owner, slot)


_NO_LEASE = Lease("", "", "", "", "")


def new_lease_owner(kind: str) -> str:
    """Return a name for a process that owns leases, different from that of any process before it."""
    return f"{kind}/{secrets.token_hex(4)}"


def quarantine_lease(fleet: str, job_id: str, attempt: int, slot: str) -> Lease:
    """Return the lease that keeps the slot of an ended run taken, until its server has released it."""
    return Lease(fleet, f"{job_id}~{attempt}", _QUARANTINE_NAME, QUARANTINE_OWNER, slot)


def parse_quarantine_id(lease_id: str) -> tuple[str, int]:
    """Return the job and the attempt of a quarantine lease."""
    job_id, attempt = lease_id.rsplit("~", 1)
    return job_id, int(attempt)


@dataclass(frozen=True, slots=True)
class LeasedJob:
    """A running job and its lease, as the database has them."""

    lease: Lease
    job: QueuedJob


class Released(NamedTuple):
    """Whether the lease was still held, and the offers made."""

    released: bool
    offers: list[Offer]


class _Release(NamedTuple):
    lease: Lease
    return_to_lane: bool
    cooldown_ms: int
    signal: HealthSignal
    quarantine: Lease
    offering: OfferTerms


class _Renewed(NamedTuple):
    epoch: str
    offers: int
    answers: list[Renewal]


class _Running(NamedTuple):
    lease: Lease
    lane: str
    job: QueuedJob


class _Listed(NamedTuple):
    lease: Lease
    left_ms: int


class LeaseScripts(Protocol):
    """The scripts of this module."""

    def claim(self, fleet: str, *, offer: Offer, owner: str, lease_ms: int) -> Command[Offer | None]: ...
    def release(
        self, fleet: str, *, settings: RoutingSettings, releases: Sequence[_Release]
    ) -> Command[list[Released]]: ...
    def renew(
        self, fleet: str, *, owner: str, lease_ms: int, known_epoch: str, known_offers: int, leases: Sequence[Lease]
    ) -> Command[_Renewed]: ...
    def extend_offer(self, fleet: str, *, lease: Lease, offer_ms: int, resumes: bool) -> Command[ExtendResult]: ...
    def seize(
        self, fleet: str, *, lease: Lease, new_name: str, owner: str, lease_ms: int, only_expired: bool
    ) -> Command[str]: ...
    def restore_leases(self, fleet: str, *, lease_ms: int, leases: Sequence[_Running]) -> Command[int]: ...
    def list_leases(self, fleet: str, *, only_expired: bool, limit: int) -> Command[list[_Listed]]: ...
    def check_lease(self, fleet: str, *, lease: Lease, lease_ms: int) -> Command[LeaseCheck]: ...


class Leases:
    """The leases of all fleets.  Each method is one script, or one for each fleet; redis errors pass through."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings, capacity: CapacitySource = unlimited) -> None:
        self.scripts = scripts
        self._lua: LeaseScripts = scripts.bind(LeaseScripts)
        self._settings = settings
        self._capacity = capacity
        # fleet -> epoch of its queue, and number of offers made, as the last renewal returned them
        self._last_renewal: dict[str, tuple[str, int]] = {}

    def open_pipeline(self, loop: asyncio.AbstractEventLoop) -> Pipeline:
        """Return a pipeline in which one event loop sends the commands of leases."""
        return Pipeline(loop, self.scripts, self._settings.redis_timeout_s)

    # -- of the holder ---------------------------------------------------------------------------------------

    def claim_command(self, offer: Offer, owner: str) -> Command[Offer | None]:
        """Return the command that makes an open offer a lease of `owner`.

        Its result is None if the offer is gone, another's, or the owner's already.
        """
        return self._lua.claim(offer.fleet, offer=offer, owner=owner, lease_ms=self._settings.lease_ms)

    def check_command(self, lease: Lease) -> Command[LeaseCheck]:
        """Return the command that renews a lease if its job may use the slot now.

        Its result is "displaced" if another job holds the slot.
        """
        return self._lua.check_lease(lease.fleet, lease=lease, lease_ms=self._settings.lease_ms)

    def seen_epochs(self) -> dict[str, int]:
        """Return the epochs of the queues whose leases this process renews, as their Redis knows them."""
        return {fleet: int(epoch) for fleet, (epoch, _) in list(self._last_renewal.items()) if epoch}

    def renew(self, fleet: str, owner: str, leases: Sequence[Lease]) -> list[Renewal]:
        """Renew all of an owner's leases in a fleet, and return a result for each."""
        epoch, offers = self._last_renewal.get(fleet, ("", 0))
        found = self.scripts.run(
            self._lua.renew(
                fleet,
                owner=owner,
                lease_ms=self._settings.lease_ms,
                known_epoch=epoch,
                known_offers=offers,
                leases=leases,
            )
        )
        self._last_renewal[fleet] = found.epoch, found.offers
        return found.answers

    def release_command(
        self,
        lease: Lease,
        *,
        return_to_lane: bool,
        cooldown_ms: int = 0,
        claimant: str = "",
        limit: int = 8,
        signal: HealthSignal = "",
        quarantine: Lease | None = None,
    ) -> Command[list[Released]]:
        """Return the command that releases a lease and makes the next offers, the first for `claimant`.

        return_to_lane: the job returns to its place in its lane.  signal: what the run says of its server and model.
        quarantine: the lease under which the slot stays taken.  Reading the workers' capacity may call Redis.
        """
        terms = offer_terms(self._settings, self._capacity(), limit, claimant)
        one = _Release(lease, return_to_lane, cooldown_ms, signal, quarantine or _NO_LEASE, terms)
        return self._lua.release(lease.fleet, settings=self._settings, releases=[one])

    # -- of maintenance --------------------------------------------------------------------------------------

    def extend_offer(self, lease: Lease, *, resumes: bool) -> ExtendResult:
        """Give an open offer more time.

        resumes: its server may be running the job already, so the offer stays whatever is paused.  Returns "closed" if
        nothing may start there now; "lost" if the offer is not open.
        """
        return self.scripts.run(
            self._lua.extend_offer(lease.fleet, lease=lease, offer_ms=self._settings.offer_ms, resumes=resumes)
        )

    def list_expired(self, fleet: str, limit: int = 256) -> list[Lease]:
        """Return expired leases and offers, the longest expired first."""
        found = self.scripts.run(self._lua.list_leases(fleet, only_expired=True, limit=limit))
        return [listed.lease for listed in found]

    def list_all(self, fleets: Sequence[str]) -> dict[str, list[tuple[Lease, int]]]:
        """Return every lease of these fleets, and for how many ms it was not renewed (below 0: it lasts longer).

        In few round trips; a fleet that fails is left out.
        """
        holding = self.scripts.existing("leases", fleets)
        commands = {fleet: self._lua.list_leases(fleet, only_expired=False, limit=-1) for fleet in holding}
        found, failed = self.scripts.run_each(commands)
        log_failures("leases_not_read", failed)
        lease_ms = self._settings.lease_ms
        read = {
            fleet: [(listed.lease, lease_ms - listed.left_ms) for listed in leases] for fleet, leases in found.items()
        }
        return {fleet: read.get(fleet, []) for fleet in fleets if fleet not in failed}

    def have_lease(self, jobs: Mapping[str, Sequence[str]]) -> dict[str, list[bool]]:
        """Return for jobs of several fleets whether each has a lease, in one round trip."""
        return self.scripts.members("leases", jobs)

    def seize(self, lease: Lease, owner: str, ttl_ms: int, *, only_expired: bool) -> Lease | None:
        """Take a lease over under a new name, and return it; None: its holder has renewed or released it."""
        new_name = f"{new_lease_prefix()}-s"
        name = self.scripts.run(
            self._lua.seize(
                lease.fleet, lease=lease, new_name=new_name, owner=owner, lease_ms=ttl_ms, only_expired=only_expired
            )
        )
        return replace(lease, name=name, owner=owner) if name else None

    def restore(self, fleet: str, leases: Sequence[LeasedJob], ttl_ms: int | None = None) -> int:
        """Write leases again that Redis has lost, and return how many were missing.  `ttl_ms` None: as usual."""
        rows = [_Running(leased.lease, lanes.lane_name(leased.job), leased.job) for leased in leases]
        if not rows:
            return 0
        return self.scripts.run(
            self._lua.restore_leases(fleet, lease_ms=ttl_ms or self._settings.lease_ms, leases=rows)
        )

    def restore_offers(self, fleet: str, leases: Sequence[LeasedJob], epoch: int) -> int:
        """Write open offers again that Redis has lost, under new names, and return how many were missing.

        `epoch`: of the filling of the queue to which they belong.
        """
        prefix = new_lease_prefix()
        named = [
            replace(leased, lease=replace(leased.lease, name=make_lease_name(epoch, f"{prefix}-{n}"), owner=""))
            for n, leased in enumerate(leases)
        ]
        return self.restore(fleet, named, self._settings.offer_ms)
