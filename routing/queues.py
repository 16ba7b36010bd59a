"""The waiting room: lanes of queued jobs, and offers of the job whose turn it is."""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from jobs.record import Waiting
from routing.config import RoutingSettings
from routing.policies import order
from routing.scripts import Command, Scripts, say_failed
from routing.workers import Room, unbounded

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


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """What stands between a job and its start, as lua/wait_facts.lua says it."""

    now_ms: int
    place: str
    ahead: int
    run_ms: int
    obstacle: str
    held: int
    limit: int
    state: str
    breaker: str
    open_until_ms: int
    before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """A glance into a fleet's room.

    `oldest_open`: number of the oldest offer that nobody has taken up; None: there is none.
    `startable`: jobs wait, and slots are free, which need not suit each other.
    """

    fleet: str
    oldest_open: int | None
    startable: bool


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

    def __init__(self, scripts: Scripts, settings: RoutingSettings, room: Room = unbounded) -> None:
        self._scripts = scripts
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
            answer = self._enqueue(fleet, jobs[start : start + _CHUNK], limit - len(made), self._room())
            made += offers(fleet, answer[1])
        return made + self.offer_all(fleet) if len(made) >= limit > 0 else made

    def enter(self, fleet: str, job: Waiting) -> tuple[list[Offer], Position]:
        """`enqueue` of one job, and where it stands then, in one step."""
        _, rows, ahead, run_ms = self._enqueue(fleet, [job], _OFFERS, self._room(), place=True)
        made = offers(fleet, rows)
        if len(made) >= _OFFERS:
            made += self.offer_all(fleet)
        offered = ahead < 0 or any(offer.job_id == job.id for offer in made)
        return made, _OFFERED if offered else Position(ahead, run_ms or None)

    def _enqueue(self, fleet: str, jobs: Sequence[Waiting], limit: int, room: int, *, place: bool = False) -> Any:
        args: list[Any] = [new_prefix(), limit, room, self._settings.offer_ms, int(place)]
        for job in jobs:
            args += [order.lane(job), job.needs, job.seq, job.id, job.created_ms]
        answer = self._scripts.run("enqueue", fleet, args)
        self._away_until.clear()
        return answer

    def offer(self, fleet: str, limit: int = 64, taker: str = "") -> list[Offer]:
        """Offer what can be offered (SLOT-2), in one step: of very many, nobody else shall wait for all.

        `taker`: who gets the first offer at once; that is the oldest one which nobody has taken up, if there is one.
        """
        settings = self._settings
        args = [new_prefix(), limit, self._room(), settings.offer_ms, taker, settings.lease_ms]
        return offers(fleet, self._scripts.run("offer", fleet, args))

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
        return int(self._enqueue(fleet, jobs, 0, 0)[0])

    def withdraw(self, fleet: str, job: Waiting) -> str:
        """Take a job out: "withdrawn"; "freed": its open offer is gone, too; "asked": its holder is told; "absent"."""
        return self._scripts.run("withdraw", fleet, _place(job))[0].decode()

    def withdraw_all(self, fleet: str, jobs: Sequence[Waiting]) -> list[str]:
        """The same for many, in few round trips."""
        answers = self._scripts.run_all("withdraw", [(fleet, _place(job)) for job in jobs])
        for answer in answers:
            if isinstance(answer, RedisError):
                raise answer
        return [answer[0].decode() for answer in answers]

    def position(self, fleet: str, job: Waiting) -> Position | None:
        """Where it waits; None: not in the room, or Redis is away."""
        return None if self.away else _position(self._scripts.run("position", fleet, [*_place(job), 0]))

    def wait_facts(self, fleet: str, job: Waiting) -> WaitFacts:
        """What it waits for."""
        answer = self._scripts.run("wait_facts", fleet, _place(job))
        *facts, before = answer
        plain: list[Any] = [field.decode() if isinstance(field, bytes) else field for field in facts]
        return WaitFacts(*[*plain, tuple(job.decode() for job in before)])

    def depths(self, fleet: str) -> Depths:
        return _depths(self._scripts.run("depths", fleet))

    def depths_of(self, fleets: Sequence[str]) -> dict[str, Depths]:
        """The same of several fleets, in few round trips; a fleet that cannot be read is left out."""
        found, failed = self._scripts.run_each("depths", dict.fromkeys(fleets, ()))
        say_failed("room_not_read", failed)
        return {fleet: _depths(answer) for fleet, answer in found.items()}

    def backlog(self, fleet: str, model: str, tenant: str) -> Backlog:
        """What waits for a model, of one tenant and of all."""
        found: Backlog = self.ask([self.asking_backlog(fleet, model, tenant)])[0]
        return found

    # -- what gates ask, see routing/gates: commands, so that one round trip answers them all ---------------------

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """The answers, in few round trips."""
        return self._scripts.run_commands(commands)

    def asking_backlog(self, fleet: str, model: str, tenant: str) -> Command:
        """For a Backlog."""
        keys, args = self._scripts.keys.fleet(fleet), [order.account(tenant, model)]
        return Command("backlog", keys, args, lambda found: Backlog(found[0], found[1], found[2] or None, found[3]))

    def asking_variety(self, fleet: str, model: str, tenant: str, needs: Iterable[str]) -> Command:
        """How many different constraints would wait if jobs with these needs came in: of the tenant, of all."""
        classes = sorted({order.asked_class(model, one) for one in needs})
        return Command("variety", self._scripts.keys.fleet(fleet), [order.account(tenant, model), *classes])

    def asking_place(self, fleet: str, job: Waiting) -> Command:
        """For the Position that a job would have if it came in now."""
        return Command("position", self._scripts.keys.fleet(fleet), [*_place(job), 1], _position)

    def asking_rate(self, tenant: str, count: int, interval_ms: float, burst: int) -> Command:
        """To count a tenant's submits; the answer is in how many ms they would be admitted, 0: they are."""
        return Command("admit", [self._scripts.keys.rate(tenant)], [count, interval_ms, burst])

    def begin_all(self, fleets: Sequence[str], record: str) -> dict[str, bool]:
        """Make closed rooms ready to be filled from this record.  True: what stood in it had to be forgotten.

        A fleet whose room cannot be made ready is left out; so in `open_all`.
        """
        found, failed = self._scripts.run_each("begin", {fleet: [record] for fleet in fleets})
        say_failed("room_not_begun", failed)
        return {fleet: answer[0] == b"cleared" for fleet, answer in found.items()}

    def open_all(self, fleets: Sequence[str]) -> dict[str, bool]:
        """Declare the rooms complete.  False: it was open, or what was filled is not all there."""
        found, failed = self._scripts.run_each("open", {fleet: [new_prefix()] for fleet in fleets})
        say_failed("room_not_opened", failed)
        return {fleet: answer[0] == b"opened" for fleet, answer in found.items()}


def _depths(answer: Any) -> Depths:
    is_open, free, resting, taken, waiting = answer
    return Depths(bool(is_open), free, resting, taken, {model.decode(): count for model, count in waiting})


def _position(answer: Any) -> Position | None:
    place, *facts = answer
    if place == b"waiting":
        return Position(int(facts[0]), int(facts[1]) or None)
    return _OFFERED if place == b"offered" else None


def _place(job: Waiting) -> list[Any]:
    return [job.id, order.lane(job), job.created_ms]
