"""The database: engines for SQLite and PostgreSQL, and one committer per process.

Threads that write at the same moment share one transaction (group commit): each hands in a *unit*, one of
them becomes the leader, runs all units that are waiting, commits once, and wakes the others.  Alone, a caller
leads itself and pays nothing for it.  Nobody is answered before the commit.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import IntegrityError, InterfaceError, InternalError, OperationalError, TimeoutError

from jobs.errors import RecordUnavailable
from jobs.models import events, tellings, webhooks

T = TypeVar("T")

_LARGEST_BATCH = 128
_BUSY_TIMEOUT_MS = 10_000
CONNECT_TIMEOUT_S = 5
# Reading needs no transaction; psycopg is told so by isolation level, SQLite by our saying no BEGIN.
_READS: dict[str, dict[str, Any]] = {
    "sqlite": {"slotkeeper_reads": True},
    "postgresql": {"isolation_level": "AUTOCOMMIT"},
}
# InternalError: PostgreSQL has become a read-only standby.  TimeoutError: every connection is taken.
_GONE = (OperationalError, InterfaceError, InternalError, TimeoutError)


class Transaction:
    """What a unit may use: the connection, and rows that are inserted together before the commit."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.events: list[dict[str, Any]] = []
        self.webhooks: list[dict[str, Any]] = []
        self.tellings: list[dict[str, Any]] = []

    def flush(self) -> None:
        """Write the collected rows.  One executemany each: a third of the cost of single inserts."""
        if self.events:
            self.connection.execute(events.insert(), self.events)
        if self.webhooks:
            self.connection.execute(webhooks.insert(), self.webhooks)
        if self.tellings:
            self.connection.execute(tellings.insert(), self.tellings)


Unit = Callable[[Transaction], T]


class _Ticket(Generic[T]):
    """One unit in the line for the next commit."""

    __slots__ = ("_woken", "done", "error", "relaxed", "result", "unit")

    def __init__(self, unit: Unit[T], relaxed: bool) -> None:
        self.unit = unit
        self.relaxed = relaxed
        self.done = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self._woken = threading.Lock()
        self._woken.acquire()

    def wait(self) -> None:
        self._woken.acquire()

    def wake(self) -> None:
        self._woken.release()

    def fail(self, error: BaseException | None) -> None:
        self.done, self.error = True, error

    def outcome(self) -> T:
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]


class Database:
    """One record.  Safe to share between threads, not across a fork."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = _engine(url)
        self._relaxed = self.engine.execution_options(slotkeeper_relaxed=True)
        self._reader = self.engine.execution_options(**_READS[self.engine.dialect.name])
        self._lock = threading.Lock()
        self._line: list[_Ticket[Any]] = []
        self._led = False

    def write(self, unit: Unit[T], *, relaxed: bool = False) -> T:
        """Run `unit` in a transaction, perhaps with others, and return its result once committed.

        `relaxed`: nobody was promised anything.  On SQLite it need not survive a power cut, though it does
        survive the end of any process, and spares the wait for the disk (0.3 of 0.5 ms).

        `unit` may be run again if a neighbour spoils the shared transaction: it must have no effect but on
        its connection.  Raises what the unit raised, or RecordUnavailable; then nothing of it was stored.
        """
        ticket: _Ticket[T] = _Ticket(unit, relaxed)
        with self._lock:
            self._line.append(ticket)
            leads, self._led = not self._led, True
        if not leads:
            ticket.wait()
        if not ticket.done:
            self._lead()
        return ticket.outcome()

    def _lead(self) -> None:
        """Commit what waits, our own unit among it, then pass the lead on."""
        with self._lock:
            batch, self._line = self._line[:_LARGEST_BATCH], self._line[_LARGEST_BATCH:]
        try:
            self._commit(batch)
        finally:
            with self._lock:
                heir = self._line[0] if self._line else None
                self._led = heir is not None
            for ticket in batch:
                if not ticket.done:  # Ctrl-C or the like came in between; it is raised in this thread alone.
                    ticket.fail(RecordUnavailable("The commit was interrupted; try again."))
            for ticket in batch[1:]:
                ticket.wake()
            if heir is not None:
                heir.wake()

    def _commit(self, batch: list[_Ticket[Any]], look_again: bool = True) -> bool:
        """Answer every ticket of `batch`.  False: the database did not even begin."""
        began = False
        try:
            with self._transaction(relaxed=all(ticket.relaxed for ticket in batch)) as transaction:
                began = True
                results = [ticket.unit(transaction) for ticket in batch]
        except Exception as error:
            if began and len(batch) > 1:  # One of them spoiled it for all: each on its own.
                return self._commit_singly(batch)
            if began and look_again and isinstance(error, IntegrityError):
                # On PostgreSQL another process may insert a row between our look and our insert.
                return self._commit(batch, look_again=False)
            for ticket in batch:
                ticket.fail(error)
        else:
            for ticket, result in zip(batch, results, strict=True):
                ticket.done, ticket.result = True, result
        return began

    def _commit_singly(self, batch: list[_Ticket[Any]]) -> bool:
        for n, ticket in enumerate(batch):
            if not self._commit([ticket]):
                for other in batch[n + 1 :]:  # Or each would wait for the time-out in turn.
                    other.fail(ticket.error)
                return False
        return True

    @contextmanager
    def _transaction(self, relaxed: bool) -> Iterator[Transaction]:
        try:
            with (self._relaxed if relaxed else self.engine).begin() as connection:
                transaction = Transaction(connection)
                yield transaction
                transaction.flush()
        except _GONE as error:
            raise _unavailable(error) from error

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection on which each statement sees the newest commit.  Raises RecordUnavailable."""
        try:
            with self._reader.connect() as connection:
                yield connection
        except _GONE as error:
            raise _unavailable(error) from error

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection for one long read, whose rows may be fetched page by page.  Raises RecordUnavailable.

        What is read stands still meanwhile, and the database keeps what others remove: do not hold it for hours.
        """
        # PostgreSQL pages only inside a transaction; on SQLite that would lock out all who write.
        source = self._reader if self.engine.dialect.name == "sqlite" else self.engine
        try:
            with source.connect() as connection:
                yield connection
        except _GONE as error:
            raise _unavailable(error) from error

    def close(self) -> None:
        self.engine.dispose()


def _unavailable(error: Exception) -> RecordUnavailable:
    reason = str(getattr(error, "orig", error)).strip().splitlines()
    return RecordUnavailable(
        f"The database did not take the request ({reason[0] if reason else 'no reason given'}); "
        "nothing was stored, try again."
    )


def _engine(url: str) -> Engine:
    if url.startswith("sqlite"):
        return _sqlite(url)
    patience = {} if "connect_timeout" in make_url(url).query else {"connect_timeout": CONNECT_TIMEOUT_S}
    return create_engine(
        url, connect_args=patience, pool_size=8, max_overflow=24, pool_pre_ping=True, pool_timeout=CONNECT_TIMEOUT_S
    )


def _sqlite(url: str) -> Engine:
    path = url.removeprefix("sqlite:///")
    if path and path != url and os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    engine = create_engine(
        url,
        connect_args={"timeout": _BUSY_TIMEOUT_MS / 1000, "check_same_thread": False},
        pool_size=8,
        max_overflow=56,
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # We say BEGIN ourselves, see below.
    for pragma in (
        "journal_mode=WAL",
        "foreign_keys=ON",
        "wal_autocheckpoint=4000",
        "cache_size=-16000",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE: a transaction that first reads and then writes cannot fail half-way with SQLITE_BUSY.
    options = connection.get_execution_options()
    if "slotkeeper_reads" not in options:
        # FULL: what was answered survives a power cut.
        connection.exec_driver_sql(f"PRAGMA synchronous={'NORMAL' if 'slotkeeper_relaxed' in options else 'FULL'}")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
