"""The database: one committer per process.

Threads that write at the same moment share one transaction (group commit): each hands in a *unit*, one of
them becomes the leader, runs all units that are waiting, commits once, and wakes the others.  Alone, a caller
leads itself and pays nothing for it.  Nobody is answered before the commit.  An event loop, which must not wait, tries
to commit by itself and leaves the rest to a thread (`Batch`).

Everything has its time (config.Limits), and an unknown is never called a no: when the answer to a COMMIT is lost,
its fate is asked on a new connection before anybody is answered.
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
_LARGEST_AT_ONCE = 64 * 1024  # signs: more would take its time, also where nobody is waited for
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
    """A COMMIT was sent, and what came of it was not heard."""

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
        """Have a row written before the commit, together with all others of its kind."""
        self._collected.setdefault(into, []).append(row)

    def flush_inserts(self) -> TransactionMark:
        """Write the collected rows, and tell by what the transaction can be known."""
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
    """A unit, to be committed alone or with others.  `relaxed`, `committed`: as in Database.write.

    `heard`, `unheard`: what is done when its commit was answered, or when it is not known whether it was stored.
    `alike`: does at once what the units of several writes would do that have it, come one after another, and are
    `about` something of its own each.  It takes what they `asked`, and answers as many results, or None: it cannot.
    `size`: how much it writes, in signs, where that may be much.
    """

    unit: Unit[T]
    relaxed: bool = False
    on_committed: Callable[[T], object] | None = None
    heard: Callable[[], object] = _nothing
    unheard: Callable[[], object] = _nothing
    alike: Callable[[Transaction, Sequence[Any]], Sequence[T] | None] | None = None
    about: str = ""
    asked: Any = None
    size: int = 0


class Batch:
    """Writes that are committed together, by the thread that brings them or by another, and what came of them.

    One guarantee, whoever commits: the answers are there when what they promise is on the disk, and not before.
    `answers`: of each write its result or an exception; None: not known yet.  `committed`: the same when all others
    see it, and the disk is still to be waited for.
    """

    __slots__ = ("answers", "committed", "writes")

    def __init__(self, writes: Sequence[Write[Any]]) -> None:
        self.writes = writes
        self.committed: Sequence[Any] | None = None
        self.answers: list[Any] | None = None

    @property
    def size(self) -> int:
        """How much it writes, in signs, where that may be much."""
        return sum(write.size for write in self.writes)


class _Entry(Generic[T]):
    """One unit in the line for the next commit."""

    __slots__ = ("_committed", "_woken", "done", "error", "leads", "result", "until", "write")

    def __init__(self, write: Write[T], until: float) -> None:
        self.write = write
        self._committed = write.on_committed
        self.until = until  # monotonic: when it is refused if it has not been begun
        self.leads = False
        self.done = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self._woken = threading.Lock()
        self._woken.acquire()

    def wait(self, seconds: float) -> bool:
        """False: nobody has woken it."""
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

    def call_on_committed(self) -> None:
        """Tell who wants to know at once that it is committed; no more than once."""
        if self.done and self.error is None:
            tell, self._committed = self._committed, None
            if tell is not None:
                tell(self.result)  # type: ignore[arg-type]

    def outcome(self) -> T:
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]


class Database:
    """One record.  Safe to share between threads, not across a fork."""

    def __init__(self, url: str, limits: DatabaseTimeouts | None = None) -> None:
        self.url = url
        self.limits = limits or DatabaseTimeouts()
        self.engine = sqlite.make_engine(url, self.limits)
        self._writer = Writer(self.engine, self.limits.lock_s)
        dialect = self.engine.dialect.name
        self._reader = self.engine.execution_options(**sqlite.READ_OPTIONS[dialect])
        self._snapshots = self.engine.execution_options(**sqlite.SNAPSHOT_OPTIONS[dialect])
        # For the question what became of a commit: a pooled connection may be as silent as the one that was lost.
        self._inquirer = sqlite.make_engine(url, self.limits, pooled=False).execution_options(
            **sqlite.READ_OPTIONS[dialect]
        )
        self._lock = threading.Lock()
        self._waiting: list[_Entry[Any]] = []
        self._has_leader = False
        self._must_reconnect = False

    def write(self, unit: Unit[T], *, relaxed: bool = False, committed: Callable[[T], object] | None = None) -> T:
        """Run `unit` in a transaction, perhaps with others, and return its result once committed.

        `relaxed`: nobody was promised anything.  On SQLite it need not survive a power cut, though it does
        survive the end of any process, and spares the wait for the disk (0.3 of 0.5 ms).

        `committed` is called with the result in this thread as soon as everybody sees it, if that can be while the disk
        is waited for: what others can do meanwhile may begin.  It must not wait for anything.

        `unit` may be run again if a neighbour spoils the shared transaction: it must have no effect but on
        its connection.  What it refuses before it has written anything, it returns as an error, which is raised
        here: so its neighbours are not concerned.  Raises what the unit raised, or RecordUnavailable; then nothing
        of it was stored; or RecordUncertain.
        """
        return self.commit(Write(unit, relaxed, committed))

    def commit(self, write: Write[T]) -> T:
        """One write.  Raises as `write`."""
        (answer,) = self.commit_all([write])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def commit_all(self, writes: Sequence[Write[Any]]) -> list[Any]:
        """Several writes together, in one transaction if none spoils it; the result, or the error, of each."""
        batch = Batch(writes)
        self.complete([batch])
        return batch.answers or []

    def try_commit_all(self, batch: Batch) -> None:
        """Commit a batch if that waits for nothing; whatever is left to do then, `complete` does.

        Only on SQLite, while no other thread or process writes, and if it is not much.  A batch of which one write
        spoils what they share is left whole to `complete`, which finds out which.  So is any after a COMMIT that failed
        here, as on a full disk, until one of `complete`'s has not: that connects anew, and asks what became of it.
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
        """Have batches committed, if they are not yet, and the disk waited for, so that each has its answers."""
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
            answers = found if lost is None else [it if isinstance(it, Exception) else lost for it in found]
            batch.answers = _told(batch.writes, answers)

    def _commit_all(self, writes: Sequence[Write[Any]]) -> list[Any]:
        until = time.monotonic() + self.limits.turn_s
        tickets: list[_Entry[Any]] = [_Entry(it, until) for it in writes]
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
        """One transaction, and no second.  None: nothing of it was stored, whatever was in the way."""
        results: list[Any] = []
        try:
            self._transact(lambda transaction: _run_units(transaction, writes, results), time.monotonic())
        except _CommitLost as lost:
            if lost.interrupt is not None:
                raise lost.interrupt from lost
            self._must_reconnect = True
            return [_uncertain(lost.reason) for _ in writes]  # To ask what came of it may take seconds.
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
        """Have a ticket done.  Raises RecordUnavailable: its turn does not come."""
        if not ticket.leads and not ticket.wait(self.limits.turn_s):
            self._withdraw(ticket)
        if not ticket.done:
            self._lead()

    def _withdraw(self, ticket: _Entry[Any]) -> None:
        """Give up the turn that did not come.  Raises RecordUnavailable, unless it has come just now."""
        with self._lock:
            if ticket in self._waiting and not ticket.leads:
                self._waiting.remove(ticket)
                raise _turn_expired()
        if not ticket.wait(self.limits.transaction_s + self.limits.inquiry_s + _SLACK_S):
            raise _uncertain("the commit takes very long")

    def _abandon(self, tickets: Sequence[_Entry[Any]]) -> None:
        """Nobody waits for these any more: who has the lead must not keep it."""
        with self._lock:
            self._waiting = [ticket for ticket in self._waiting if ticket not in tickets]
        if any(ticket.leads and not ticket.done for ticket in tickets):
            self._hand_over_lead()

    def _lead(self) -> None:
        """Commit what waits, our own unit among it, and pass the lead on before the disk is waited for."""
        with self._lock:
            batch, self._waiting = self._waiting[:_LARGEST_BATCH], self._waiting[_LARGEST_BATCH:]
        try:
            self._commit_in_time(batch)
        finally:
            self._hand_over_lead()
            try:
                if len(batch) == 1:  # Else it would keep the others from the disk.
                    batch[0].call_on_committed()
            finally:
                self._sync_and_wake(batch)

    def _hand_over_lead(self) -> None:
        with self._lock:
            next_run = self._waiting[0] if self._waiting else None
            self._has_leader = next_run is not None
            if next_run is not None:
                next_run.leads = True
                next_run.wake()

    def _sync_and_wake(self, batch: Sequence[_Entry[Any]]) -> None:
        """Whoever was promised something is answered when it is on the disk."""
        try:
            promised = [ticket for ticket in batch if ticket.done and ticket.error is None and not ticket.write.relaxed]
            if promised:
                self._secure(promised)
        finally:
            for ticket in batch:
                if not ticket.done:  # Ctrl-C or the like came in between; it is raised in this thread alone.
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
        """Begin what is not too late, and answer every ticket of `batch`, all within their time."""
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
        """Answer every ticket of `batch`.  False: the database did not even begin.

        `singly`: each unit by itself, so that it is known which fails.
        """
        results: list[Any] | None = None

        def work(transaction: Transaction) -> None:
            nonlocal results
            results = []
            _run_units(transaction, [ticket.write for ticket in batch], results, singly)
            interrupted = _uncertain("the commit was interrupted")
            for ticket in batch:  # From here on, until it is heard; also if Ctrl-C comes in between.
                ticket.fail(interrupted)

        try:
            self._transact(work, until)
        except _CommitLost as lost:
            self._resolve_lost_commit(batch, results or [], lost)
        except Exception as error:
            if results is not None and len(batch) > 1:
                return self._commit_apart(batch, len(results), until, singly)
            # On PostgreSQL another process may insert a row between our look and our insert.  And the connection that
            # was kept may have been lost since: then nothing was begun on it.
            if results is not None and look_again and (isinstance(error, IntegrityError) or _was_lost(error)):
                return self._commit(batch, until, look_again=False, singly=singly)
            for ticket in batch:
                ticket.fail(error)
        else:
            self._must_reconnect = False
            _fulfil(batch, results or [])
        return results is not None

    def _commit_apart(self, batch: Sequence[_Entry[Any]], n: int, until: float, singly: bool) -> bool:
        """Nothing of a group was stored: try again without its `n`-th unit, which spoiled it, and that one alone.

        If none of them did, but what they wrote together, each is tried alone.  If it may be that several did something
        at once, of which the `n`-th is the first, all are tried again to find out who it was.
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
                    ticket.fail(group[0].error)  # Or each would wait for the time-out in turn.
                return False
        return True

    def _resolve_lost_commit(self, batch: Sequence[_Entry[Any]], results: Sequence[Any], lost: _CommitLost) -> None:
        """Answer the tickets of a COMMIT that was not answered itself, with what is found out."""
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
        """Have `work` done in a transaction.  Raises RecordUnavailable: nothing was stored; _Unanswered."""
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
        """A connection on which each statement sees the newest commit.  Raises RecordUnavailable.

        `patient`: no request waits for it, or it looks at all jobs.
        """
        with self._reading(self._reader, math.inf if patient else self.limits.read_s) as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection for one long read, whose rows may be fetched page by page.  Raises RecordUnavailable.

        What is read stands still meanwhile, and the database keeps what others remove: do not hold it for hours.
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

    def close(self) -> None:
        self._writer.close()
        self.engine.dispose()


def _run_units(
    transaction: Transaction, writes: Sequence[Write[Any]], results: list[Any], singly: bool = False
) -> None:
    """Do what these ask for, together what can be, and add what each came to."""
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
        ticket.call_on_committed()
        return ticket.outcome()
    except Exception as error:
        return error


def _told(writes: Sequence[Write[Any]], answers: Sequence[Any]) -> list[Any]:
    """The answers, of which each write has been told."""
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
    """Whether the connection went away before the COMMIT was sent, and not the database, as far as is known."""
    return isinstance(error.__cause__, DBAPIError) and error.__cause__.connection_invalidated


def _reason(error: BaseException) -> str:
    said = str(getattr(error, "orig", None) or error).strip().splitlines()
    return said[0] if said else "no reason given"


def _old_schema(error: Exception) -> DatabaseUnavailable | None:
    """Return the refusal of a request whose table or column the database lacks; None: `error` is another."""
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
