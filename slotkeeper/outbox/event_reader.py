"""The outbox as it grows, read so that no event is passed over: what streams of events are made of.

On SQLite events become visible in the order of their numbers.  On PostgreSQL a number is taken before the commit, so a
later one may be seen first.  Whoever has taken a number holds a lock on the table until all see what it wrote: where a
number is missing, those behind it wait until all have ended that wrote when it was missed.  What is missing then was
rolled back.  So a position means the same to every process: all events up to it have been seen.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import orjson
from sqlalchemy import Connection, Integer, bindparam, func, select, text

from slotkeeper.db import Database
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.db.schema import counters
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import events, jobs
from slotkeeper.jobs.values import Event

Row: TypeAlias = Any

_STARTED = EVENT_TYPES[State.RUNNING]
_TRANSITIONS = frozenset(EVENT_TYPES.values())
_ALL = (
    select(
        *(column.label(column.key) for column in events.c),
        # What the release before has not said.
        jobs.c.model.label("model_now"),
        jobs.c.tenant.label("tenant_now"),
        jobs.c.priority.label("priority_now"),
        jobs.c.server.label("server_now"),
        jobs.c.attempt.label("starts"),
        jobs.c.traceparent,
        jobs.c.batch,
    )
    .select_from(events.outerjoin(jobs, jobs.c.id == events.c.job_id))
    .where(events.c.id > bindparam("p_after"))
    .order_by(events.c.id)
    .limit(bindparam("p_limit", type_=Integer))
)
_AFTER = CompiledStatement(_ALL)
_OF_JOB = CompiledStatement(_ALL.where(events.c.job_id == bindparam("p_job")))
_STARTS = select(events.c.job_id, events.c.attempt, events.c.server, events.c.data).where(
    events.c.job_id.in_(bindparam("p_jobs", expanding=True)), events.c.type == _STARTED
)
_LAST = select(func.max(events.c.id))
REMOVED_COUNTER = "events.removed"
"""The counter of the highest event that was removed."""
_REMOVED = select(counters.c.value).where(counters.c.name == REMOVED_COUNTER)
_LOG = text("SELECT file FROM pragma_database_list WHERE name = 'main'")
_WRITERS = text(
    "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND relation = 'events'::regclass "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND mode = 'RowExclusiveLock' AND granted"
)
_BEGINS_S, _ASK_AGAIN_S = 20.0, 0.01


class OutboxEvent(NamedTuple):
    """An event, and what it is told with.  `server`: of the attempt that it belongs to.

    An act has an actor; and of model, tenant and priority only what it concerns, else "" and 0.
    """

    event: Event
    model: str
    tenant: str
    priority: int
    server: str | None
    actor: str | None = None
    traceparent: str | None = None
    """Of its job, as long as that is in the record; so is this."""
    batch: str | None = None


@dataclass(frozen=True, slots=True)
class EventPage:
    """Entries in the order of their events.  `last`: up to which event nothing is missing from it."""

    entries: Sequence[OutboxEvent]
    last: int
    has_more: bool
    """There may be more."""


@dataclass(slots=True)
class _Doubt:
    """Numbers up to `bound` may be missing because these transactions, which wrote then, had not ended."""

    bound: int
    writers: set[str]


class EventReader:
    """Reads on from where it was.  For one thread."""

    def __init__(
        self,
        database: Database,
        writers: Callable[[Connection], set[str]] | None = None,
        *,
        after: int = 0,
        transitions_only: bool = True,
    ) -> None:
        """`after`: the event behind which it reads, unless it is to `begin` with what happens from now on.

        `writers`: names the transactions that may have taken numbers and have not ended (for tests).
        """
        self._database = database
        self._transitions_only = transitions_only
        dialect = database.engine.dialect.name
        self._writers = writers or (_writers if dialect == "postgresql" else _nobody)
        self._log = _Log(database) if dialect == "sqlite" else None
        self._doubt: _Doubt | None = None
        self.position = after
        self.has_gap = False
        """The last look saw more than it told, for somebody may still write what comes before."""

    def skip_to_end(self) -> int:
        """Read from now on: whatever is committed after this answers.  Answers the position.

        Raises RecordUnavailable, also where somebody does not end that was writing.
        """
        self._doubt = None
        until = time.monotonic() + _BEGINS_S
        with self._database.read() as connection:
            last = connection.execute(_LAST).scalar() or 0
            writing = self._writers(connection)
            while writing:
                if time.monotonic() > until:
                    raise DatabaseUnavailable("Somebody has been writing to the record for very long; try again.")
                time.sleep(_ASK_AGAIN_S)
                writing &= self._writers(connection)
        self._secure()
        self.position = last
        return last

    def read(self, limit: int = 1000) -> list[OutboxEvent]:
        """What is new.  Raises RecordUnavailable."""
        with self._database.read() as connection:
            rows = self._settled(connection, limit)
            if rows:
                self._secure()
            found = _entries(connection, rows)
        if rows:
            self.position = rows[-1].id
        return _transitions(found) if self._transitions_only else found

    def _secure(self) -> None:
        """What a power cut could take back is not told: its numbers would be given again."""
        if self._log is not None:
            self._log.wait()

    def _settled(self, connection: Connection, limit: int) -> Sequence[Row]:
        """Rows before which nothing can appear any more."""
        rows = _rows(connection, _AFTER, self.position, limit)
        if self._writers is _nobody:
            return rows
        sure = self._unbroken(rows)
        self.has_gap = sure < len(rows)
        if sure == len(rows):
            return rows
        if self._doubt is None or self._doubt.bound < rows[sure].id:
            self._doubt = _Doubt(rows[-1].id, self._writers(connection))
        else:
            self._doubt.writers &= self._writers(connection)
        if self._doubt.writers:
            return rows[:sure]
        bound = self._doubt.bound
        rows = _rows(connection, _AFTER, self.position, limit)  # Who wrote has ended before this look.
        return [row for row in rows if row.id <= bound]

    def _unbroken(self, rows: Sequence[Row]) -> int:
        """How many of them follow without a gap."""
        return next((n for n, row in enumerate(rows) if row.id != self.position + n + 1), len(rows))


def read_page(database: Database, after: int, limit: int, job_id: str | None = None) -> EventPage:
    """Entries after an event, of all jobs or of one; sure to be all only up to a Tail's position.

    Raises RecordUnavailable.
    """
    with database.read() as connection:
        query, more = (_AFTER, {}) if job_id is None else (_OF_JOB, {"p_job": job_id})
        rows = _rows(connection, query, after, limit, **more)
        found = _transitions(_entries(connection, rows))
        return EventPage(found, rows[-1].id if rows else after, len(rows) == limit)


def has_all_since(database: Database, after: int) -> bool:
    """Whether all that has happened after an event is still here.  False, too, where there is no such event."""
    with database.read() as connection:
        removed = connection.execute(_REMOVED).scalar() or 0
        last = connection.execute(_LAST).scalar() or 0
    return removed <= after <= max(last, removed)


def _rows(connection: Connection, query: CompiledStatement, after: int, limit: int, **more: Any) -> Sequence[Row]:
    return query.fetch_all(connection, {"p_after": after, "p_limit": limit, **more})


def _entries(connection: Connection, rows: Sequence[Row]) -> list[OutboxEvent]:
    found = [(row, orjson.loads(row.data)) for row in rows]
    servers = {(row.job_id, row.attempt): _started_on(row, data) for row, data in found if row.type == _STARTED}
    servers |= {(row.job_id, row.starts): row.server_now for row, _ in found if row.server_now is not None}
    unknown = {
        row.job_id for row, _ in found if row.attempt and not row.server and (row.job_id, row.attempt) not in servers
    }
    if unknown:  # It is forgotten in the job when that goes back into its queue.
        starts = connection.execute(_STARTS, {"p_jobs": sorted(unknown)})
        servers |= {(row.job_id, row.attempt): _started_on(row, orjson.loads(row.data)) for row in starts}
    return [_entry(row, data, servers.get((row.job_id, row.attempt))) for row, data in found]


def _started_on(row: Row, data: dict[str, Any]) -> str | None:
    return row.server or data.get("server")


def _entry(row: Row, data: dict[str, Any], server: str | None) -> OutboxEvent:
    event = Event(row.id, row.job_id, row.type, row.at_ms, row.attempt, data)
    if row.actor is not None:
        return OutboxEvent(event, row.model or "", row.tenant or "", 0, row.server, row.actor)
    return OutboxEvent(
        event,
        row.model or row.model_now or "",
        row.tenant or row.tenant_now or "",
        row.priority or row.priority_now or 0,
        row.server or server,
        traceparent=row.traceparent,
        batch=row.batch,
    )


def _transitions(found: Sequence[OutboxEvent]) -> list[OutboxEvent]:
    """Those of jobs that are known, or were when it was written down whose they are."""
    return [it for it in found if it.event.type in _TRANSITIONS and it.tenant]


def _nobody(_: Connection) -> set[str]:
    return set()


def _writers(connection: Connection) -> set[str]:
    return set(connection.execute(_WRITERS).scalars())


class _Log:
    """SQLite's log.  All processes write to the same, and each waits for the disk behind its commits."""

    def __init__(self, database: Database) -> None:
        with database.read() as connection:
            file = connection.execute(_LOG).scalar()
        self._path = f"{file}-wal" if file else None

    def wait(self) -> None:
        """Until what was read survives a power cut.  Raises RecordUnavailable."""
        if self._path is None or not os.path.exists(self._path):
            return
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise DatabaseUnavailable(f"The disk does not answer ({error}); try again.") from error
