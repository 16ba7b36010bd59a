"""Group commit: writes of the same moment share one transaction.

    thread A   write ──▶ no leader: A leads ──▶ BEGIN, A's unit, COMMIT ──▶ hand over ──▶ disk ──▶ A returns
    thread B   write ──▶ waits ───────────────────────────────────────────▶ B leads: BEGIN, units of B and C, COMMIT
    thread C   write ──▶ waits ───────────────────────────────────────────────────────────▶ disk ──▶ B wakes C

    commit     The leader runs the units of all waiting writes in one transaction and commits it.  Then it hands the
               lead to the first write that waits, so that the next transaction begins while this one's disk is awaited.
    disk       On SQLite, a commit is visible before it is durable.  A thread returns after the disk has the commit.
    failure    If a unit raises, nothing is stored: the transaction is repeated without that unit, which runs alone.
    lost       If the answer to COMMIT is lost, `commit_outcome` finds out on a new connection whether it was stored:
               then each caller gets its result, DatabaseUnavailable ("nothing was stored"), or CommitUnknown.

A thread that is alone leads itself and loses no time.  An event loop, which must not wait, tries to commit by itself
(`try_commit_all`) and leaves the rest to a thread (`complete`).  Every step has a time limit (config.DatabaseTimeouts).
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine, func, select
from sqlalchemy.exc import (
    DBAPIError,
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
    TimeoutError,
)

from slotkeeper.config import DatabaseTimeouts
from slotkeeper.db import commit_outcome, sqlite, time_limits
from slotkeeper.db.commit_outcome import CommitOutcome, TransactionMark, WitnessRow
from slotkeeper.db.compiled_sql import BulkInsert, CompiledStatement
from slotkeeper.db.write_connection import Writer
from slotkeeper.errors import CommitUnknown, DatabaseUnavailable, SlotkeeperError

T = TypeVar("T")

_LARGEST_BATCH = 128
_LARGEST_AT_ONCE = 64 * 1024  # characters; a larger batch would hold the event loop up
_ASK_AGAIN_S = 0.1
_SLACK_S = 0.5
# InternalError: PostgreSQL has become a read-only standby.  TimeoutError: every connection is taken.
_GONE = (OperationalError, InterfaceError, InternalError, TimeoutError)
# A process of a newer release before the migration.  SQLSTATEs of PostgreSQL: undefined_table, undefined_column;
# SQLite has only words.
_NOT_MIGRATED = ("42P01", "42703")
_MISSING_IN_SQLITE = ("no such table", "no such column", "has no column named")
_NUMBER = CompiledStatement(select(func.txid_current_if_assigned()))


class _CommitLost(Exception):
    """A COMMIT was sent, and its answer was lost."""

    def __init__(self, mark: TransactionMark, cause: BaseException) -> None:
        super().__init__(cause)
        self.mark, self.reason = mark, _reason(cause)
        self.interrupt = None if isinstance(cause, Exception) else cause


class Transaction:
    """What a unit may use: the connection, and rows that are inserted together before the commit."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._collected: dict[BulkInsert, list[dict[str, Any]]] = {}

    def insert(self, into: BulkInsert, row: dict[str, Any]) -> None:
        """Collect a row, which is inserted before the commit together with others of its table."""
        self._collected.setdefault(into, []).append(row)

    def flush_inserts(self) -> TransactionMark:
        """Insert the collected rows, and return the mark that identifies the transaction."""
        number = witness = None
        for into, rows in self._collected.items():
            answer = into.execute(self.connection, rows)
            if into.is_witness:
                number, witness = answer[0][0] if answer else None, WitnessRow(into.table, rows[-1])
        if witness is None and self.connection.dialect.name == "postgresql":
            number = _NUMBER.fetch_value(self.connection, {})
        return TransactionMark(number, witness)


Unit = Callable[[Transaction], T | SlotkeeperError]


def _nothing() -> None:
    pass


class Write(NamedTuple, Generic[T]):
    """A unit that is committed alone or with others.

    relaxed: as in Database.write.
    heard: called when the commit has succeeded.  unheard: called when its outcome is unknown.
    alike: batch form of `unit` for consecutive writes with this function and different values of `about`.  It gets
    their values of `asked`, and returns as many results, or None if it cannot.  size: characters written, if many.
    """

    unit: Unit[T]
    relaxed: bool = False
    heard: Callable[[], object] = _nothing
    unheard: Callable[[], object] = _nothing
    alike: Callable[[Transaction, Sequence[Any]], Sequence[T] | None] | None = None
    about: str = ""
    asked: Any = None
    size: int = 0


class Batch:
    """Writes that are committed together, and their results.

    answers: the result or exception of each write, when the disk has the commit; None before.
    committed: the same, when others see the commit and the disk is still awaited; None before.
    """

    __slots__ = ("answers", "committed", "writes")

    def __init__(self, writes: Sequence[Write[Any]]) -> None:
        self.writes = writes
        self.committed: Sequence[Any] | None = None
        self.answers: list[Any] | None = None

    @property
    def size(self) -> int:
        """Characters that the batch writes."""
        return sum(write.size for write in self.writes)


class _Entry(Generic[T]):
    """One write that waits for a commit."""

    __slots__ = ("_woken", "done", "error", "leads", "result", "until", "write")

    def __init__(self, write: Write[T], until: float) -> None:
        self.write = write
        self.until = until  # monotonic; refused if it has not begun by then
        self.leads = False
        self.done = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self._woken = threading.Lock()
        self._woken.acquire()

    def wait(self, seconds: float) -> bool:
        """Wait until `wake`.  Returns False after `seconds`."""
        return self._woken.acquire(timeout=max(seconds, 0.0))

    def wake(self) -> None:
        self._woken.release()

    def succeed(self, result: T | SlotkeeperError) -> None:
        self.done, self.error = True, None
        if isinstance(result, SlotkeeperError):
            self.error = result
        else:
            self.result = result

    def fail(self, error: BaseException | None) -> None:
        self.done, self.error = True, error

    def outcome(self) -> T:
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]


class Database:
    """One database.  Thread-safe; must not be used across a fork."""

    def __init__(self, url: str, limits: DatabaseTimeouts | None = None) -> None:
        self.url = url
        self.limits = limits or DatabaseTimeouts()
        self.engine = sqlite.make_engine(url, self.limits)
        self._writer = Writer(self.engine, self.limits.lock_s)
        dialect = self.engine.dialect.name
        self._reader = self.engine.execution_options(**sqlite.READ_OPTIONS[dialect])
        self._snapshots = self.engine.execution_options(**sqlite.SNAPSHOT_OPTIONS[dialect])
        # To find out the outcome of a commit: a pooled connection may be broken like the one that was lost.
        self._inquirer = sqlite.make_engine(url, self.limits, pooled=False).execution_options(
            **sqlite.READ_OPTIONS[dialect]
        )
        self._lock = threading.Lock()
        self._waiting: list[_Entry[Any]] = []
        self._has_leader = False
        self._must_reconnect = False

    def write(self, unit: Unit[T], *, relaxed: bool = False) -> T:
        """Run `unit` in a transaction, perhaps with other units, and return its result after the commit.

        relaxed: do not wait for the disk (0.3 of 0.5 ms), for writes that no client was promised: on SQLite a power
        cut may take them back, the end of a process does not.

        `unit` may run again if another unit spoils the shared transaction, so it must have no effect outside of its
        connection.  It returns a SlotkeeperError, instead of raising it, to refuse before it has written anything;
        `write` raises that error, and the other units are not affected.

        Raises what the unit raised; DatabaseUnavailable if nothing was stored; CommitUnknown if that is not known.
        """
        return self.commit(Write(unit, relaxed))

    def commit(self, write: Write[T]) -> T:
        """Commit one write.  Raises as `write`."""
        (answer,) = self.commit_all([write])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def commit_all(self, writes: Sequence[Write[Any]]) -> list[Any]:
        """Commit writes, in one transaction if none spoils it, and return the result or the error of each."""
        batch = Batch(writes)
        self.complete([batch])
        return batch.answers or []

    def try_commit_all(self, batch: Batch) -> None:
        """Commit a batch if that needs no waiting; `complete` does the rest.

        It commits on SQLite only, while no other thread or process writes, and if the batch is small.  If a unit spoils
        the transaction, the whole batch is left to `complete`, which finds out which one.  After a COMMIT failed here,
        as on a full disk, batches are left to `complete` until it has connected again and committed.
        """
        if not self._writer.is_quick or self._must_reconnect or batch.size > _LARGEST_AT_ONCE:
            return
        with self._lock:
            if self._has_leader:
                return
            self._has_leader = True
        try:
            batch.committed = self._tried(batch.writes)
        finally:
            self._hand_over_lead()
        if batch.committed is not None and all(write.relaxed for write in batch.writes):
            batch.answers = _told(batch.writes, batch.committed)

    def complete(self, batches: Sequence[Batch]) -> None:
        """Commit the batches that are not committed yet, wait for the disk, and set their `answers`."""
        if committed := [batch for batch in batches if batch.committed is not None]:
            self._wait_for_disk(committed)
        if others := [batch for batch in batches if batch.committed is None]:
            answers = iter(self._commit_all([write for batch in others for write in batch.writes]))
            for batch in others:
                batch.answers = list(islice(answers, len(batch.writes)))

    def _wait_for_disk(self, batches: Sequence[Batch]) -> None:
        lost: CommitUnknown | None = None
        try:
            self._writer.sync()
        except OSError as error:
            lost = _uncertain(_reason(error))
        for batch in batches:
            found = batch.committed or []
            answers = found if lost is None else [answer if isinstance(answer, Exception) else lost for answer in found]
            batch.answers = _told(batch.writes, answers)

    def _commit_all(self, writes: Sequence[Write[Any]]) -> list[Any]:
        until = time.monotonic() + self.limits.turn_s
        tickets: list[_Entry[Any]] = [_Entry(write, until) for write in writes]
        with self._lock:
            self._waiting.extend(tickets)
            tickets[0].leads, self._has_leader = not self._has_leader, True
        try:
            answers = [self._answer_to(ticket) for ticket in tickets]
        except BaseException:
            self._abandon(tickets)
            raise
        return _told(writes, answers)

    def _tried(self, writes: Sequence[Write[Any]]) -> list[Any] | None:
        """Run one transaction and return its results, or None if nothing was stored, for whatever reason."""
        results: list[Any] = []
        try:
            self._transact(lambda transaction: _run_units(transaction, writes, results), time.monotonic())
        except _CommitLost as lost:
            if lost.interrupt is not None:
                raise lost.interrupt from lost
            self._must_reconnect = True
            return [_uncertain(lost.reason) for _ in writes]  # Finding out its outcome may take seconds.
        except Exception:
            return None
        return results

    def _answer_to(self, ticket: _Entry[T]) -> T | Exception:
        try:
            self._wait_for(ticket)
        except Exception as error:
            return error
        return _answer_of(ticket)

    def _wait_for(self, ticket: _Entry[Any]) -> None:
        """Wait until an entry is done, or lead.  Raises DatabaseUnavailable if its turn does not come in time."""
        if not ticket.leads and not ticket.wait(self.limits.turn_s):
            self._withdraw(ticket)
        if not ticket.done:
            self._lead()

    def _withdraw(self, ticket: _Entry[Any]) -> None:
        """Withdraw an entry whose turn is late.  Raises DatabaseUnavailable, unless its transaction has just begun."""
        with self._lock:
            if ticket in self._waiting and not ticket.leads:
                self._waiting.remove(ticket)
                raise _turn_expired()
        if not ticket.wait(self.limits.transaction_s + self.limits.inquiry_s + _SLACK_S):
            raise _uncertain("the commit takes very long")

    def _abandon(self, tickets: Sequence[_Entry[Any]]) -> None:
        """Remove entries whose thread was interrupted, and hand over the lead if one of them has it."""
        with self._lock:
            self._waiting = [ticket for ticket in self._waiting if ticket not in tickets]
        if any(ticket.leads and not ticket.done for ticket in tickets):
            self._hand_over_lead()

    def _lead(self) -> None:
        """Commit the waiting entries, hand over the lead, and then wait for the disk."""
        with self._lock:
            batch, self._waiting = self._waiting[:_LARGEST_BATCH], self._waiting[_LARGEST_BATCH:]
        try:
            self._commit_in_time(batch)
        finally:
            self._hand_over_lead()
            self._sync_and_wake(batch)

    def _hand_over_lead(self) -> None:
        with self._lock:
            next_run = self._waiting[0] if self._waiting else None
            self._has_leader = next_run is not None
            if next_run is not None:
                next_run.leads = True
                next_run.wake()

    def _sync_and_wake(self, batch: Sequence[_Entry[Any]]) -> None:
        """Wait for the disk, unless all entries are relaxed, and wake the threads of the batch."""
        try:
            promised = [ticket for ticket in batch if ticket.done and ticket.error is None and not ticket.write.relaxed]
            if promised:
                self._secure(promised)
        finally:
            for ticket in batch:
                if not ticket.done:  # Ctrl-C interrupted the leader; only this thread raises it.
                    ticket.fail(_unavailable("the commit was interrupted"))
            for ticket in batch[1:]:
                ticket.wake()

    def _secure(self, promised: Sequence[_Entry[Any]]) -> None:
        try:
            self._writer.sync()
        except BaseException as error:
            for ticket in promised:
                ticket.fail(_uncertain(_reason(error)))
            if not isinstance(error, OSError):
                raise

    def _commit_in_time(self, batch: list[_Entry[Any]]) -> None:
        """Refuse the entries whose time is over, and commit the others."""
        now = time.monotonic()
        for ticket in batch:
            if ticket.until < now:
                ticket.fail(_turn_expired())
        in_time = [ticket for ticket in batch if not ticket.done]
        if in_time:
            self._commit(in_time, now + self.limits.transaction_s)

    def _commit(
        self, batch: Sequence[_Entry[Any]], until: float, look_again: bool = True, singly: bool = False
    ) -> bool:
        """Set the outcome of every entry of `batch`.  Returns False if the transaction did not begin.

        singly: run each unit by itself, without batch forms, to find the one that fails.
        """
        results: list[Any] | None = None

        def work(transaction: Transaction) -> None:
            nonlocal results
            results = []
            _run_units(transaction, [ticket.write for ticket in batch], results, singly)
            interrupted = _uncertain("the commit was interrupted")
            for ticket in batch:  # In force from here to the answer, also if Ctrl-C interrupts the leader.
                ticket.fail(interrupted)

        try:
            self._transact(work, until)
        except _CommitLost as lost:
            self._resolve_lost_commit(batch, results or [], lost)
        except Exception as error:
            if results is not None and len(batch) > 1:
                return self._commit_apart(batch, len(results), until, singly)
            # On PostgreSQL another process may insert a row between a unit's SELECT and its INSERT.  Or the kept
            # connection was lost, and the transaction has not begun.
            if results is not None and look_again and (isinstance(error, IntegrityError) or _was_lost(error)):
                return self._commit(batch, until, look_again=False, singly=singly)
            for ticket in batch:
                ticket.fail(error)
        else:
            self._must_reconnect = False
            _fulfil(batch, results or [])
        return results is not None

    def _commit_apart(self, batch: Sequence[_Entry[Any]], n: int, until: float, singly: bool) -> bool:
        """Repeat a transaction that stored nothing without its `n`-th unit, which failed, and then that unit alone.

        If no unit failed but an insert of collected rows, each unit is repeated alone.  If the batch form of several
        units failed, of which the `n`-th is the first, all are repeated singly to find the one that fails.
        """
        groups = [[ticket] for ticket in batch]
        if n < len(batch) and not singly and batch[n].write.alike is not None:
            groups = [[*batch]]
        elif n < len(batch):
            groups = [[*batch[:n], *batch[n + 1 :]], [batch[n]]]
        while groups:
            group = groups.pop(0)
            if not self._commit(group, until, singly=True):
                for ticket in (ticket for others in groups for ticket in others):
                    ticket.fail(group[0].error)  # Otherwise each would wait for the time limit in turn.
                return False
        return True

    def _resolve_lost_commit(self, batch: Sequence[_Entry[Any]], results: Sequence[Any], lost: _CommitLost) -> None:
        """Find out the outcome of a COMMIT whose answer was lost, and set it for every entry."""
        for ticket in batch:
            ticket.fail(_uncertain(lost.reason))
        found = self._fate_of(lost.mark)
        if found is CommitOutcome.COMMITTED:
            _fulfil(batch, results)
        elif found is CommitOutcome.NOT_COMMITTED:
            for ticket in batch:
                ticket.fail(_unavailable(lost.reason))
        if lost.interrupt is not None:
            raise lost.interrupt

    def _fate_of(self, mark: TransactionMark) -> CommitOutcome:
        with time_limits.time_limit(self.limits.inquiry_s):
            while True:
                try:
                    with self._inquirer.connect() as connection:
                        found = commit_outcome.find_outcome(connection, mark)
                except SQLAlchemyError:
                    found = CommitOutcome.UNDECIDED
                if found is not CommitOutcome.UNDECIDED or time_limits.time_left() < _ASK_AGAIN_S:
                    return found
                time.sleep(_ASK_AGAIN_S)

    def _transact(self, work: Callable[[Transaction], None], until: float) -> None:
        """Run `work` and commit.  Raises DatabaseUnavailable if nothing was stored; _CommitLost if that is unknown."""
        try:
            with time_limits.time_limit(until - time.monotonic()):
                connection = self._writer.begin()
                try:
                    transaction = Transaction(connection)
                    work(transaction)
                    mark = transaction.flush_inserts()
                except BaseException:
                    self._writer.undo(connection)
                    raise
                try:
                    self._writer.commit(connection)
                except BaseException as error:  # also Ctrl-C on the way there
                    self._writer.drop(connection)
                    raise _CommitLost(mark, error) from error
        except _GONE as error:
            raise _old_schema(error) or _unavailable(_reason(error)) from error
        except ProgrammingError as error:
            if (old := _old_schema(error)) is not None:
                raise old from error
            raise

    @contextmanager
    def read(self, *, patient: bool = False) -> Iterator[Connection]:
        """Yield a connection on which each statement sees the newest commit.  Raises DatabaseUnavailable.

        patient: no time limit, for background work and for reads of all jobs.
        """
        with self._reading(self._reader, math.inf if patient else self.limits.read_s) as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Yield a connection for one long, consistent read, page by page.  Raises DatabaseUnavailable.

        The database keeps the rows that others delete meanwhile, so do not hold it for hours.
        """
        with self._reading(self._snapshots, math.inf) as connection:
            yield connection

    @contextmanager
    def _reading(self, engine: Engine, seconds: float) -> Iterator[Connection]:
        try:
            with time_limits.time_limit(seconds), engine.connect() as connection:
                yield connection
        except _GONE as error:
            away = DatabaseUnavailable(f"The database did not answer ({_reason(error)}); try again.")
            raise _old_schema(error) or away from error
        except ProgrammingError as error:
            if (old := _old_schema(error)) is not None:
                raise old from error
            raise

    def sync_for_readers(self) -> None:
        """Wait until all that readers see survives a power cut, whichever process committed it.

        Raises DatabaseUnavailable.
        """
        try:
            sqlite.sync_log(self._reader)
        except OSError as error:
            raise DatabaseUnavailable(f"The disk did not answer ({error}); try again.") from error

    def close(self) -> None:
        self._writer.close()
        self.engine.dispose()


def _run_units(
    transaction: Transaction, writes: Sequence[Write[Any]], results: list[Any], singly: bool = False
) -> None:
    """Run the units of these writes, in batch form where possible, and append their results."""
    if len(writes) == 1:
        results.append(writes[0].unit(transaction))
        return
    for alike, these in groupby(writes, attrgetter("alike")):
        group, found = list(these), None
        if alike is not None and not singly and 1 < len(group) == len({write.about for write in group}):
            sqlite.hurry(transaction.connection)
            found = alike(transaction, [write.asked for write in group])
        if found is not None:
            results += found
            continue
        for write in group:
            results.append(write.unit(transaction))


def _answer_of(ticket: _Entry[T]) -> T | Exception:
    try:
        return ticket.outcome()
    except Exception as error:
        return error


def _told(writes: Sequence[Write[Any]], answers: Sequence[Any]) -> list[Any]:
    """Call the callbacks of each write, and return the answers."""
    for write, answer in zip(writes, answers, strict=True):
        if isinstance(answer, CommitUnknown):
            write.unheard()
        elif not isinstance(answer, Exception):
            write.heard()
    return list(answers)


def _fulfil(batch: Sequence[_Entry[Any]], results: Sequence[Any]) -> None:
    for ticket, result in zip(batch, results, strict=True):
        ticket.succeed(result)


def _was_lost(error: Exception) -> bool:
    """Return whether the connection was lost before COMMIT was sent."""
    return isinstance(error.__cause__, DBAPIError) and error.__cause__.connection_invalidated


def _reason(error: BaseException) -> str:
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0] if lines else "no reason given"


def _old_schema(error: Exception) -> DatabaseUnavailable | None:
    """Return the refusal of a request whose table or column the database lacks; None for any other error."""
    reason = _reason(error)
    sqlstate = getattr(getattr(error, "orig", None), "sqlstate", None)
    if sqlstate in _NOT_MIGRATED or (sqlstate is None and any(words in reason for words in _MISSING_IN_SQLITE)):
        return DatabaseUnavailable(
            f"The database does not have the schema of this release ({reason}); nothing was stored. "
            "Run `slotkeeper migrate`, then try again."
        )
    return None


def _unavailable(reason: str) -> DatabaseUnavailable:
    return DatabaseUnavailable(f"The database did not take the request ({reason}); nothing was stored, try again.")


def _turn_expired() -> DatabaseUnavailable:
    return _unavailable("its turn did not come in time")


def _uncertain(reason: str) -> CommitUnknown:
    return CommitUnknown(
        f"The database did not answer ({reason}); whether the request was stored is not known.  Look for what it "
        "asked for, or ask again with the same Idempotency-Key."
    )
