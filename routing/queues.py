"""The waiting room: lanes of queued jobs, and offers of the job whose turn it is."""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

import structlog
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from jobs.record import Waiting
from routing.config import RoutingSettings
from routing.policies import order
from routing.scripts import Command, Scripts, say_failed
from routing.workers import Room, unbounded

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


@dataclass(frozen=True, slots=True)
class Depths:
    """What stands in a fleet's room.  `open`: it is complete; False after Redis was emptied, started or failed over.

    `waiting`: jobs by model; models without any are left out.
    """

    open: bool
    free: int
    resting: int
    taken: int
    waiting: dict[str, int]


@dataclass(frozen=True, slots=True)
class Position:
    """`ahead`: jobs of its model that come before it.  `run_ms`: mean slot time of the model's runs; None: unknown.

    `offered`: it waits no more, a slot is held for it.
    """

    ahead: int
    run_ms: int | None
    offered: bool = False


_OFFERED = Position(0, None, offered=True)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Jobs that wait for a model: of one tenant, and of all.

    `run_ms`: mean slot time of its latest runs; None: unknown.  `free`: slots of its fleet that hold nothing.
    """

    own: int
    everyones: int
    run_ms: int | None
    free: int


class WaitFacts(NamedTuple):
    """What stands between a job and its start, as lua/wait_facts.lua says it."""

    place: Literal["waiting", "offered", "absent"]
    ahead: int
    run_ms: int | None
    obstacle: str
    held: int
    state: str
    breaker: Literal["closed", "open", "half_open", "probing"]
    open_until_ms: int
    before: list[str]

    @property
    def position(self) -> Position | None:
        """None: it is not in the room."""
        if self.place == "offered":
            return _OFFERED
        return Position(self.ahead, self.run_ms) if self.place == "waiting" else None


@dataclass(frozen=True, slots=True)
class Look:
    """A glance into a fleet's room.

    `oldest_open`: number of the oldest offer that nobody has taken up; None: there is none.
    `startable`: jobs wait, and slots are free, which need not suit each other.
    """

    fleet: str
    oldest_open: int | None
    startable: bool


class Offering(NamedTuple):
    """How offers are made, see lua/lib/offer.lua."""

    prefix: str
    limit: int
    room: int
    offer_ms: int
    taker: str
    lease_ms: int


class Entered(NamedTuple):
    """How many jobs were not in the room yet, the offers made, and what lua/enqueue.lua says of the last job."""

    added: int
    offers: list[Offer]
    ahead: int | None
    run_ms: int | None


class Variety(NamedTuple):
    """How many different constraints wait: of one tenant, of all."""

    own: int
    everyones: int


class _Entry(NamedTuple):
    lane: str
    job: Waiting


Withdrawn = Literal["withdrawn", "freed", "asked", "absent"]


class QueueScripts(Protocol):
    """What lua/ does with waiting jobs, and with rooms as a whole: a script each."""

    def enqueue(
        self, fleet: str, *, offering: Offering, place: bool, entries: Sequence[_Entry]
    ) -> Command[Entered]: ...
    def offer(self, fleet: str, *, offering: Offering) -> Command[list[Offer]]: ...
    def withdraw(self, fleet: str, *, job: Waiting, lane: str) -> Command[Withdrawn]: ...
    def wait_facts(self, fleet: str, *, job: Waiting, lane: str, as_last: bool) -> Command[WaitFacts]: ...
    def admit(self, key: str, *, count: int, interval_ms: float, burst: int) -> Command[int]: ...
    def depths(self, fleet: str) -> Command[Depths]: ...
    def backlog(self, fleet: str, *, account: str) -> Command[Backlog]: ...
    def variety(self, fleet: str, *, account: str, classes: Sequence[str]) -> Command[Variety]: ...
    def begin(self, fleet: str, *, record: str) -> Command[Literal["open", "ready", "cleared"]]: ...
    def open(self, fleet: str, *, epoch: str) -> Command[Literal["opened", "open", "lost"]]: ...


def offering(settings: RoutingSettings, room: int, limit: int, taker: str = "") -> Offering:
    """Of up to `limit` offers; the first for `taker`, if there is one."""
    return Offering(new_prefix(), limit, room, settings.offer_ms, taker, settings.lease_ms)


def new_prefix() -> str:
    """Text that makes the names of leases unique, also across an emptied Redis."""
    return secrets.token_hex(6)


class Queues:
    """Talks to the waiting rooms.  Every method is one atomic script; redis errors pass through."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings, room: Room = unbounded) -> None:
        self._scripts = scripts
        self._acts: QueueScripts = scripts.bound(QueueScripts)
        self._settings = settings
        self._room = room
        self._away_until: dict[str | None, float] = {}  # fleet, or None: Redis as a whole

    def room(self) -> int:
        """For how many runs living workers have room."""
        return self._room()

    @property
    def away(self) -> bool:
        """Whether Redis failed a moment ago: its time-out is paid once, not at every submit."""
        return self._is_away(None)

    def is_away(self, fleet: str) -> bool:
        """Whether this fleet's room, or all of Redis, failed a moment ago."""
        return self._is_away(None) or self._is_away(fleet)

    def note_away(self, fleet: str | None = None, error: RedisError | None = None) -> None:
        """Redis does not answer; or, as `error` says, only this fleet's room is at fault."""
        alone = error is not None and not isinstance(error, ConnectionError | TimeoutError)
        self._away_until[fleet if alone else None] = time.monotonic() + _AWAY_S

    def _is_away(self, whose: str | None) -> bool:
        return time.monotonic() < self._away_until.get(whose, 0.0)

    def enqueue(self, fleet: str, jobs: Sequence[Waiting], limit: int = _OFFERS) -> list[Offer]:
        """Put queued jobs in their lanes and offer up to `limit`.  A job that is there already stays as it is."""
        made: list[Offer] = []
        for start in range(0, max(len(jobs), 1), _CHUNK):
            made += self._enter(self.entering(fleet, jobs[start : start + _CHUNK], limit - len(made))).offers
        return made + self.offer_all(fleet) if len(made) >= limit > 0 else made

    def enter(self, fleet: str, job: Waiting) -> tuple[list[Offer], Position]:
        """`enqueue` of one job, and where it stands then, in one step."""
        _, made, ahead, run_ms = self._enter(self.entering(fleet, [job], place=True))
        if len(made) >= _OFFERS:
            made += self.offer_all(fleet)
        offered = ahead is None or any(offer.job_id == job.id for offer in made)
        return made, _OFFERED if offered or ahead is None else Position(ahead, run_ms)

    def entering(
        self, fleet: str, jobs: Sequence[Waiting], limit: int = _OFFERS, *, place: bool = False
    ) -> Command[Entered]:
        """The command of `enqueue` and the like.  `place`: it says where the last job stands then."""
        room = self._room() if limit else 0
        entries = [_Entry(order.lane(job), job) for job in jobs]
        return self._acts.enqueue(fleet, offering=offering(self._settings, room, limit), place=place, entries=entries)

    def _enter(self, command: Command[Entered]) -> Entered:
        answer = self._scripts.run(command)
        self._away_until.clear()
        return answer

    def offer(self, fleet: str, limit: int = 64, taker: str = "") -> list[Offer]:
        """Offer what can be offered (SLOT-2), in one step: of very many, nobody else shall wait for all.

        `taker`: who gets the first offer at once; that is the oldest one which nobody has taken up, if there is one.
        """
        return self._scripts.run(self.offering(fleet, limit, taker))

    def offering(self, fleet: str, limit: int = 64, taker: str = "") -> Command[list[Offer]]:
        """The command of `offer`."""
        return self._acts.offer(fleet, offering=offering(self._settings, self._room(), limit, taker))

    def offer_all(self, fleet: str, limit: int = 64) -> list[Offer]:
        """Offer all that can be offered, `limit` in one step."""
        made: list[Offer] = []
        while True:
            more = self.offer(fleet, limit)
            made += more
            if len(more) < limit:
                return made

    def looks(self, fleets: Sequence[str]) -> list[Look]:
        """What a worker may find in each fleet's room: one round trip, however many they are."""
        pipeline = self._scripts.redis.pipeline(transaction=False)
        for fleet in fleets:
            keys = self._scripts.keys
            pipeline.zrange(keys.open_offers(fleet), 0, 0, withscores=True)
            pipeline.exists(keys.of(fleet, "classes"))
            pipeline.zcard(keys.of(fleet, "free"))
        found = pipeline.execute()
        return [
            Look(fleet, int(oldest[0][1]) if oldest else None, bool(waiting and free))
            for fleet, oldest, waiting, free in zip(fleets, found[::3], found[1::3], found[2::3], strict=True)
        ]

    def fill(self, fleet: str, jobs: Sequence[Waiting]) -> int:
        """Put queued jobs in their lanes and offer none; answers how many were missing."""
        return self._enter(self.entering(fleet, jobs, 0)).added

    def withdraw(self, fleet: str, job: Waiting) -> Withdrawn:
        """Take a job out: "withdrawn"; "freed": its open offer is gone, too; "asked": its holder is told; "absent"."""
        return self.withdraw_all(fleet, [job])[0]

    def withdraw_all(self, fleet: str, jobs: Sequence[Waiting]) -> list[Withdrawn]:
        """The same for many, in few round trips."""
        return self._scripts.run_all([self._acts.withdraw(fleet, job=job, lane=order.lane(job)) for job in jobs])

    def position(self, fleet: str, job: Waiting) -> Position | None:
        """Where it waits; None: not in the room, or Redis is away."""
        return None if self.away else self.wait_facts(fleet, job).position

    def wait_facts(self, fleet: str, job: Waiting) -> WaitFacts:
        """What it waits for."""
        return self._scripts.run(self.asking_place(fleet, job, as_last=False))

    def depths(self, fleet: str) -> Depths:
        return self._scripts.run(self._acts.depths(fleet))

    def depths_of(self, fleets: Sequence[str]) -> dict[str, Depths]:
        """The same of several fleets, in few round trips; a fleet that cannot be read is left out."""
        found, failed = self._scripts.run_each({fleet: self._acts.depths(fleet) for fleet in fleets})
        say_failed("room_not_read", failed)
        return found

    def backlog(self, fleet: str, model: str, tenant: str) -> Backlog:
        """What waits for a model, of one tenant and of all."""
        return self._scripts.run(self.asking_backlog(fleet, model, tenant))

    # -- what gates ask, see routing/gates: commands, so that one round trip answers them all ---------------------

    def ask(self, commands: Sequence[Command[T]]) -> list[T]:
        """The answers, in few round trips."""
        return self._scripts.run_all(commands)

    def asking_backlog(self, fleet: str, model: str, tenant: str) -> Command[Backlog]:
        """The command of `backlog`."""
        return self._acts.backlog(fleet, account=order.account(tenant, model))

    def asking_variety(self, fleet: str, model: str, tenant: str, needs: Iterable[str]) -> Command[Variety]:
        """How many different constraints would wait if jobs with these needs came in."""
        classes = sorted({order.asked_class(model, one) for one in needs})
        return self._acts.variety(fleet, account=order.account(tenant, model), classes=classes)

    def asking_place(self, fleet: str, job: Waiting, *, as_last: bool = True) -> Command[WaitFacts]:
        """What a job waits for, or, `as_last`, would wait for if it came in now."""
        return self._acts.wait_facts(fleet, job=job, lane=order.lane(job), as_last=as_last)

    def asking_rate(self, tenant: str, count: int, interval_ms: float, burst: int) -> Command[int]:
        """To count a tenant's submits; the answer is in how many ms they would be admitted, 0: they are."""
        rate = self._scripts.keys.rate(tenant)
        return self._acts.admit(rate, count=count, interval_ms=interval_ms, burst=burst)

    def begin_all(self, fleets: Sequence[str], record: str) -> dict[str, bool]:
        """Make closed rooms ready to be filled from this record.  True: what stood in it had to be forgotten.

        A fleet whose room cannot be made ready is left out; so in `open_all`.
        """
        found, failed = self._scripts.run_each({fleet: self._acts.begin(fleet, record=record) for fleet in fleets})
        say_failed("room_not_begun", failed)
        return {fleet: answer == "cleared" for fleet, answer in found.items()}

    def open_all(self, fleets: Sequence[str]) -> dict[str, bool]:
        """Declare the rooms complete.  False: it was open, or what was filled is not all there."""
        found, failed = self._scripts.run_each({fleet: self._acts.open(fleet, epoch=new_prefix()) for fleet in fleets})
        say_failed("room_not_opened", failed)
        return {fleet: answer == "opened" for fleet, answer in found.items()}
