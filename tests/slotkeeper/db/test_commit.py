"""Group commit isolates each unit, and returns no result before the commit.

An unavailable database raises an error and stores nothing.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from sqlalchemy import event, func, insert, select, text
from sqlalchemy.exc import OperationalError

from slotkeeper.config import DatabaseTimeouts
from slotkeeper.db import Database, Transaction, time_limits
from slotkeeper.db.schema import counters
from slotkeeper.errors import DatabaseUnavailable, IdempotencyConflict
from slotkeeper.jobs import ledger
from slotkeeper.jobs.events import add_event
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import events, messages
from slotkeeper.jobs.tables import jobs as jobs_table
from tests.support.builders import T0, a_job, a_queued_job, a_running_job, at_once, eventually, row_of, trail_of
from tests.support.ends import store_end
from tests.support.groups import held, in_one_group
from tools.cluster.direct_starts import store_start

Act = Callable[[], Any]


class Crash(BaseException):
    """Ends the thread that leads, as Ctrl-C or a soft time limit would."""


@contextmanager
def _commits(database: Database) -> Iterator[list[object]]:
    seen: list[object] = []
    append = seen.append  # one object: the listener is removed by its identity
    event.listen(database.engine, "commit", append)
    yield seen
    event.remove(database.engine, "commit", append)


def _raise(error: BaseException) -> Any:
    raise error


def _count(database: Database, table: Any) -> int:
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


# -- group commit ----------------------------------------------------------------------------------------------


def test_many_threads_write_much_and_each_write_is_committed_exactly_once(database, store):
    threads, writes = 8, 25
    mine = [[a_job() for _ in range(writes)] for _ in range(threads)]
    answers = at_once(*[lambda own=own: [store.submit([job], T0)[0] for job in own] for own in mine])
    for own, answered in zip(mine, answers, strict=True):
        assert [a.id for a in answered] == [job.id for job in own]  # to the right caller
        assert [a.seq for a in answered] == sorted(a.seq for a in answered)
    assert _count(database, jobs_table) == _count(database, events) == threads * writes


def test_many_concurrent_writes_of_two_databases_lose_and_duplicate_no_job(database, store):
    other = JobStore(Database(database.url))
    work = [lambda s=s: [s.submit([a_job()], T0)[0] for _ in range(25)] for s in (store, other) * 3]
    answers = [answer for answered in at_once(*work) for answer in answered]
    assert len({answer.seq for answer in answers}) == 150
    assert _count(database, jobs_table) == _count(database, events) == 150
    other.database.close()


def test_waiting_units_share_one_commit_and_each_gets_its_result(database):
    with _commits(database) as seen:
        results = in_one_group(database, *[lambda n=n: database.write(lambda _: n) for n in range(6)])
    assert results == [0, 1, 2, 3, 4, 5]
    assert len(seen) == 2  # the holder's, and theirs


def test_a_commit_holds_at_most_one_group_of_units_and_the_rest_use_later_commits(database, store, monkeypatch):
    monkeypatch.setattr("slotkeeper.db.group_commit._LARGEST_GROUP", 4)
    with _commits(database) as seen:
        answers = in_one_group(database, *[lambda: store.submit([a_job()], T0)[0].seq for _ in range(10)])
    assert len(set(answers)) == 10
    assert len(seen) == 1 + 3


def test_no_unit_returns_a_result_before_the_commit(database, store):
    outside = Database(database.url)
    answered: list[bool] = []

    def look_before_commit(_: object) -> None:
        answered.append(any(result.done() for result in results))
        assert _count(outside, jobs_table) == 0

    results: list[Future[Any]] = []
    with ThreadPoolExecutor(3) as pool:
        with held(database):
            results += [pool.submit(store.submit, [a_job()], T0) for _ in range(3)]
            eventually(lambda: len(database._group._waiting) == 3)
            event.listen(database.engine, "commit", look_before_commit)
        assert all(result.result(30) for result in results)
    event.remove(database.engine, "commit", look_before_commit)
    assert answered == [False, False]
    assert _count(outside, jobs_table) == 3
    outside.close()


def test_a_unit_that_fails_does_not_affect_other_units_of_its_group(database, store):
    before, after = a_job(), a_job()
    first, bad, last = in_one_group(
        database,
        lambda: store.submit([before], T0)[0].id,
        lambda: database.write(lambda _: _raise(ZeroDivisionError("mine"))),
        lambda: store.submit([after], T0)[0].id,
    )
    assert (first, str(bad), last) == (before.id, "mine", after.id)
    assert _count(database, jobs_table) == _count(database, events) == 2


def test_an_idempotency_conflict_leaves_the_other_units_in_one_commit(database, store):
    store.submit([a_job(idempotency_key="k", fingerprint="one")], T0)
    with _commits(database) as seen:
        first, refused, last = in_one_group(
            database,
            lambda: store.submit([a_job()], T0),
            lambda: store.submit([a_job(idempotency_key="k", fingerprint="two")], T0),
            lambda: store.submit([a_job()], T0),
        )
    assert isinstance(refused, IdempotencyConflict)
    assert (len(first), len(last), _count(database, jobs_table)) == (1, 1, 3)
    assert len(seen) == 2  # the holder's, and theirs


def test_a_unit_whose_sql_fails_does_not_affect_other_units_of_its_group(database, store):
    broken = text("INSERT INTO no_such_table VALUES (1)")
    first, bad, last = in_one_group(
        database,
        lambda: len(store.submit([a_job()], T0)),
        lambda: database.write(lambda tx: tx.connection.execute(broken)),
        lambda: len(store.submit([a_job()], T0)),
    )
    assert (first, last) == (1, 1)
    assert isinstance(bad, Exception)
    assert _count(database, jobs_table) == _count(database, events) == 2


def test_a_unit_whose_event_cannot_be_written_does_not_affect_other_units_of_its_group(database, store):
    """The events of the whole group are written at its end; a failure there affects only the unit that caused it."""
    run = a_running_job(store)

    def spoil(tx: Transaction) -> None:
        tx.connection.execute(insert(counters), {"name": "spoiled", "value": 1})
        add_event(tx, None, "t", T0, {})

    moved, bad, accepted = in_one_group(
        database,
        lambda: store_end(store, run.job.id, run.attempt, Reason.FINISHED, T0, result="{}"),
        lambda: database.write(spoil),
        lambda: store.submit([a_job()], T0)[0],
    )
    assert moved.to == "completed"
    assert isinstance(bad, Exception)
    assert trail_of(store, run.job.id)[-1] == ("job.completed", "finished", 1)
    assert trail_of(store, accepted.id) == [("job.enqueued", "submitted", 0)]
    assert _count(database, counters) == 0


def test_job_2_a_transition_keeps_its_one_event_when_a_later_unit_of_its_group_fails(database, store):
    run = a_running_job(store, callback_url="https://c.example/h")
    moved, _ = in_one_group(
        database,
        lambda: store_end(store, run.job.id, run.attempt, Reason.FINISHED, T0, result="{}"),
        lambda: database.write(lambda _: _raise(ZeroDivisionError())),
    )
    assert moved.to is State.COMPLETED and _count(database, messages) == 1
    assert [why for _, why, _ in trail_of(store, run.job.id)] == ["submitted", "started", "finished"]


def test_only_the_first_of_two_starts_of_one_job_in_one_group_succeeds(database, store):
    job = a_queued_job(store)
    first, second, third = in_one_group(
        database,
        lambda: store_start(store, job.id, "gpu1", "gpu1-slot0", "l1", T0),
        lambda: store_start(store, job.id, "gpu2", "gpu2-slot0", "l2", T0),
        lambda: store_end(store, job.id, 1, Reason.FINISHED, T0, result="{}"),
    )
    assert (first.attempt, second, third.to) == (1, None, "completed")
    assert len(trail_of(store, job.id)) == 3


def test_an_interrupted_leader_leaves_no_unit_waiting_or_with_a_wrong_result(database, store):
    """A unit without a commit is reported as not stored, and its caller may try again."""

    def lead() -> Any:
        try:
            return database.write(lambda _: _raise(Crash()))
        except Crash as crash:
            return crash

    crashed, neighbour = in_one_group(database, lead, lambda: store.submit([a_job()], T0))
    assert isinstance(crashed, Crash)
    assert type(neighbour) is DatabaseUnavailable
    assert _count(database, jobs_table) == 0
    assert store.submit([a_job()], T0)


def test_a_leader_that_is_interrupted_while_it_is_tried_alone_takes_no_neighbour_along(database, store):
    fails_first = threading.Event()

    def interrupted(_: Transaction) -> None:
        if fails_first.is_set():
            raise Crash  # on its own
        fails_first.set()
        raise ZeroDivisionError  # in the group

    def lead() -> Any:
        try:
            return database.write(interrupted)
        except Crash as crash:
            return crash

    crashed, (neighbour,) = in_one_group(database, lead, lambda: store.submit([a_job()], T0))
    assert isinstance(crashed, Crash)
    assert store.get(neighbour.id).state == "queued"


def test_a_unit_that_conflicts_with_a_concurrent_insert_is_repeated(database):
    """Another process inserted it in between; on PostgreSQL only the insert shows that."""
    looks = iter([True, False])

    def unit(tx: Transaction) -> str:
        if next(looks):
            tx.connection.execute(insert(counters), [{"name": "n", "value": 1}] * 2)
        return "saw it"

    assert database.write(unit) == "saw it"
    assert _count(database, counters) == 0


# -- a database that is gone -----------------------------------------------------------------------------------


def _is_unavailable(act: Act, *, reads: bool = False) -> None:
    with pytest.raises(DatabaseUnavailable) as refused:
        act()
    assert type(refused.value) is DatabaseUnavailable  # not an unknown
    assert refused.value.retry_after_s > 0
    assert ("nothing was stored" in refused.value.detail) is not reads  # A read does not know what was.


def _nowhere(kind: str, folder: Any) -> str:
    if kind == "postgresql":
        return f"postgresql://nobody@/record?host={folder}"  # no socket there: connection refused
    (folder / "record.db").mkdir()  # a folder cannot be opened as a file, not even by root
    return f"sqlite:///{folder / 'record.db'}"


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_database_that_cannot_be_opened_is_unavailable(kind, tmp_path):
    database = Database(_nowhere(kind, tmp_path))
    store = JobStore(database)
    _is_unavailable(lambda: store.submit([a_job()], T0))
    _is_unavailable(lambda: store.get("j"), reads=True)
    _is_unavailable(lambda: ledger.read(database).by_state, reads=True)
    database.close()


def test_a_connection_that_breaks_in_the_middle_of_a_unit_stores_nothing_and_the_next_one_works(postgres_url):
    database = Database(postgres_url)
    store = JobStore(database)

    def cut(tx: Transaction) -> None:
        store.submit_write([a_job()], T0).unit(tx)
        pid = tx.connection.execute(text("SELECT pg_backend_pid()")).scalar()
        with database.read() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
        tx.connection.execute(text("SELECT 1"))

    _is_unavailable(lambda: database.write(cut))
    assert _count(database, jobs_table) == 0
    assert len(store.submit([a_job()], T0)) == 1
    database.close()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_settings_of_a_write_connection_do_not_apply_to_others_after_a_failed_write(database):
    with pytest.raises(ZeroDivisionError):
        database.write(lambda _: 1 // 0)
    with ExitStack() as stack:
        for _ in range(8):
            connection = stack.enter_context(database.read())
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == database.limits.lock_s * 1000
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2


def test_connections_that_the_server_closed_while_idle_are_replaced_unseen(postgres, postgres_url):
    database = Database(postgres_url)
    store = JobStore(database)
    store.submit([a_job()], T0)
    postgres.disconnect_clients(postgres_url)
    assert len(store.submit([a_job()], T0)) == 1
    assert ledger.read(store.database).by_state["queued"] == 2
    database.close()


def test_a_server_that_became_a_read_only_standby_is_unavailable(postgres_url):
    database = Database(postgres_url)
    read_only = text("SET TRANSACTION READ ONLY")
    _is_unavailable(
        lambda: database.write(
            lambda tx: (tx.connection.execute(read_only), JobStore(database).submit_write([a_job()], T0).unit(tx))
        )
    )
    database.close()


def test_without_a_free_connection_the_database_is_unavailable(database, monkeypatch):
    monkeypatch.setattr(database.engine.pool, "_timeout", 0.01)
    monkeypatch.setattr(database.engine.pool, "_max_overflow", 0)
    taken = [database.engine.connect() for _ in range(database.engine.pool.size())]
    _is_unavailable(lambda: JobStore(database).submit([a_job()], T0))
    _is_unavailable(lambda: ledger.read(database).by_state, reads=True)
    for connection in taken:
        connection.close()
    assert JobStore(database).submit([a_job()], T0)


@pytest.fixture
def impatient(sqlite_url) -> Iterator[Database]:
    """An SQLite record that waits 50 ms for a lock."""
    database = Database(sqlite_url, DatabaseTimeouts(lock_s=0.05))
    yield database
    database.close()


@pytest.fixture
def lock(sqlite_url) -> Iterator[sqlite3.Connection]:
    """Somebody else's connection, to hold the only write lock with."""
    connection = sqlite3.connect(
        sqlite_url.removeprefix("sqlite:///"), isolation_level=None, timeout=0, check_same_thread=False
    )
    yield connection
    connection.close()


def test_a_database_locked_by_another_process_refuses_writes_and_can_still_be_read(impatient, lock):
    store = JobStore(impatient)
    job = a_queued_job(store)
    lock.execute("BEGIN IMMEDIATE")
    _is_unavailable(lambda: store_start(store, job.id, "gpu1", "gpu1-slot0", "l", T0))
    assert store.get(job.id).state == "queued"
    lock.execute("ROLLBACK")
    assert store_start(store, job.id, "gpu1", "gpu1-slot0", "l", T0).attempt == 1


def test_a_group_that_cannot_begin_fails_as_a_whole_after_one_attempt(impatient, lock, monkeypatch):
    groups: list[int] = []
    commit = impatient._group._commit

    def lock_out(group: Any, *more: Any) -> bool:
        """Lock the database between the holder's commit and the group's BEGIN."""
        lock.execute("BEGIN IMMEDIATE")
        groups.append(len(group))
        return commit(group, *more)

    store = JobStore(impatient)
    answers: list[Future[Any]] = []
    with ThreadPoolExecutor(6) as pool:
        with held(impatient):
            answers += [pool.submit(store.submit, [a_job()], T0) for _ in range(6)]
            eventually(lambda: len(impatient._group._waiting) == 6)
            monkeypatch.setattr(impatient._group, "_commit", lock_out)
        errors = [answer.exception(30) for answer in answers]
    assert [type(error) for error in errors] == [DatabaseUnavailable] * 6
    assert groups == [6]


def test_a_group_that_loses_its_database_midway_fails_after_one_connection_attempt(database, store, monkeypatch):
    begins: list[bool] = []

    def gone(_: object) -> Any:
        begins.append(True)
        raise OperationalError("BEGIN", {}, Exception("connection refused"))

    def lose(_: Transaction) -> None:
        monkeypatch.setattr(type(database.engine), "connect", gone)
        raise OperationalError("SELECT 1", {}, Exception("connection reset"))

    acts = [lambda: database.write(lose)] + [lambda: store.submit([a_job()], T0)] * 5
    errors = in_one_group(database, *acts)
    assert [type(error) for error in errors] == [DatabaseUnavailable] * 6
    assert begins == [True]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_connection_that_was_lost_between_two_writes_is_replaced_without_an_error(database, store):
    first = a_queued_job(store)
    with database.engine.connect() as other:
        mine = text(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        other.execute(mine)
    second = a_queued_job(store)
    assert second.seq > first.seq
    assert store_start(store, second.id, "gpu1", "gpu1-slot0", "l", T0).attempt == 1


def test_a_write_is_not_seen_half(database, store):
    """Readers see a job and its event together or not at all."""
    outside = Database(database.url)
    seen: list[int] = []
    watch = JobStore(outside)
    job = a_queued_job(store)

    def look(connection: object, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO events"):  # the job's UPDATE has run, its event is about to
            seen.append(row_of(outside, job.id)["attempt"])
            seen.append(len(trail_of(watch, job.id)))

    event.listen(database.engine, "before_cursor_execute", look)
    store_start(store, job.id, "gpu1", "gpu1-slot0", "l", T0)
    event.remove(database.engine, "before_cursor_execute", look)
    assert seen == [0, 1]
    assert (row_of(outside, job.id)["attempt"], len(trail_of(watch, job.id))) == (1, 2)
    outside.close()


def test_a_write_that_might_outlast_the_time_of_its_request_is_refused_at_once(database: Database) -> None:
    ran: list[bool] = []
    with time_limits.time_limit(database.limits.commit_s - 0.1), pytest.raises(DatabaseUnavailable, match="time"):
        database.write(lambda _: ran.append(True))
    assert ran == []
    with time_limits.time_limit(database.limits.request_s):
        database.write(lambda _: ran.append(True))
    assert ran == [True]


def test_the_time_of_one_request_does_not_limit_the_transaction_of_others(database: Database) -> None:
    left: list[float] = []
    with time_limits.time_limit(database.limits.commit_s + 0.5):
        database.write(lambda _: left.append(time_limits.time_left()))
    assert left[0] > database.limits.transaction_s - 1
