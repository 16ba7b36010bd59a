"""Read events in order, so that none is skipped although numbers are taken before commits.

On SQLite, events become visible in the order of their numbers.  On PostgreSQL, a transaction takes a number before it
commits, so an event may become visible before one with a lower number.  A transaction that has taken a number holds a
lock on the table until its rows are visible.  If a number is missing, the reader waits until every transaction that
held the lock at that moment has ended: a number that is missing after that was rolled back.  A position therefore
means the same in every process: all events up to it have been seen.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import orjson
from sqlalchemy import Connection, Integer, bindparam, func, select, text

from slotkeeper.db import Database
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.db.schema import counters
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.events import EVENT_TYPES, TRANSITION_TYPES
from slotkeeper.jobs.statements import QUEUED_JOB_COLUMNS, in_state
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import events, jobs
from slotkeeper.jobs.values import Event, QueuedJob

Row: TypeAlias = Any

_STARTED = EVENT_TYPES[State.RUNNING]
_EVENTS = (
    select(
        *(column.label(column.key) for column in events.c),
        # For events of a release that did not store these with the event.
        jobs.c.model.label("job_model"),
        jobs.c.tenant.label("job_tenant"),
        jobs.c.priority.label("job_priority"),
        jobs.c.server.label("job_server"),
        jobs.c.attempt.label("job_attempt"),
        jobs.c.traceparent,
        jobs.c.batch,
    )
    .select_from(events.outerjoin(jobs, jobs.c.id == events.c.job_id))
    .where(events.c.id > bindparam("p_after"))
    .order_by(events.c.id)
    .limit(bindparam("p_limit", type_=Integer))
)
_EVENTS_AFTER = CompiledStatement(_EVENTS)
_EVENTS_OF_JOB = CompiledStatement(_EVENTS.where(events.c.job_id == bindparam("p_job")))
_STARTS = select(events.c.job_id, events.c.attempt, events.c.server, events.c.data).where(
    events.c.job_id.in_(bindparam("p_jobs", expanding=True)), events.c.type == _STARTED
)
_LAST_ID = CompiledStatement(select(func.max(events.c.id)))
_QUEUED = CompiledStatement(
    select(events.c.id.label("event"), *QUEUED_JOB_COLUMNS)
    .join(jobs, jobs.c.id == events.c.job_id)
    .where(
        events.c.id > bindparam("p_after"),
        events.c.id <= bindparam("p_last"),
        events.c.type == EVENT_TYPES[State.QUEUED],
        in_state(State.QUEUED),
    )
    .order_by(events.c.id)
    .limit(bindparam("p_limit", type_=Integer))
)
REMOVED_COUNTER = "events.removed"
"""The counter of the highest event that was removed."""
_REMOVED = select(counters.c.value).where(counters.c.name == REMOVED_COUNTER)
_WRITERS = text(
    "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND relation = 'events'::regclass "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND mode = 'RowExclusiveLock' AND granted"
)
_SKIP_TIMEOUT_S, _POLL_S = 20.0, 0.01


class OutboxEvent(NamedTuple):
    """An event, with the data of its job that readers need.

    server: of the attempt that the event belongs to.
    actor: only of an audit entry; its model and tenant may be "", and its priority is 0.
    traceparent, batch: of the job, while the job is stored.
    """

    event: Event
    model: str
    tenant: str
    priority: int
    server: str | None
    actor: str | None = None
    traceparent: str | None = None
    batch: str | None = None


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events in ascending order.

    last: the number of the last event that was read, also if it is not in `events`.
    has_more: there may be later events.
    """

    events: Sequence[OutboxEvent]
    last: int
    has_more: bool


@dataclass(slots=True)
class _Gap:
    """Missing numbers up to `bound`, and the open transactions that may have taken them."""

    bound: int
    writers: set[str]


class EventReader:
    """Reads events in order, each once.  Not thread-safe.

    has_gap: the last read found events that it did not return, because a transaction with a lower number is open.
    """

    def __init__(
        self,
        database: Database,
        writers: Callable[[Connection], set[str]] | None = None,
        *,
        after: int = 0,
        transitions_only: bool = True,
    ) -> None:
        """Prepare to read the events after the event `after`.

        writers: for tests: returns the open transactions that may have taken numbers.
        transitions_only: leave out audit entries.
        """
        self._database = database
        self._transitions_only = transitions_only
        dialect = database.engine.dialect.name
        self._writers = writers or (_list_writers if dialect == "postgresql" else _no_writers)
        self._gap: _Gap | None = None
        self.position = after
        self.has_gap = False

    def skip_to_end(self) -> int:
        """Move behind all events committed so far, and return the position.

        Raises DatabaseUnavailable, also if a writing transaction stays open for too long.
        """
        self._gap = None
        until = time.monotonic() + _SKIP_TIMEOUT_S
        with self._database.read() as connection:
            last = get_last_id(connection)
            writing = self._writers(connection)
            while writing:
                if time.monotonic() > until:
                    raise DatabaseUnavailable("Somebody has been writing to the record for very long; try again.")
                time.sleep(_POLL_S)
                writing &= self._writers(connection)
        self._wait_for_disk()
        self.position = last
        return last

    def read(self, limit: int = 1000) -> list[OutboxEvent]:
        """Return new events, and move behind them.  Raises DatabaseUnavailable."""
        with self._database.read() as connection:
            rows = self._read_gapless(connection, limit)
            if rows:
                self._wait_for_disk()
            found = _make_events(connection, rows)
        if rows:
            self.position = rows[-1].id
        return _only_transitions(found) if self._transitions_only else found

    def _wait_for_disk(self) -> None:
        """Wait until a power cut cannot take back events that were read: their numbers would be given again."""
        self._database.sync_for_readers()

    def _read_gapless(self, connection: Connection, limit: int) -> Sequence[Row]:
        """Return the next rows, up to the first gap that an open transaction may still fill."""
        rows = _read_rows(connection, _EVENTS_AFTER, self.position, limit)
        if self._writers is _no_writers:
            return rows
        gapless = self._count_gapless(rows)
        self.has_gap = gapless < len(rows)
        if gapless == len(rows):
            return rows
        if self._gap is None or self._gap.bound < rows[gapless].id:
            self._gap = _Gap(rows[-1].id, self._writers(connection))
        else:
            self._gap.writers &= self._writers(connection)
        if self._gap.writers:
            return rows[:gapless]
        bound = self._gap.bound
        # The rows were read before the transactions were seen to have ended, so read them again.
        rows = _read_rows(connection, _EVENTS_AFTER, self.position, limit)
        return [row for row in rows if row.id <= bound]

    def _count_gapless(self, rows: Sequence[Row]) -> int:
        """Return how many of the rows follow the position without a missing number."""
        return next((n for n, row in enumerate(rows) if row.id != self.position + n + 1), len(rows))


def get_last_id(connection: Connection) -> int:
    """Return the number of the newest event, or 0 if there is none."""
    return _LAST_ID.fetch_value(connection, {}) or 0


def read_page(database: Database, after: int, limit: int, job_id: str | None = None) -> EventPage:
    """Return transitions after the event `after`, of all jobs or of one.

    Only up to the position of an EventReader are they sure to be complete.  Raises DatabaseUnavailable.
    """
    with database.read() as connection:
        query, more = (_EVENTS_AFTER, {}) if job_id is None else (_EVENTS_OF_JOB, {"p_job": job_id})
        rows = _read_rows(connection, query, after, limit, **more)
        found = _only_transitions(_make_events(connection, rows))
        return EventPage(found, rows[-1].id if rows else after, len(rows) == limit)


def has_all_since(database: Database, after: int) -> bool:
    """Return True if all events after the event `after` are still stored.

    Returns False also for a number that is higher than any event had: the database was restored from a backup.
    """
    with database.read() as connection:
        removed = connection.execute(_REMOVED).scalar() or 0
        last = get_last_id(connection)
    return removed <= after <= max(last, removed)


def list_queued_between(database: Database, after: int, last: int, limit: int = 1000) -> list[tuple[int, QueuedJob]]:
    """Return the queued jobs that an event after `after`, up to `last`, has queued, each with that event's number.

    On PostgreSQL an event may become visible after one with a higher number.  A caller that must not miss one reads
    some numbers again.
    """
    if after >= last:
        return []
    with database.read() as connection:
        rows = _QUEUED.fetch_all(connection, {"p_after": after, "p_last": last, "p_limit": limit})
        return [(event, replace(QueuedJob(*job), deadline_ms=job[-1] or 0)) for event, *job in rows]


def _read_rows(connection: Connection, query: CompiledStatement, after: int, limit: int, **more: Any) -> Sequence[Row]:
    return query.fetch_all(connection, {"p_after": after, "p_limit": limit, **more})


def _make_events(connection: Connection, rows: Sequence[Row]) -> list[OutboxEvent]:
    found = [(row, orjson.loads(row.data)) for row in rows]
    servers = {(row.job_id, row.attempt): _server_of_start(row, data) for row, data in found if row.type == _STARTED}
    servers |= {(row.job_id, row.job_attempt): row.job_server for row, _ in found if row.job_server is not None}
    unknown = {
        row.job_id for row, _ in found if row.attempt and not row.server and (row.job_id, row.attempt) not in servers
    }
    if unknown:  # A job that is queued again has no server, so its start events are read.
        starts = connection.execute(_STARTS, {"p_jobs": sorted(unknown)})
        servers |= {(row.job_id, row.attempt): _server_of_start(row, orjson.loads(row.data)) for row in starts}
    return [_make_event(row, data, servers.get((row.job_id, row.attempt))) for row, data in found]


def _server_of_start(row: Row, data: dict[str, Any]) -> str | None:
    return row.server or data.get("server")


def _make_event(row: Row, data: dict[str, Any], server: str | None) -> OutboxEvent:
    event = Event(row.id, row.job_id, row.type, row.at_ms, row.attempt, data)
    if row.actor is not None:
        return OutboxEvent(event, row.model or "", row.tenant or "", 0, row.server, row.actor)
    return OutboxEvent(
        event,
        row.model or row.job_model or "",
        row.tenant or row.job_tenant or "",
        row.priority or row.job_priority or 0,
        row.server or server,
        traceparent=row.traceparent,
        batch=row.batch,
    )


def _only_transitions(found: Sequence[OutboxEvent]) -> list[OutboxEvent]:
    """Return the transitions whose tenant is known, from the event or from its job."""
    return [event for event in found if event.event.type in TRANSITION_TYPES and event.tenant]


def _no_writers(_: Connection) -> set[str]:
    return set()


def _list_writers(connection: Connection) -> set[str]:
    return set(connection.execute(_WRITERS).scalars())
