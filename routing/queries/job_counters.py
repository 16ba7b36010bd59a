"""Count what has happened, from the events in the outbox: starts, waits, runs and ends, as sums that only grow.

Each event is counted once, even if the counting process dies: the sums are stored in the database, and the transaction
that raises them also stores the id of the last counted event.  Maintenance counts new events every few seconds, so no
job waits for it.
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
from slotkeeper.jobs.states import FINAL_STATES, TRANSITIONS, Budget, Reason, State
from slotkeeper.jobs.tables import events
from slotkeeper.outbox.event_reader import EventReader, OutboxEvent
from slotkeeper.registry.usage import DAY_MS, Usage, UsageKey, add_usage

WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
"""Upper bounds of the buckets of a histogram; the last bucket, above them, has none."""
MAX_MODEL_LABELS = 100
OTHER_MODELS = "other"
"""The label of all models after the first MAX_MODEL_LABELS."""

# Names of rows in the table `counters`.
_POSITION_NAME, _PREFIX, _SEPARATOR = "figures.seen", "figure|", "|"
_EVENTS_AT_ONCE = 2000
_JOBS_AT_ONCE = 500
_STARTED, _QUEUED = EVENT_TYPES[State.RUNNING], EVENT_TYPES[State.QUEUED]
_FINAL_STATES_BY_TYPE = {EVENT_TYPES[state]: state for state in FINAL_STATES}
_TRANSITIONS = tuple(EVENT_TYPES.values())
_ACCEPTANCES = {Reason.SUBMITTED, Reason.SCHEDULED}
_MET_NO_SERVER = {reason for (_, reason), edge in TRANSITIONS.items() if edge.costs is Budget.WAITS}
_SUMS = select(counters.c.name, counters.c.value).where(counters.c.name.startswith(_PREFIX, autoescape=True))
_POSITION = select(counters.c.value).where(counters.c.name == _POSITION_NAME)
_EARLIER_TRANSITIONS = (
    select(events.c.id, events.c.job_id, events.c.type, events.c.at_ms)
    .where(events.c.job_id.in_(bindparam("p_jobs", expanding=True)), events.c.type.in_(_TRANSITIONS))
    .where(events.c.id <= bindparam("p_until"))
    .order_by(events.c.id)
)
_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


@dataclass(slots=True)
class Histogram:
    """`buckets`: number of values in each bucket, not cumulated.  `sum_s`: of all values."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BUCKETS_S) + 1))
    sum_s: float = 0.0


@dataclass(slots=True)
class JobCounters:
    """Sums since the database was created, by labels."""

    accepted: dict[tuple[str], int] = field(default_factory=dict)
    """(model)"""
    ended: dict[tuple[str, str], int] = field(default_factory=dict)
    """(model, final state)"""
    attempts: dict[tuple[str, str], int] = field(default_factory=dict)
    """(model, reason) of attempts that have ended"""
    waits: dict[tuple[str, str], Histogram] = field(default_factory=dict)
    """(model, priority): from each time when a job enters its queue to the next start"""
    runs: dict[tuple[str], Histogram] = field(default_factory=dict)
    """(model): from each start to the end of the run"""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """The end of a job.  `ran_ms`: duration of its last run; None: it ended while it was waiting."""

    entry: OutboxEvent
    state: State
    ran_ms: int | None


OnEnded: TypeAlias = Callable[[EndedJob], object]


@dataclass(frozen=True, slots=True)
class _Transition:
    type: str
    at_ms: int


class EventCounter:
    """Counts new events.  For one thread."""

    def __init__(self, database: Database, on_ended: OnEnded = lambda end: None) -> None:
        """`on_ended`: called for each job that has ended, once, after its end was counted.

        If the process dies between the two, the call is lost.
        """
        self._database = database
        self._on_ended = on_ended
        self._reader = EventReader(database)

    def count_new_events(self) -> int:
        """Count the next events, and return how many were counted; 0: there are none.

        Raises DatabaseUnavailable.
        """
        before = self._position()
        self._reader.position = before
        entries = self._reader.read(_EVENTS_AT_ONCE)
        if not entries and self._reader.position == before:
            return 0
        sums, used, ends = self._sum_up(entries)
        after = self._reader.position
        if not self._database.write(lambda tx: _add_to_sums(tx, before, after, sums, used)):
            return 0
        for end in ends:
            self._on_ended(end)
        return len(entries)

    def _position(self) -> int:
        """Return the id of the last counted event."""
        with self._database.read() as connection:
            position = connection.execute(_POSITION).scalar()
        if position is None:
            self._database.write(_insert_position)
        return position or 0

    def _sum_up(self, entries: Sequence[OutboxEvent]) -> tuple[Counter[str], Mapping[UsageKey, Usage], list[EndedJob]]:
        """Return what these events add to the sums and to the usage of tenants, and the ends among them."""
        with self._database.read() as connection:
            labels = _ModelLabels(connection)
            last = _read_earlier_transitions(connection, entries)
        sums: Counter[str] = Counter()
        used: dict[UsageKey, Usage] = {}
        ends = []
        for entry in entries:
            event, before, label = entry.event, last.get(entry.event.job_id), labels.label_of(entry.model)
            if event.type not in _TRANSITIONS:
                continue
            _count_transition(sums, entry, label, before)
            _count_usage(used, entry, before)
            if event.type in _FINAL_STATES_BY_TYPE:
                ran_ms = event.at_ms - before.at_ms if before and before.type == _STARTED else None
                ends.append(EndedJob(entry, _FINAL_STATES_BY_TYPE[event.type], ran_ms))
            last[event.job_id] = _Transition(event.type, event.at_ms)
        return sums, used, ends


class _ModelLabels:
    """The labels of models.  The first models keep their names, so that no sum ever becomes smaller."""

    def __init__(self, connection: Connection) -> None:
        names = connection.execute(_SUMS).scalars()
        self._models = {name.split(_SEPARATOR)[2] for name in names}

    def label_of(self, model: str) -> str:
        if model not in self._models and len(self._models) >= MAX_MODEL_LABELS:
            return OTHER_MODELS
        self._models.add(model)
        return model


def read_counters(database: Database) -> JobCounters:
    """Return the sums.  Raises DatabaseUnavailable."""
    with database.read() as connection:
        rows = connection.execute(_SUMS).all()
    return _counters_from_rows((row.name.split(_SEPARATOR)[1:], row.value) for row in rows)


def counting_lag_ms(database: Database, now_ms: int) -> int:
    """Return the age of the oldest event that is not counted; 0: all are.  Raises DatabaseUnavailable."""
    first = select(events.c.at_ms).where(events.c.id > bindparam("p_after")).order_by(events.c.id).limit(1)
    with database.read() as connection:
        position = connection.execute(_POSITION).scalar() or 0
        at_ms = connection.execute(first, {"p_after": position}).scalar()
    return max(now_ms - at_ms, 0) if at_ms is not None else 0


# -- counting --------------------------------------------------------------------------------------------------


def _read_earlier_transitions(connection: Connection, entries: Sequence[OutboxEvent]) -> dict[str, _Transition]:
    """Return job id -> the last transition before these events."""
    if not entries:
        return {}
    until = entries[0].event.id - 1
    job_ids = sorted({entry.event.job_id for entry in entries if not _is_acceptance(entry)})
    last: dict[str, _Transition] = {}
    for start in range(0, len(job_ids), _JOBS_AT_ONCE):
        params = {"p_jobs": job_ids[start : start + _JOBS_AT_ONCE], "p_until": until}
        rows = connection.execute(_EARLIER_TRANSITIONS, params)
        last |= {row.job_id: _Transition(row.type, row.at_ms) for row in rows}
    return last


def _is_acceptance(entry: OutboxEvent) -> bool:
    """Return whether a job was accepted with this event, so that it has no earlier one."""
    return entry.event.data.get("why") in _ACCEPTANCES


def _count_transition(sums: Counter[str], entry: OutboxEvent, model: str, before: _Transition | None) -> None:
    """Add a transition to the sums.  `before`: the job's last transition before it."""
    event = entry.event
    type_before = before.type if before else ""
    lasted_ms = max(event.at_ms - before.at_ms, 0) if before else 0
    if _is_acceptance(entry):
        sums[_name("accepted", model)] += 1
    if event.type == _STARTED and type_before == _QUEUED:
        _observe(sums, lasted_ms, "wait", model, str(entry.priority))
    if type_before == _STARTED and event.type != _STARTED:
        sums[_name("attempt", model, str(event.data.get("why", "")))] += 1
        _observe(sums, lasted_ms, "run", model)
    if event.type in _FINAL_STATES_BY_TYPE:
        sums[_name("ended", model, _FINAL_STATES_BY_TYPE[event.type])] += 1


def _count_usage(used: dict[UsageKey, Usage], entry: OutboxEvent, before: _Transition | None) -> None:
    """Add a transition to what its tenant has used on its day."""
    event = entry.event
    usage = used.setdefault(UsageKey(entry.tenant, event.at_ms // DAY_MS, entry.model), Usage())
    usage.accepted += _is_acceptance(entry)
    if before is not None and before.type == _STARTED and event.type != _STARTED:
        usage.slot_ms += max(event.at_ms - before.at_ms, 0)
        usage.runs += event.data.get("why") not in _MET_NO_SERVER
    usage.completed += event.type == EVENT_TYPES[State.COMPLETED]
    usage.ended += event.type in _FINAL_STATES_BY_TYPE and event.type != EVENT_TYPES[State.COMPLETED]


def _observe(sums: Counter[str], value_ms: int, *labels: str) -> None:
    sums[_name(*labels, str(bisect_left(WAIT_BUCKETS_S, value_ms / 1000)))] += 1
    sums[_name(*labels, "ms")] += value_ms


def _name(*labels: str) -> str:
    return _PREFIX + _SEPARATOR.join(labels)


# -- SQL -------------------------------------------------------------------------------------------------------


def _insert_position(tx: Transaction) -> None:
    statement = _INSERT[tx.connection.dialect.name](counters).on_conflict_do_nothing()
    tx.connection.execute(statement, {"name": _POSITION_NAME, "value": 0})


def _add_to_sums(
    tx: Transaction, before: int, after: int, sums: Mapping[str, int], used: Mapping[UsageKey, Usage]
) -> bool:
    """Raise the sums and move the position.  Returns False if another process has counted these events."""
    move = update(counters).where(counters.c.name == _POSITION_NAME, counters.c.value == before).values(value=after)
    if tx.connection.execute(move).rowcount == 0:
        return False
    if sums:
        new = _INSERT[tx.connection.dialect.name](counters)
        upsert = new.on_conflict_do_update(
            index_elements=["name"], set_={"value": counters.c.value + new.excluded.value}
        )
        tx.connection.execute(upsert, [{"name": name, "value": value} for name, value in sorted(sums.items())])
    add_usage(tx, used)
    return True


def _counters_from_rows(rows: Iterable[tuple[list[str], int]]) -> JobCounters:
    result = JobCounters()
    for (kind, model, *labels), value in rows:
        match kind:
            case "accepted":
                result.accepted[(model,)] = value
            case "ended":
                result.ended[(model, labels[0])] = value
            case "attempt":
                result.attempts[(model, labels[0])] = value
            case "wait":
                _fill(result.waits.setdefault((model, labels[0]), Histogram()), labels[1], value)
            case "run":
                _fill(result.runs.setdefault((model,), Histogram()), labels[0], value)
    return result


def _fill(histogram: Histogram, bucket: str, value: int) -> None:
    if bucket == "ms":
        histogram.sum_s = value / 1000
    else:
        histogram.buckets[int(bucket)] = value
