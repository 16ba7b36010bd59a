"""Show models side by side: waiting and running jobs, throughput, slot use of the last hour, breakers.

A minute that is over does not change.  So each process reads a minute from the database once and keeps the sums; the
present minute is read again, once a second at most.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from redis.exceptions import RedisError
from sqlalchemy import bindparam, case, func, select

from routing.dispatch.dispatcher import Dispatcher
from slotkeeper.db import Database
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.jobs.statements import select_queued
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs
from slotkeeper.jobs.values import Job
from slotkeeper.registry.snapshot import Model
from slotkeeper.registry.values import Server

MINUTES = 60
MINUTE_MS = 60_000
_THROUGHPUT_MINUTES = 5
_BUDGET_S = 0.25  # for reading minutes, in one call
_PRESENT_READ_EVERY_S = 1.0
_STARTED = jobs.c.started_ms - jobs.c.started_ms % MINUTE_MS
_FAILED = case((jobs.c.state == State.FAILED.value, 1), (jobs.c.state == State.DEAD.value, 1), else_=0)
_ENDED = (
    select(
        jobs.c.model,
        _STARTED.label("started"),
        func.count().label("jobs"),
        func.sum(_FAILED).label("failed"),
        func.sum(jobs.c.started_ms).label("starts"),
        func.sum(jobs.c.finished_ms).label("ends"),
    )
    .where(jobs.c.finished_ms >= bindparam("p_from"), jobs.c.finished_ms < bindparam("p_to"))
    .group_by(jobs.c.model, _STARTED)
)
_DELAYED = (
    select(
        jobs.c.model,
        func.sum(case((jobs.c.failures > 0, 1), else_=0)).label("to_retry"),
        func.sum(case((jobs.c.failures > 0, 0), else_=1)).label("for_later"),
    )
    .where(jobs.c.state == State.DELAYED.value)
    .group_by(jobs.c.model)
)


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot of a server.  `job`: the job that runs there.  `quarantined`: why the slot is quarantined, if it is."""

    name: str
    job: Job | None
    quarantined: QuarantinedSlot | None


class Breaker(NamedTuple):
    """The breaker of a model.  `state`: closed, open, half_open, probing; "": unknown.

    `open_until_ms`, `open_why`: as for servers, see routing/queries/server_status.py: ServerStatus.
    """

    state: str = ""
    open_until_ms: int = 0
    open_why: str = ""


@dataclass(frozen=True, slots=True)
class ModelOverview:
    """A model at one moment.

    `oldest_ms`: when the first of its queued jobs was accepted; None: none is queued.
    `breaker`, `breaker_until_ms`, `breaker_why`: the fields of Breaker.
    `use`: share of its slots that was in use, for each minute of the last hour.  `ended`: jobs that ended, by minute.
    `per_minute`: the mean of the last five minutes.  `failed`: jobs that failed or died within the last hour.
    `to_retry`: jobs that have failed and wait for their next try.  `for_later`: jobs that wait for their time.
    """

    running: int
    oldest_ms: int | None
    breaker: str
    breaker_until_ms: int
    breaker_why: str
    use: Sequence[float]
    ended: Sequence[int]
    per_minute: float
    failed: int
    to_retry: int
    for_later: int


@dataclass(slots=True)
class MinuteUsage:
    """A minute of a model.  `busy_ms`: slot time of the last runs of jobs that have ended."""

    ended: int = 0
    failed: int = 0
    busy_ms: int = 0

    def __add__(self, other: "MinuteUsage") -> "MinuteUsage":
        return MinuteUsage(self.ended + other.ended, self.failed + other.failed, self.busy_ms + other.busy_ms)


@dataclass(frozen=True, slots=True)
class _EndedJobs:
    """Jobs of a model that ended in one minute and whose last run started in one other minute, or in the same.

    `started_ms`: the beginning of the latter; None: they never ran.  `starts_ms`, `ends_ms`: sums of their times.
    """

    model: str
    started_ms: int | None
    jobs: int
    failed: int
    starts_ms: int
    ends_ms: int


class LastHourUsage:
    """The last hour of all models, minute by minute.  Safe between threads; only one of them reads at a time."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._read: set[int] = set()  # beginnings of the minutes that were read
        self._minutes: dict[str, dict[int, MinuteUsage]] = defaultdict(dict)  # model -> beginning -> sums
        self._present_begins = 0  # of the minute to which `_present` belongs
        self._present: dict[str, dict[int, MinuteUsage]] = {}  # by the jobs that have ended in it; as `_minutes`
        self._present_read_s = -math.inf  # by `clock`

    def of(self, model: str, now_ms: int) -> list[MinuteUsage]:
        """Return the last sixty minutes that are over, the oldest first, and the present one, as far as it is over."""
        over, present = self._minutes.get(model, {}), self._present.get(model, {})
        begins = [*_last_minutes(now_ms), now_ms - now_ms % MINUTE_MS]
        return [over.get(begin, MinuteUsage()) + present.get(begin, MinuteUsage()) for begin in begins]

    def is_complete(self, now_ms: int) -> bool:
        return self._read.issuperset(_last_minutes(now_ms))

    def read_missing(self, now_ms: int) -> None:
        """Read the missing minutes, the newest first, for at most a quarter of a second.

        The next call continues.  Returns at once if another thread is reading.  Raises DatabaseUnavailable.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            began = self._clock()
            self._remove_old(now_ms)
            self._read_present(now_ms, began)
            for begins in reversed(_last_minutes(now_ms)):
                if begins not in self._read:
                    _add(self._minutes, begins, _read_minute(self._database, begins))
                    self._read.add(begins)
                    if begins == self._present_begins:
                        self._present = {}
                    if self._clock() - began > _BUDGET_S:
                        return
        finally:
            self._lock.release()

    def _read_present(self, now_ms: int, now_s: float) -> None:
        if now_s - self._present_read_s < _PRESENT_READ_EVERY_S:
            return
        begins, minutes = now_ms - now_ms % MINUTE_MS, defaultdict[str, dict[int, MinuteUsage]](dict)
        _add(minutes, begins, _read_minute(self._database, begins))
        self._present_begins, self._present, self._present_read_s = begins, minutes, now_s

    def _remove_old(self, now_ms: int) -> None:
        oldest = _last_minutes(now_ms)[0]
        self._read = {begins for begins in self._read if begins >= oldest}
        for model, minutes in list(self._minutes.items()):
            kept = {begins: usage for begins, usage in list(minutes.items()) if begins >= oldest}
            if kept:
                self._minutes[model] = kept
            else:
                del self._minutes[model]


def _add(minutes_by_model: dict[str, dict[int, MinuteUsage]], begins: int, ended: Iterable[_EndedJobs]) -> None:
    """Add the jobs that ended in the minute `begins` to the sums of that minute and of those before it."""
    oldest = begins - MINUTES * MINUTE_MS
    for group in ended:
        minutes = minutes_by_model[group.model]
        usage = minutes.setdefault(begins, MinuteUsage())
        usage.ended += group.jobs
        usage.failed += group.failed
        for minute, busy_ms in _busy_by_minute(group, begins, oldest):
            minutes.setdefault(minute, MinuteUsage()).busy_ms += busy_ms


def read_overview(
    dispatcher: Dispatcher, last_hour: LastHourUsage, models: Sequence[Model], running: Sequence[Job], now_ms: int
) -> dict[str, ModelOverview]:
    """Return model -> overview.  `running`: the running jobs of all models.

    While Redis does not answer, the breakers are unknown.  Raises DatabaseUnavailable.
    """
    database, catalog = dispatcher.store.database, dispatcher.catalog.get()
    oldest, delayed = _read_oldest_queued(database, [model.name for model in models]), _count_delayed(database)
    last_hour.read_missing(now_ms)
    running_by_model: dict[str, list[Job]] = defaultdict(list)
    for job in running:
        running_by_model[job.model].append(job)
    breakers = read_breakers(dispatcher, models)
    overviews = {}
    for name in (model.name for model in models):
        minutes, own = last_hour.of(name, now_ms), running_by_model[name]
        breaker = breakers.get(name, Breaker())
        to_retry, for_later = delayed.get(name, (0, 0))
        overviews[name] = ModelOverview(
            running=len(own),
            oldest_ms=oldest.get(name),
            breaker=breaker.state,
            breaker_until_ms=breaker.open_until_ms,
            breaker_why=breaker.open_why,
            use=_slot_use(minutes, own, dispatcher.queues.count_slots(catalog, name), now_ms),
            ended=[minute.ended for minute in minutes],
            per_minute=_throughput(minutes, now_ms),
            failed=sum(minute.failed for minute in minutes),
            to_retry=to_retry,
            for_later=for_later,
        )
    return overviews


def read_slots(dispatcher: Dispatcher, servers: Sequence[Server], running: Sequence[Job]) -> dict[str, list[SlotState]]:
    """Return server -> its slots, in order.  `running`: the running jobs.  Raises DatabaseUnavailable."""
    job_by_slot = {job.slot: job for job in running}
    quarantined = {row.slot: row for row in quarantine.list_all(dispatcher.store.database)}
    return {
        server.name: [
            SlotState(name, job_by_slot.get(name), quarantined.get(name))
            for name in (f"{server.name}-slot{number}" for number in range(server.slots))
        ]
        for server in servers
    }


def read_breakers(dispatcher: Dispatcher, models: Sequence[Model]) -> Mapping[str, Breaker]:
    """Return model -> breaker; nothing while Redis does not answer."""
    queues = dispatcher.queues
    commands = [queues.model_status_command(model.fleet, model.name) for model in models]
    with suppress(RedisError):
        statuses = queues.call_if_available(lambda: queues.run_all(commands))
        return {
            model.name: Breaker(status.breaker, status.open_until_ms, status.open_why)
            for model, status in zip(models, statuses, strict=True)
        }
    return {}


# -- SQL -------------------------------------------------------------------------------------------------------


def _read_oldest_queued(database: Database, models: Sequence[str]) -> dict[str, int]:
    """Return model -> when its first queued job was accepted, ms.  Raises DatabaseUnavailable."""
    queries = select_queued(models)
    with database.read() as connection:
        rows = [row for query in queries for row in connection.execute(query, {"p_after": 0, "p_limit": 1})]
        return {row.model: row.created_ms for row in rows}


def _count_delayed(database: Database) -> dict[str, tuple[int, int]]:
    """Return model -> (jobs to be retried, jobs for later)."""
    with database.read() as connection:
        return {row.model: (int(row.to_retry), int(row.for_later)) for row in connection.execute(_DELAYED)}


def _read_minute(database: Database, begins_ms: int) -> list[_EndedJobs]:
    """Return the jobs that ended in a minute, summed up by the database.  Raises DatabaseUnavailable."""
    with database.read() as connection:
        rows = connection.execute(_ENDED, {"p_from": begins_ms, "p_to": begins_ms + MINUTE_MS}).all()
    return [
        _EndedJobs(row.model, row.started, row.jobs, int(row.failed), int(row.starts or 0), int(row.ends or 0))
        for row in rows
    ]


# -- slot time by minute ---------------------------------------------------------------------------------------


def _last_minutes(now_ms: int) -> list[int]:
    """Return the beginnings of the last sixty minutes that are over, the oldest first."""
    present = now_ms - now_ms % MINUTE_MS
    return [present - n * MINUTE_MS for n in range(MINUTES, 0, -1)]


def _busy_by_minute(group: _EndedJobs, ended: int, oldest: int) -> Iterator[tuple[int, int]]:
    """Yield (beginning of a minute, slot time in it, ms) of jobs that ended in the minute `ended`."""
    if group.started_ms is None:
        return
    if group.started_ms == ended:
        yield ended, group.ends_ms - group.starts_ms
        return
    yield ended, group.ends_ms - group.jobs * ended
    yield group.started_ms, group.jobs * (group.started_ms + MINUTE_MS) - group.starts_ms
    for between in range(max(group.started_ms + MINUTE_MS, oldest), ended, MINUTE_MS):
        yield between, group.jobs * MINUTE_MS


def _throughput(minutes: Sequence[MinuteUsage], now_ms: int) -> float:
    """Return how many jobs have ended a minute, in the last minutes that are over and in the present one."""
    counted = _THROUGHPUT_MINUTES + now_ms % MINUTE_MS / MINUTE_MS
    return sum(minute.ended for minute in minutes[-_THROUGHPUT_MINUTES - 1 :]) / counted


def _slot_use(minutes: Sequence[MinuteUsage], running: Sequence[Job], slots: int, now_ms: int) -> list[float]:
    """Return the share of the slots that was in use in each minute; the last one is the present minute."""
    if not slots:
        return [0.0] * len(minutes)
    busy = [minute.busy_ms for minute in minutes]
    first = now_ms - now_ms % MINUTE_MS - (len(minutes) - 1) * MINUTE_MS
    ends = [min(first + (n + 1) * MINUTE_MS, now_ms) for n in range(len(minutes))]
    lengths = [end - (first + n * MINUTE_MS) for n, end in enumerate(ends)]
    for job in running:
        started_ms = job.started_ms or now_ms
        for n in range(max(0, (started_ms - first) // MINUTE_MS), len(busy)):
            busy[n] += max(0, min(lengths[n], ends[n] - started_ms))
    return [
        min(1.0, busy_ms / (slots * length)) if length else 0.0 for busy_ms, length in zip(busy, lengths, strict=True)
    ]
