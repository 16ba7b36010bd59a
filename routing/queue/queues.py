"""Put jobs into a fleet's queue, offer them, withdraw them, and read where one stands."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

from redis.exceptions import ConnectionError, RedisError, TimeoutError

from routing.config import RoutingSettings
from routing.queue import lanes
from routing.queue.presence import Presence
from routing.queue.worker_capacity import CapacitySource, unlimited
from slotkeeper.db.time_limits import time_left
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.redis.scripts import Command, Scripts
from slotkeeper.registry.snapshot import CatalogSnapshot

K = TypeVar("K")
T = TypeVar("T")

_OFFERS_AT_ONCE = 8  # made with jobs that enter the queue
_JOBS_AT_ONCE = 500  # in one call, so that Redis serves others in between
_PAUSE_S = 1.0  # between calls to a Redis that does not answer
_PRESENT_S = 1.0  # How long it is remembered which nodes are connected.


@dataclass(frozen=True, slots=True)
class Offer:
    """A job and a slot, taken together.  `owner` "": open, for the worker that claims it first.

    `changes_model`: the server has to load the job's model, or it is not known which one it has loaded.
    """

    fleet: str
    job_id: str
    lease: str
    slot: str
    server: str
    model: str
    number: int
    owner: str = ""
    changes_model: bool = True

    @property
    def is_resumption(self) -> bool:
        """Whether its server may already be running the job, so that no other slot will do."""
        return self.number == 0


@dataclass(frozen=True, slots=True)
class QueuePeek:
    """What a worker may find in a fleet's queue.

    `oldest_open_offer`: number of the oldest offer that no worker has claimed; None: there is none.
    `may_start`: jobs wait, and slots are free, which need not suit each other.
    """

    fleet: str
    oldest_open_offer: int | None
    may_start: bool


class OfferTerms(NamedTuple):
    """How offers are made, see lua/lib/offers.lua."""

    prefix: str
    limit: int
    capacity: int
    offer_ms: int
    claimant: str
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where a queued job stands.  `ahead`: jobs of its model that come before it.  `offered`: it has a slot.

    `run_ms`: mean slot time of the model's latest runs; None: unknown.
    """

    ahead: int
    run_ms: int | None
    offered: bool = False

    def estimated_wait_ms(self, slots: int) -> int | None:
        """Return (jobs ahead + 1) × mean slot time / slots; None: no run was measured, or there is no slot."""
        if self.run_ms is None or slots <= 0:
            return None
        return round((self.ahead + 1) * self.run_ms / slots)


OFFERED = Position(0, None, offered=True)


class Enqueued(NamedTuple):
    """How many jobs were not in the queue yet, the offers made, and where the first job stands, if asked for."""

    added: int
    offers: list[Offer]
    ahead: int | None
    run_ms: int | None


class QueueEntry(NamedTuple):
    """A job that enters the queue, and its lane."""

    lane: str
    job: QueuedJob


class JobStatus(NamedTuple):
    """Where a job stands, see lua/job_status.lua."""

    location: Literal["waiting", "offered", "absent"]
    ahead: int
    run_ms: int | None
    blocked_by: str
    held: int
    jobs_before: list[str]

    @property
    def position(self) -> Position | None:
        """The job's position; None: it is not in the queue."""
        if self.location == "offered":
            return OFFERED
        return Position(self.ahead, self.run_ms) if self.location == "waiting" else None


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What waits for a model, and what its jobs wait for, see lua/model_status.lua.

    `own`, `all_tenants`: jobs that wait.  `run_ms`: mean slot time of its latest runs; None: unknown.  `free`: if
    none waits, free slots that can run its jobs, up to the number that was asked for.
    """

    own: int
    all_tenants: int
    run_ms: int | None
    free: int
    state: str
    breaker: Literal["closed", "open", "half_open", "probing"]
    open_until_ms: int
    open_why: str


WithdrawResult = Literal["withdrawn", "freed", "asked", "absent"]


class QueueScripts(Protocol):
    """The scripts of this module."""

    def enqueue(
        self, fleet: str, *, offering: OfferTerms, with_position: bool, entries: Sequence[QueueEntry]
    ) -> Command[Enqueued]: ...
    def offer(self, fleet: str, *, offering: OfferTerms) -> Command[list[Offer]]: ...
    def withdraw(self, fleet: str, *, job: QueuedJob, lane: str) -> Command[WithdrawResult]: ...
    def job_status(self, fleet: str, *, job: QueuedJob, lane: str, as_last: bool) -> Command[JobStatus]: ...
    def model_status(self, fleet: str, *, account: str, max_free: int) -> Command[ModelStatus]: ...


def offer_terms(settings: RoutingSettings, capacity: int, limit: int, claimant: str = "") -> OfferTerms:
    """Return the terms of up to `limit` offers, the first for `claimant`, if one is named."""
    return OfferTerms(new_lease_prefix(), limit, capacity, settings.offer_ms, claimant, settings.lease_ms)


def new_lease_prefix() -> str:
    """Return random text that makes names of leases unique, also after Redis was emptied."""
    return secrets.token_hex(6)


class PresentSlots:
    """On how many slots models can run now: those of a node count only while it is connected and takes jobs.

    Which nodes of a fleet are connected is read once a second at most.  Thread-safe.
    """

    def __init__(self, scripts: Scripts) -> None:
        self._presence = Presence(scripts)
        self._kept: dict[str, tuple[float, frozenset[str]]] = {}  # fleet -> until when (monotonic s), its nodes

    def count(self, catalog: CatalogSnapshot, model: str) -> int:
        """Count the slots on which this model can run now.  All nodes count while Redis has not answered yet."""
        serving = catalog.servers_for(model)
        present = self._present(serving[0].fleet) if any(server.node for server in serving) else None
        return sum(
            server.slots for server in serving if server.node is None or present is None or server.name in present
        )

    def _present(self, fleet: str) -> frozenset[str] | None:
        until_s, present = self._kept.get(fleet, (0.0, None))
        if time.monotonic() >= until_s:
            try:
                found = self._presence.list_present([fleet]).get(fleet)
            except RedisError:
                found = None
            if found is not None:
                present = frozenset(found)
                self._kept[fleet] = time.monotonic() + _PRESENT_S, present
        return present


class Queues:
    """The queues of all fleets.  Each method is one script, or one for each fleet or part; redis errors pass through.

    `capacity`: returns how many more runs living workers accept.
    """

    def __init__(self, scripts: Scripts, settings: RoutingSettings, capacity: CapacitySource = unlimited) -> None:
        self.scripts = scripts
        self._lua: QueueScripts = scripts.bind(QueueScripts)
        self._settings = settings
        self._capacity = capacity
        self._present_slots = PresentSlots(scripts)
        self._unavailable_until: dict[str | None, float] = {}  # fleet, or None: Redis as a whole

    def count_slots(self, catalog: CatalogSnapshot, model: str) -> int:
        """Count the slots on which this model can run now, of servers that take jobs."""
        return self._present_slots.count(catalog, model)

    def worker_capacity(self) -> int:
        """Return how many more runs living workers accept."""
        return self._capacity()

    # -- a Redis that does not answer ------------------------------------------------------------------------

    def is_unavailable(self, fleet: str | None = None) -> bool:
        """Return whether Redis, or this fleet's queue, failed a moment ago: its timeout is paid once, not per call.

        Also if the request of this thread has too little time left to wait for Redis.
        """
        if time_left() < self._settings.redis_timeout_s:
            return True
        until = self._unavailable_until
        return time.monotonic() < max(until.get(None, 0.0), until.get(fleet, 0.0))

    def mark_unavailable(self, fleet: str | None = None, error: RedisError | None = None) -> None:
        """Note that Redis does not answer, or, if `error` is of another kind, that this fleet's queue fails."""
        concerns_fleet = error is not None and not isinstance(error, ConnectionError | TimeoutError)
        self._unavailable_until[fleet if concerns_fleet else None] = time.monotonic() + _PAUSE_S

    def call_if_available(self, ask: Callable[[], T]) -> T:
        """Return what `ask` returns.  Raises RedisError, also at once if Redis did not answer a moment ago."""
        if self.is_unavailable():
            raise ConnectionError("Redis did not answer a moment ago")
        try:
            return ask()
        except (ConnectionError, TimeoutError):
            self.mark_unavailable()
            raise

    # -- jobs that enter and leave ---------------------------------------------------------------------------

    def enqueue(self, fleet: str, jobs: Sequence[QueuedJob], limit: int = _OFFERS_AT_ONCE) -> list[Offer]:
        """Put queued jobs into their lanes, and return the offers made.  A job that waits already stays as it is.

        `limit`: how many offers one call makes; if it made as many, all others follow.
        """
        offers: list[Offer] = []
        for start in range(0, max(len(jobs), 1), _JOBS_AT_ONCE):
            command = self.enqueue_command(fleet, jobs[start : start + _JOBS_AT_ONCE], limit - len(offers))
            offers += self._run_enqueue(command).offers
        return self._offer_rest(fleet, offers, limit)

    def enqueue_new(self, fleet: str, job: QueuedJob) -> tuple[list[Offer], Position]:
        """Put one new job into its lane, and return the offers made and the job's position."""
        found = self._run_enqueue(self.enqueue_command(fleet, [job], with_position=True))
        offers = self._offer_rest(fleet, found.offers, _OFFERS_AT_ONCE)
        if found.ahead is None or any(offer.job_id == job.id for offer in offers):
            return offers, OFFERED
        return offers, Position(found.ahead, found.run_ms)

    def fill(self, fleet: str, jobs: Sequence[QueuedJob]) -> int:
        """Put queued jobs into their lanes, offer none, and return how many were missing."""
        return self._run_enqueue(self.enqueue_command(fleet, jobs, 0)).added

    def enqueue_command(
        self, fleet: str, jobs: Sequence[QueuedJob], limit: int = _OFFERS_AT_ONCE, *, with_position: bool = False
    ) -> Command[Enqueued]:
        """Return the command that puts jobs into their lanes and makes up to `limit` offers."""
        entries = [QueueEntry(lanes.lane_name(job), job) for job in jobs]
        terms = offer_terms(self._settings, self._capacity() if limit else 0, limit)
        return self._lua.enqueue(fleet, offering=terms, with_position=with_position, entries=entries)

    def withdraw(self, fleet: str, jobs: Sequence[QueuedJob]) -> list[WithdrawResult]:
        """Take jobs out of the queue, in few round trips.

        Returns for each "withdrawn"; "freed": its open offer is gone, too; "asked": the next
        renewal of its lease returns CANCEL; "absent".
        """
        return self.scripts.run_all([self._lua.withdraw(fleet, job=job, lane=lanes.lane_name(job)) for job in jobs])

    def _run_enqueue(self, command: Command[Enqueued]) -> Enqueued:
        found = self.scripts.run(command)
        self._unavailable_until.clear()
        return found

    def _offer_rest(self, fleet: str, offers: list[Offer], limit: int) -> list[Offer]:
        return offers + self.offer_all(fleet) if len(offers) >= limit > 0 else offers

    # -- offers ----------------------------------------------------------------------------------------------

    def offer(self, fleet: str, limit: int = 64, claimant: str = "") -> list[Offer]:
        """Offer up to `limit` jobs (SLOT-2).  For very many, call it again, so that Redis serves others in between.

        `claimant`: owns one offer at once: the oldest open one, or else the first that is made.
        """
        return self.scripts.run(self.offer_command(fleet, limit, claimant))

    def offer_command(self, fleet: str, limit: int = 64, claimant: str = "") -> Command[list[Offer]]:
        """Return the command of `offer`."""
        return self._lua.offer(fleet, offering=offer_terms(self._settings, self._capacity(), limit, claimant))

    def offer_all(self, fleet: str, limit: int = 64) -> list[Offer]:
        """Offer every job that can start, `limit` in one call."""
        offers: list[Offer] = []
        while True:
            more = self.offer(fleet, limit)
            offers += more
            if len(more) < limit:
                return offers

    # -- questions -------------------------------------------------------------------------------------------

    def peek_all(self, fleets: Sequence[str]) -> list[QueuePeek]:
        """Return what a worker may find in each fleet's queue, in one round trip."""
        pipeline = self.scripts.redis.pipeline(transaction=False)
        for fleet in fleets:
            keys = self.scripts.keys
            pipeline.zrange(keys.open_offers(fleet), 0, 0, withscores=True)
            pipeline.exists(keys.fleet_key(fleet, "classes"))
            pipeline.zcard(keys.fleet_key(fleet, "free"))
        found = pipeline.execute()
        return [
            QueuePeek(fleet, int(oldest[0][1]) if oldest else None, bool(waiting and free))
            for fleet, oldest, waiting, free in zip(fleets, found[::3], found[1::3], found[2::3], strict=True)
        ]

    def job_status(self, fleet: str, job: QueuedJob) -> JobStatus:
        """Return where a job stands."""
        return self.scripts.run(self.job_status_command(fleet, job))

    def job_status_command(self, fleet: str, job: QueuedJob, *, as_last: bool = False) -> Command[JobStatus]:
        """Return the command for where a job stands, or, `as_last`, would stand if it entered now."""
        return self._lua.job_status(fleet, job=job, lane=lanes.lane_name(job), as_last=as_last)

    def model_status_command(
        self, fleet: str, model: str, tenant: str = "", *, max_free: int = 0
    ) -> Command[ModelStatus]:
        """Return the command for what waits for a model.

        `tenant`: whose jobs are counted apart.  `max_free`: count the model's free slots up to this number.
        """
        return self._lua.model_status(fleet, account=lanes.account_name(tenant, model), max_free=max_free)

    def run_all(self, commands: Sequence[Command[T]]) -> list[T]:
        """Run commands in few round trips, and return their results."""
        return self.scripts.run_all(commands)

    def run_each(self, commands: Mapping[K, Command[T]]) -> tuple[dict[K, T], dict[K, RedisError]]:
        """Run commands in few round trips, and return their results, and the errors of those that failed."""
        return self.scripts.run_each(commands)
