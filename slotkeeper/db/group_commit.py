"""Group commit: writes of the same moment share one transaction.

    thread A   write ──▶ no leader: A leads ──▶ BEGIN, A's unit, COMMIT ──▶ hand over ──▶ disk ──▶ A returns
    thread B   write ──▶ waits ───────────────────────────────────────────▶ B leads: BEGIN, units of B and C, COMMIT
    thread C   write ──▶ waits ───────────────────────────────────────────────────────────▶ disk ──▶ B wakes C

    commit     The leader runs the units of all waiting writes in one transaction and commits it.  Then it hands the
               lead to the first write that waits, so that the next transaction begins while this one's disk is awaited.
    disk       On SQLite, a commit is visible before it is durable.  If a write of the group is durable, the threads of
               the group return after the disk has the commit.
    failure    If a unit raises, nothing is stored: the units are then committed one by one, the failed one last.
    lost       If the answer to COMMIT is lost, `commit_outcome` finds out on a new connection whether it was stored:
               then each caller gets its result, DatabaseUnavailable ("nothing was stored"), or CommitUnknown.

A thread that is alone leads itself and loses no time.  An event loop, which must not wait, calls `try_commit_all`, and
leaves the rest to a thread: `commit_all` if nothing was committed, else `sync`.  Every step but the wait for the disk
has a time limit (config.DatabaseTimeouts).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine, Text, bindparam, func, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from slotkeeper.clock import clock
from slotkeeper.config import DatabaseTimeouts
from slotkeeper.db import commit_outcome, time_limits
from slotkeeper.db.clock_offset import OffsetCheck
from slotkeeper.db.commit_outcome import CommitOutcome, TransactionMark, WitnessRow
from slotkeeper.db.compiled_sql import BulkInsert, CompiledStatement
from slotkeeper.db.driver_errors import (
    commit_unknown,
    explain_unavailable,
    first_line,
    nothing_stored,
    was_disconnected,
)
from slotkeeper.db.write_connection import Writer
from slotkeeper.errors import SlotkeeperError

T = TypeVar("T")

_LARGEST_GROUP = 128
_MAX_LOOP_CHARS = 64 * 1024  # A larger write would hold the event loop up.
_ASK_AGAIN_S = 0.1
_SLACK_S = 0.5
_LOCK = CompiledStatement(select(func.pg_advisory_xact_lock(func.hashtextextended(bindparam("p_name", type_=Text), 0))))
_TRANSACTION_NUMBER = CompiledStatement(select(func.txid_current_if_assigned()))


class _CommitLost(Exception):
    """A COMMIT was sent, and its answer was lost."""

    def __init__(self, mark: TransactionMark, cause: BaseException) -> None:
        super().__init__(cause)
        self.mark, self.reason = mark, first_line(cause)
        self.interrupt = None if isinstance(cause, Exception) else cause


class Transaction:
    """What a unit may use: the connection, and rows that are inserted together before the commit."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._collected: dict[BulkInsert, list[dict[str, Any]]] = {}
        self._sums: dict[tuple[BulkInsert, tuple[Any, ...]], dict[str, Any]] = {}
        self._checks: dict[tuple[str, Callable[[Transaction, Any], None], Any], None] = {}

    def insert(self, into: BulkInsert, row: dict[str, Any]) -> None:
        """Collect a row, which is inserted before the commit together with others of its table."""
        self._collected.setdefault(into, []).append(row)

    def add_up(self, into: BulkInsert, key: Mapping[str, Any], values: Mapping[str, int]) -> None:
        """Collect a row like `insert`; rows with the same `key` are inserted as one, with the sums of `values`."""
        row = self._sums.get((into, tuple(key.values())))
        if row is None:
            row = self._sums[into, tuple(key.values())] = {**key, **values}
            self.insert(into, row)
        else:
            for name, value in values.items():
                row[name] += value

    def added_up(self, into: BulkInsert, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the row that `add_up` has collected so far; the database does not show it yet."""
        return self._sums.get((into, tuple(key.values())))

    @property
    def is_alone(self) -> bool:
        """Whether no other transaction writes at the same time, so that what it has read stays true: on SQLite."""
        return self.connection.dialect.name == "sqlite"

    def lock(self, name: str) -> None:
        """Wait until no other transaction holds the lock `name`, and hold it until the end of this one."""
        if not self.is_alone:
            _LOCK.fetch_all(self.connection, {"p_name": name})

    def check_locked(self, name: str, check: Callable[["Transaction", T], None], about: T) -> None:
        """Have `check(transaction, about)` called after all units, under the lock `name`, once however often asked for.

        The locks of a group are taken in one order and held only for the commit.  If `check` raises, nothing is
        stored, and the units are committed one by one.  A transaction that is alone needs no check.
        """
        if not self.is_alone:
            self._checks[name, check, about] = None

    def flush_inserts(self) -> TransactionMark:
        """Make the checks, insert the collected rows, and return the mark that identifies the transaction."""
        for name, check, about in sorted(self._checks, key=lambda key: key[0]):
            self.lock(name)
            check(self, about)
        number = witness = None
        for into, rows in self._collected.items():
            inserted = into.execute(self.connection, rows)
            if into.is_witness:
                number, witness = inserted[0][0] if inserted else None, WitnessRow(into.table, rows[-1])
        if witness is None and self.connection.dialect.name == "postgresql":
            number = _TRANSACTION_NUMBER.fetch_value(self.connection, {})
        return TransactionMark(number, witness)


@dataclass(frozen=True, slots=True)
class Write(Generic[T]):
    """A unit of work, which is committed alone or together with others.

    unit: may run again if another unit fails in the shared transaction, so it must have no effect outside of its
    connection.  To refuse before it has written anything, it returns a SlotkeeperError instead of raising it; the
    other units are then not affected.
    durable: False if nothing was promised to a client: on SQLite a power cut may take the write back (the end of a
    process does not), and its caller does not wait for the disk, which takes 0.3 of 0.5 ms, unless another write of the
    group is durable.
    size: characters that are written, if many.
    is_urgent: a slot stands idle until it is committed, so a worker does not delay it to share a commit.
    clock_offset_ms: the offset that its times are based on; see slotkeeper/db/clock_offset.py.
    """

    unit: Callable[[Transaction], T | SlotkeeperError]
    durable: bool = True
    size: int = 0
    is_urgent: bool = False
    clock_offset_ms: int | None = field(default_factory=lambda: clock.get_offset_of_writes())

    def run(self, transaction: "Transaction", check: OffsetCheck) -> T | SlotkeeperError:
        """Run the unit, unless the clock was set since its times were taken."""
        return check.refuse(self.clock_offset_ms) or self.unit(transaction)


class _Entry(Generic[T]):
    """One write that waits for a commit."""

    __slots__ = ("_woken", "done", "error", "leads", "result", "until", "write")

    def __init__(self, write: Write[T], until: float) -> None:
        self.write = write
        self.until = until  # monotonic; refused if its transaction has not begun by then
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

    def result_or_error(self) -> T | Exception:
        """Return what `commit_all` returns for this write.  Raises an interrupt."""
        if self.error is None:
            return self.result  # type: ignore[return-value]
        if isinstance(self.error, Exception):
            return self.error
        raise self.error


class GroupCommit:
    """Commits the writes of one process to one database.  Thread-safe."""

    def __init__(self, engine: Engine, inquirer: Engine, limits: DatabaseTimeouts) -> None:
        """inquirer: gives a new connection each time, to find out the outcome of a COMMIT."""
        self._writer = Writer(engine, limits.lock_s)
        self._inquirer = inquirer
        self._limits = limits
        self._lock = threading.Lock()
        self._waiting: list[_Entry[Any]] = []
        self._has_leader = False
        self._commit_was_lost = False

    def commit_all(self, writes: Sequence[Write[Any]]) -> list[Any]:
        """Commit writes, in one transaction if none fails, and return the result or the error of each."""
        turn_s = min(self._limits.turn_s, time_limits.time_left() - self._limits.commit_s)
        if turn_s < 0:  # A transaction that began now might end later than its caller may wait.
            return [nothing_stored("too little time is left") for _ in writes]
        until = time.monotonic() + turn_s
        entries: list[_Entry[Any]] = [_Entry(write, until) for write in writes]
        with self._lock:
            self._waiting.extend(entries)
            entries[0].leads, self._has_leader = not self._has_leader, True
        try:
            return [self._result_or_error(entry) for entry in entries]
        except BaseException:
            self._abandon(entries)
            raise

    def try_commit_all(self, writes: Sequence[Write[Any]]) -> list[Any] | None:
        """Commit writes if that needs no waiting, and return the result or error of each.

        The disk is not awaited: call `sync` before a durable write is answered.  Returns None if nothing was stored:
        another thread or process writes now, a unit failed, the writes are large, or the database is PostgreSQL.
        After a COMMIT failed here, as on a full disk, nothing is tried until `commit_all` has succeeded.
        """
        size = sum(write.size for write in writes)
        if not self._writer.is_quick or self._commit_was_lost or size > _MAX_LOOP_CHARS:
            return None
        with self._lock:
            if self._has_leader:
                return None
            self._has_leader = True
        try:
            return self._commit_at_once(writes)
        finally:
            self._hand_over_lead()

    def sync(self) -> None:
        """Wait until the disk has everything that was committed.  Raises CommitUnknown."""
        try:
            self._writer.sync()
        except OSError as error:
            raise commit_unknown(first_line(error)) from error

    def sync_for_readers(self, log: str) -> None:
        """Wait until the disk has all that readers see.  log: the path of SQLite's log.  Raises OSError."""
        self._writer.sync_for_readers(log)

    def close(self) -> None:
        self._writer.close()

    # -- waiting and leading ---------------------------------------------------------------------------------

    def _commit_at_once(self, writes: Sequence[Write[Any]]) -> list[Any] | None:
        results: list[Any] = []

        def run_units(transaction: Transaction) -> None:
            check = OffsetCheck(transaction.connection)
            results.extend(write.run(transaction, check) for write in writes)

        try:
            self._transact(run_units, time.monotonic())
        except _CommitLost as lost:
            if lost.interrupt is not None:
                raise lost.interrupt from lost
            self._commit_was_lost = True
            return [commit_unknown(lost.reason) for _ in writes]  # To find out its outcome may take seconds.
        except Exception:
            return None
        return results

    def _result_or_error(self, entry: _Entry[T]) -> T | Exception:
        try:
            self._wait_until_done(entry)
        except Exception as error:
            return error
        return entry.result_or_error()

    def _wait_until_done(self, entry: _Entry[Any]) -> None:
        """Wait until an entry is done, or lead.  Raises DatabaseUnavailable, CommitUnknown if the wait is too long."""
        if not entry.leads and not entry.wait(entry.until - time.monotonic()):
            self._withdraw(entry)
        if not entry.done:
            self._lead()

    def _withdraw(self, entry: _Entry[Any]) -> None:
        """Withdraw an entry whose turn is late.  Raises DatabaseUnavailable, unless its transaction has just begun.

        Then it waits for the end of the transaction.  Raises CommitUnknown if that takes too long.
        """
        with self._lock:
            if entry in self._waiting and not entry.leads:
                self._waiting.remove(entry)
                raise _turn_expired()
        if not entry.wait(self._limits.commit_s + _SLACK_S):
            raise commit_unknown("the commit takes very long")

    def _abandon(self, entries: Sequence[_Entry[Any]]) -> None:
        """Remove entries whose thread was interrupted, and hand over the lead if one of them has it."""
        with self._lock:
            self._waiting = [entry for entry in self._waiting if entry not in entries]
        if any(entry.leads and not entry.done for entry in entries):
            self._hand_over_lead()

    def _lead(self) -> None:
        """Commit the waiting entries, hand over the lead, and then wait for the disk."""
        with self._lock:
            group, self._waiting = self._waiting[:_LARGEST_GROUP], self._waiting[_LARGEST_GROUP:]
        try:
            self._commit_in_time(group)
        finally:
            self._hand_over_lead()
            self._sync_and_wake(group)

    def _hand_over_lead(self) -> None:
        with self._lock:
            first = self._waiting[0] if self._waiting else None
            self._has_leader = first is not None
            if first is not None:
                first.leads = True
                first.wake()

    def _sync_and_wake(self, group: Sequence[_Entry[Any]]) -> None:
        """Wait for the disk, if a write of the group is durable, and wake the threads of the group."""
        try:
            durable = [entry for entry in group if entry.done and entry.error is None and entry.write.durable]
            if durable:
                self._sync_entries(durable)
        finally:
            for entry in group:
                if not entry.done:  # Ctrl-C interrupted the leader; only this thread raises it.
                    entry.fail(nothing_stored("the commit was interrupted"))
            for entry in group[1:]:
                entry.wake()

    def _sync_entries(self, durable: Sequence[_Entry[Any]]) -> None:
        try:
            self._writer.sync()
        except BaseException as error:
            for entry in durable:
                entry.fail(commit_unknown(first_line(error)))
            if not isinstance(error, OSError):
                raise

    # -- one transaction -------------------------------------------------------------------------------------

    def _commit_in_time(self, group: Sequence[_Entry[Any]]) -> None:
        """Refuse the entries whose time is over, and commit the others."""
        now = time.monotonic()
        for entry in group:
            if entry.until < now:
                entry.fail(_turn_expired())
        in_time = [entry for entry in group if not entry.done]
        if in_time:
            self._commit(in_time, now + self._limits.transaction_s)

    def _commit(self, group: Sequence[_Entry[Any]], until: float, retry: bool = True) -> bool:
        """Set the outcome of every entry of the group.  Returns False if the transaction did not begin."""
        results: list[Any] | None = None

        def run_units(transaction: Transaction) -> None:
            nonlocal results
            results, check = [], OffsetCheck(transaction.connection)
            for entry in group:
                results.append(entry.write.run(transaction, check))
            interrupted = commit_unknown("the commit was interrupted")
            for entry in group:  # In force from here to the answer, also if Ctrl-C interrupts the leader.
                entry.fail(interrupted)

        try:
            self._transact(run_units, until)
        except _CommitLost as lost:
            self._resolve_lost_commit(group, results or [], lost)
        except Exception as error:
            if results is not None and len(group) > 1:
                return self._commit_singly(group, len(results), until)
            # On PostgreSQL another process may insert a row between a unit's SELECT and its INSERT.  Or the kept
            # connection was lost, and the transaction has not begun.
            if results is not None and retry and (isinstance(error, IntegrityError) or was_disconnected(error)):
                return self._commit(group, until, retry=False)
            for entry in group:
                entry.fail(error)
        else:
            self._commit_was_lost = False
            _succeed(group, results or [])
        return results is not None

    def _commit_singly(self, group: Sequence[_Entry[Any]], failed: int, until: float) -> bool:
        """Commit each entry in a separate transaction, after a shared one stored nothing.

        failed: number of the unit that raised, which comes last: it may have waited for a row that another process has
        locked.  As many as there are entries: inserting the collected rows raised.
        """
        in_order = [*group[:failed], *group[failed + 1 :], *group[failed : failed + 1]]
        for n, entry in enumerate(in_order):
            if not self._commit([entry], until):
                for other in in_order[n + 1 :]:
                    other.fail(entry.error)  # Otherwise each would wait for the time limit in turn.
                return False
        return True

    def _resolve_lost_commit(self, group: Sequence[_Entry[Any]], results: Sequence[Any], lost: _CommitLost) -> None:
        """Find out the outcome of a COMMIT whose answer was lost, and set it for every entry."""
        for entry in group:
            entry.fail(_with_cause(commit_unknown(lost.reason), lost))
        found = self._find_outcome(lost.mark)
        if found is CommitOutcome.COMMITTED:
            _succeed(group, results)
        elif found is CommitOutcome.NOT_COMMITTED:
            for entry in group:
                entry.fail(_with_cause(nothing_stored(lost.reason), lost))
        if lost.interrupt is not None:
            raise lost.interrupt

    def _find_outcome(self, mark: TransactionMark) -> CommitOutcome:
        with time_limits.time_limit(self._limits.inquiry_s, alone=True):
            while True:
                try:
                    with self._inquirer.connect() as connection:
                        found = commit_outcome.find_outcome(connection, mark)
                except SQLAlchemyError:
                    found = CommitOutcome.UNDECIDED
                if found is not CommitOutcome.UNDECIDED or time_limits.time_left() < _ASK_AGAIN_S:
                    return found
                time.sleep(_ASK_AGAIN_S)

    def _transact(self, run_units: Callable[[Transaction], None], until: float) -> None:
        """Run units and commit.  Raises DatabaseUnavailable if nothing was stored; _CommitLost if that is unknown."""
        try:
            with time_limits.time_limit(until - time.monotonic(), alone=True):
                connection = self._writer.begin()
                try:
                    transaction = Transaction(connection)
                    run_units(transaction)
                    mark = transaction.flush_inserts()
                except BaseException:
                    self._writer.undo(connection)
                    raise
                try:
                    self._writer.commit(connection)
                except BaseException as error:  # also Ctrl-C on the way there
                    self._writer.drop(connection)
                    raise _CommitLost(mark, error) from error
        except SQLAlchemyError as error:
            if (unavailable := explain_unavailable(error)) is not None:
                raise unavailable from error
            raise


def _succeed(group: Sequence[_Entry[Any]], results: Sequence[Any]) -> None:
    for entry, result in zip(group, results, strict=True):
        entry.succeed(result)


def _with_cause(error: Exception, lost: _CommitLost) -> Exception:
    """Return an error that is raised in another place, with the driver's error as its cause."""
    error.__cause__ = lost.__cause__
    return error


def _turn_expired() -> Exception:
    return nothing_stored("its turn did not come in time")
