"""What has happened, counted from the outbox: starts, waits, runs and ends, as sums that only grow.

Each event is counted once, whoever counts and dies: the sums stand in the record, and the transaction that raises them
also notes up to which event they go.  No job waits for it: maintenance reads on every few seconds.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sqlalchemy import Connection, bindparam, select, update
from sqlalchemy.dialects import postgresql, sqlite

from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import counters
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.tables import events
from slotkeeper.outbox.event_reader import EventReader, OutboxEvent

WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
"""Upper bounds of the parts of a histogram, but for the last, which has none."""
MAX_MODEL_LABELS = 100
OTHER_MODELS = "other"
"""Stands for all models beyond the first MOST_MODELS that were counted."""

_SEEN, _PREFIX, _BAR = "figures.seen", "figure|", "|"
_AT_ONCE = 2000
_STARTED, _QUEUED = EVENT_TYPES[State.RUNNING], EVENT_TYPES[State.QUEUED]
_ENDS = {EVENT_TYPES[state]: state for state in FINAL_STATES}
_TRAIL = tuple(EVENT_TYPES.values())
_COUNTED = select(counters.c.name, counters.c.value).where(counters.c.name.startswith(_PREFIX, autoescape=True))
_POSITION = select(counters.c.value).where(counters.c.name == _SEEN)
_BEFORE = (
    select(events.c.id, events.c.job_id, events.c.type, events.c.at_ms)
    .where(events.c.job_id.in_(bindparam("p_jobs", expanding=True)), events.c.type.in_(_TRAIL))
    .where(events.c.id <= bindparam("p_until"))
    .order_by(events.c.id)
)
_JOBS_AT_ONCE = 500
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


@dataclass(slots=True)
class Histogram:
    """`parts`: how many lie in each, not summed up; one more than there are bounds.  `sum_s`: of all values."""

    parts: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BUCKETS_S) + 1))
    sum_s: float = 0.0


@dataclass(slots=True)
class JobCounters:
    """Sums since the record was made, by the labels named."""

    accepted: dict[tuple[str], int] = field(default_factory=dict)
    """(model)"""
    ended: dict[tuple[str, str], int] = field(default_factory=dict)
    """(model, final state)"""
    attempts: dict[tuple[str, str], int] = field(default_factory=dict)
    """(model, reason), of those that have ended"""
    waits: dict[tuple[str, str], Histogram] = field(default_factory=dict)
    """(model, priority): from when a job came into its queue, or back, to its start"""
    runs: dict[tuple[str], Histogram] = field(default_factory=dict)
    """(model): from a start to its end"""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """The end of a job.  `ran_ms`: how long its last run took; None: it ended while it was waiting."""

    entry: OutboxEvent
    state: State
    ran_ms: int | None


Ended: TypeAlias = Callable[[EndedJob], object]


class EventCounter:
    """Counts on from where the record says.  For one thread."""

    def __init__(self, database: Database, ended: Ended = lambda end: None) -> None:
        """`ended`: is told of each job that has ended, once its end is counted; not at all, if we die in between."""
        self._database = database
        self._ended = ended
        self._tail = EventReader(database)

    def count_new_events(self) -> int:
        """Count some of what has happened since; answers how many events, 0: there is nothing new.

        Raises DatabaseUnavailable.
        """
        before = self._position()
        self._tail.position = before
        entries = self._tail.read(_AT_ONCE)
        if not entries and self._tail.position == before:
            return 0
        sums, ends = self._sums(entries)
        after = self._tail.position
        if not self._database.write(lambda tx: _note(tx, before, after, sums)):
            return 0
        for end in ends:
            self._ended(end)
        return len(entries)

    def _position(self) -> int:
        with self._database.read() as connection:
            found = connection.execute(_POSITION).scalar()
        if found is None:
            self._database.write(_begin)
        return found or 0

    def _sums(self, entries: Sequence[OutboxEvent]) -> tuple[Counter[str], list[EndedJob]]:
        with self._database.read() as connection:
            named = _Names(connection)
            last = _before(connection, entries)
        sums: Counter[str] = Counter()
        ends = []
        for entry in entries:
            before = last.get(entry.event.job_id)
            _add(sums, entry, named.of(entry.model), before)
            if entry.event.type in _ENDS:
                ran_ms = entry.event.at_ms - before[1] if before and before[0] == _STARTED else None
                ends.append(EndedJob(entry, _ENDS[entry.event.type], ran_ms))
            if entry.event.type in _TRAIL:
                last[entry.event.job_id] = entry.event.type, entry.event.at_ms
        return sums, ends


class _Names:
    """Under which name a model is counted: whoever came first keeps its own, so that no sum ever falls."""

    def __init__(self, connection: Connection) -> None:
        rows = connection.execute(_COUNTED).scalars()
        self._known = {name.split(_BAR)[2] for name in rows}

    def of(self, model: str) -> str:
        if model not in self._known and len(self._known) >= MAX_MODEL_LABELS:
            return OTHER_MODELS
        self._known.add(model)
        return model


def _before(connection: Connection, entries: Sequence[OutboxEvent]) -> dict[str, tuple[str, int]]:
    """Job -> type and time of its last transition before these."""
    if not entries:
        return {}
    first = entries[0].event.id
    jobs = sorted({it.event.job_id for it in entries if it.event.attempt or it.event.type != _QUEUED})
    found: dict[str, tuple[str, int]] = {}
    for start in range(0, len(jobs), _JOBS_AT_ONCE):
        some = {"p_jobs": jobs[start : start + _JOBS_AT_ONCE], "p_until": first - 1}
        found |= {row.job_id: (row.type, row.at_ms) for row in connection.execute(_BEFORE, some)}
    return found


def _add(sums: Counter[str], entry: OutboxEvent, model: str, last: tuple[str, int] | None) -> None:
    """What one event changes; `last`: what the job's transition before it was, and when."""
    event, before = entry.event, last[0] if last else ""
    since_ms = max(event.at_ms - last[1], 0) if last else 0
    if event.type not in _TRAIL:
        return
    if last is None and not event.attempt:
        sums[_name("accepted", model)] += 1
    if event.type == _STARTED and before == _QUEUED:
        _observe(sums, since_ms, "wait", model, str(entry.priority))
    if before == _STARTED and event.type != _STARTED:
        sums[_name("attempt", model, str(event.data.get("why", "")))] += 1
        _observe(sums, since_ms, "run", model)
    if event.type in _ENDS:
        sums[_name("ended", model, _ENDS[event.type])] += 1


def _observe(sums: Counter[str], value_ms: int, *labels: str) -> None:
    sums[_name(*labels, str(bisect_left(WAIT_BUCKETS_S, value_ms / 1000)))] += 1
    sums[_name(*labels, "ms")] += value_ms


def _name(*labels: str) -> str:
    return _PREFIX + _BAR.join(labels)


def _begin(tx: Transaction) -> None:
    statement = _INSERT[tx.connection.dialect.name](counters).on_conflict_do_nothing()
    tx.connection.execute(statement, {"name": _SEEN, "value": 0})


def _note(tx: Transaction, before: int, after: int, sums: Mapping[str, int]) -> bool:
    """Raise the sums; False: somebody else has counted these events meanwhile."""
    moved = update(counters).where(counters.c.name == _SEEN, counters.c.value == before).values(value=after)
    if tx.connection.execute(moved).rowcount == 0:
        return False
    if sums:
        new = _INSERT[tx.connection.dialect.name](counters)
        added = new.on_conflict_do_update(
            index_elements=["name"], set_={"value": counters.c.value + new.excluded.value}
        )
        rows = [{"name": name, "value": value} for name, value in sorted(sums.items())]
        tx.connection.execute(added, rows)
    return True


def read_counters(database: Database) -> JobCounters:
    """The sums as they stand.  Raises DatabaseUnavailable."""
    with database.read() as connection:
        rows = connection.execute(_COUNTED).all()
    return _history((row.name.split(_BAR)[1:], row.value) for row in rows)


def _history(rows: Iterable[tuple[list[str], int]]) -> JobCounters:
    found = JobCounters()
    for (what, model, *rest), value in rows:
        match what:
            case "accepted":
                found.accepted[(model,)] = value
            case "ended":
                found.ended[(model, rest[0])] = value
            case "attempt":
                found.attempts[(model, rest[0])] = value
            case "wait":
                _fill(found.waits.setdefault((model, rest[0]), Histogram()), rest[1], value)
            case "run":
                _fill(found.runs.setdefault((model,), Histogram()), rest[0], value)
    return found


def _fill(histogram: Histogram, part: str, value: int) -> None:
    if part == "ms":
        histogram.sum_s = value / 1000
    else:
        histogram.parts[int(part)] = value


def counting_lag_ms(database: Database, now_ms: int) -> int:
    """How long ago the oldest event happened that is not counted yet; 0: all are."""
    first = select(events.c.at_ms).where(events.c.id > bindparam("p_after")).order_by(events.c.id).limit(1)
    with database.read() as connection:
        position = connection.execute(_POSITION).scalar() or 0
        at_ms = connection.execute(first, {"p_after": position}).scalar()
    return max(now_ms - at_ms, 0) if at_ms is not None else 0
