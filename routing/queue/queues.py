"""The waiting room: lanes of queued jobs, and offers of the job whose turn it is."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

import structlog
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from routing.config import RoutingSettings
from routing.queue import lanes
from routing.queue.worker_capacity import CapacitySource, unlimited
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.redis.scripts import Command, Scripts, log_failures

T = TypeVar("T")

log = structlog.get_logger(__name__)

_CHUNK = 1000
_OFFERS = 8  # made with jobs that come in; more in steps of their own
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

    @property
    def is_resumption(self) -> bool:
        """Whether it was made again for a run that its server may still be at: the job may start in no other slot."""
        return self.number == 0


@dataclass(frozen=True, slots=True)
class QueuePeek:
    """A glance into a fleet's room.

    `oldest_open`: number of the oldest offer that nobody has taken up; None: there is none.
    `startable`: jobs wait, and slots are free, which need not suit each other.
    """

    fleet: str
    oldest_open_offer: int | None
    may_start: bool


class OfferTerms(NamedTuple):
    """How offers are made, see lua/lib/offer.lua."""

    prefix: str
    limit: int
    room: int
    offer_ms: int
    claimant: str
    lease_ms: int


class Enqueued(NamedTuple):
    """How many jobs were not in the room yet, and the offers made."""

    added: int
    offers: list[Offer]


class QueueEntry(NamedTuple):
    """A job that comes in, and its lane."""

    lane: str
    job: QueuedJob


WithdrawResult = Literal["withdrawn", "freed", "asked", "absent"]


class QueueScripts(Protocol):
    """What lua/ does with waiting jobs, and with rooms as a whole: a script each."""

    def enqueue(self, fleet: str, *, offering: OfferTerms, entries: Sequence[QueueEntry]) -> Command[Enqueued]: ...
    def offer(self, fleet: str, *, offering: OfferTerms) -> Command[list[Offer]]: ...
    def withdraw(self, fleet: str, *, job: QueuedJob, lane: str) -> Command[WithdrawResult]: ...
    def begin(self, fleet: str, *, record: str) -> Command[Literal["open", "ready", "cleared"]]: ...
    def open(self, fleet: str, *, epoch: str) -> Command[Literal["opened", "open", "lost"]]: ...


def offering(settings: RoutingSettings, room: int, limit: int, claimant: str = "") -> OfferTerms:
    """Of up to `limit` offers; the first for `claimant`, if there is one."""
    return OfferTerms(new_lease_prefix(), limit, room, settings.offer_ms, claimant, settings.lease_ms)


def new_lease_prefix() -> str:
    """Text that makes the names of leases unique, also across an emptied Redis."""
    return secrets.token_hex(6)


class Queues:
    """Talks to the waiting rooms.  Every method is one atomic script; redis errors pass through."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings, room: CapacitySource = unlimited) -> None:
        self.scripts = scripts
        self._lua: QueueScripts = scripts.bind(QueueScripts)
        self._settings = settings
        self._room = room
        self._unavailable_until: dict[str | None, float] = {}  # fleet, or None: Redis as a whole

    def worker_capacity(self) -> int:
        """For how many runs living workers have room."""
        return self._room()

    @property
    def away(self) -> bool:
        """Whether Redis failed a moment ago: its time-out is paid once, not at every submit."""
        return self._is_unavailable(None)

    def is_unavailable(self, fleet: str) -> bool:
        """Whether this fleet's room, or all of Redis, failed a moment ago."""
        return self._is_unavailable(None) or self._is_unavailable(fleet)

    def mark_unavailable(self, fleet: str | None = None, error: RedisError | None = None) -> None:
        """Redis does not answer; or, as `error` says, only this fleet's room is at fault."""
        alone = error is not None and not isinstance(error, ConnectionError | TimeoutError)
        self._unavailable_until[fleet if alone else None] = time.monotonic() + _AWAY_S

    def call_if_available(self, ask: Callable[[], T]) -> T:
        """Return what `ask` returns.  Raises RedisError, also at once where Redis did not answer a moment ago."""
        if self.away:
            raise ConnectionError("Redis did not answer a moment ago")
        try:
            return ask()
        except (ConnectionError, TimeoutError):
            self.mark_unavailable()
            raise

    def _is_unavailable(self, whose: str | None) -> bool:
        return time.monotonic() < self._unavailable_until.get(whose, 0.0)

    def enqueue(self, fleet: str, jobs: Sequence[QueuedJob], limit: int = _OFFERS) -> list[Offer]:
        """Put queued jobs in their lanes and offer up to `limit`.  A job that is there already stays as it is."""
        made: list[Offer] = []
        for start in range(0, max(len(jobs), 1), _CHUNK):
            entering = self.enqueue_command(fleet, jobs[start : start + _CHUNK], limit - len(made))
            made += self.taken_in(self.scripts.run(entering)).offers
        return self.with_the_rest(fleet, made, limit)

    def with_the_rest(self, fleet: str, made: list[Offer], limit: int = _OFFERS) -> list[Offer]:
        """Offers that were made with jobs which came in, and, if those were as many as may be, all that can follow."""
        return made + self.offer_all(fleet) if len(made) >= limit > 0 else made

    def enqueue_command(self, fleet: str, jobs: Sequence[QueuedJob], limit: int = _OFFERS) -> Command[Enqueued]:
        """The command of `enqueue` and the like."""
        entries = [QueueEntry(lanes.lane_name(job), job) for job in jobs]
        return self._lua.enqueue(fleet, offering=self.usual_offering(limit), entries=entries)

    def usual_offering(self, limit: int = _OFFERS) -> OfferTerms:
        """How offers are made with jobs that come in."""
        return offering(self._settings, self._room() if limit else 0, limit)

    def taken_in(self, answer: T) -> T:
        """What Redis says to jobs that came in: it is there again, if it was away."""
        self._unavailable_until.clear()
        return answer

    def offer(self, fleet: str, limit: int = 64, claimant: str = "") -> list[Offer]:
        """Offer what can be offered (SLOT-2), in one step: of very many, nobody else shall wait for all.

        `claimant`: who gets the first offer at once; that is the oldest one which nobody has taken up, if there is one.
        """
        return self.scripts.run(self.offer_command(fleet, limit, claimant))

    def offer_command(self, fleet: str, limit: int = 64, claimant: str = "") -> Command[list[Offer]]:
        """The command of `offer`."""
        return self._lua.offer(fleet, offering=offering(self._settings, self._room(), limit, claimant))

    def offer_all(self, fleet: str, limit: int = 64) -> list[Offer]:
        """Offer all that can be offered, `limit` in one step."""
        made: list[Offer] = []
        while True:
            more = self.offer(fleet, limit)
            made += more
            if len(more) < limit:
                return made

    def peek_all(self, fleets: Sequence[str]) -> list[QueuePeek]:
        """What a worker may find in each fleet's room: one round trip, however many they are."""
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

    def fill(self, fleet: str, jobs: Sequence[QueuedJob]) -> int:
        """Put queued jobs in their lanes and offer none; answers how many were missing."""
        return self.taken_in(self.scripts.run(self.enqueue_command(fleet, jobs, 0))).added

    def withdraw(self, fleet: str, job: QueuedJob) -> WithdrawResult:
        """Take a job out: "withdrawn"; "freed": its open offer is gone, too; "asked": its holder is told; "absent"."""
        return self.withdraw_all(fleet, [job])[0]

    def withdraw_all(self, fleet: str, jobs: Sequence[QueuedJob]) -> list[WithdrawResult]:
        """The same for many, in few round trips."""
        return self.scripts.run_all([self._lua.withdraw(fleet, job=job, lane=lanes.lane_name(job)) for job in jobs])

    def run_all(self, commands: Sequence[Command[T]]) -> list[T]:
        """The answers, in few round trips."""
        return self.scripts.run_all(commands)

    def begin_rebuild(self, fleets: Sequence[str], record: str) -> dict[str, bool]:
        """Make closed rooms ready to be filled from this record.  True: what stood in it had to be forgotten.

        A fleet whose room cannot be made ready is left out; so in `open_all`.
        """
        found, failed = self.scripts.run_each({fleet: self._lua.begin(fleet, record=record) for fleet in fleets})
        log_failures("room_not_begun", failed)
        return {fleet: answer == "cleared" for fleet, answer in found.items()}

    def open_all(self, fleets: Sequence[str]) -> dict[str, bool]:
        """Declare the rooms complete.  False: it was open, or what was filled is not all there."""
        found, failed = self.scripts.run_each(
            {fleet: self._lua.open(fleet, epoch=new_lease_prefix()) for fleet in fleets}
        )
        log_failures("room_not_opened", failed)
        return {fleet: answer == "opened" for fleet, answer in found.items()}
