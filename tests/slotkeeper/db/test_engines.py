"""The setup of the database engines; their guarantees are tested in tests/slotkeeper/db/test_commit.py."""

import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from migrations import migrate
from slotkeeper.config import DatabaseTimeouts
from slotkeeper.db import Database, Write, group_commit, postgresql, time_limits, write_connection
from slotkeeper.db import sqlite as sqlite_db
from slotkeeper.db.compiled_sql import execute_raw
from slotkeeper.db.driver_errors import first_line
from slotkeeper.db.group_commit import _Entry
from slotkeeper.errors import CommitUnknown, DatabaseUnavailable, SlotkeeperError
from slotkeeper.jobs.store import JobStore
from tests.support.builders import T0, a_job, eventually


@pytest.fixture
def sqlite(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'new' / 'folder' / 'record.db'}")
    yield database
    database.close()


@pytest.mark.parametrize(("pragma", "value"), [("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1)])
def test_an_answered_write_survives_a_power_cut_on_every_connection(sqlite, pragma, value):
    with sqlite.read() as first, sqlite.read() as second:
        for connection in (first, second):
            assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() == value


def test_reading_takes_no_lock_and_writing_takes_it_at_once(sqlite):
    statements = []
    event.listen(sqlite.engine, "before_cursor_execute", lambda c, cursor, sql, *_: statements.append(sql))
    with sqlite.read() as connection:
        connection.exec_driver_sql("SELECT 1")
    assert statements == ["SELECT 1"]
    sqlite.write(lambda tx: tx.connection.exec_driver_sql("SELECT 2"))
    assert statements[-2:] == ["BEGIN IMMEDIATE", "SELECT 2"]


def _insert(tx: Any) -> None:
    tx.connection.exec_driver_sql("INSERT INTO rows VALUES (1)")


_REFUSAL = SlotkeeperError("refused")


def _refuse(_: Any) -> SlotkeeperError:
    return _REFUSAL


@pytest.fixture
def disk(sqlite, monkeypatch):
    """What is done when the disk is waited for; the paths of the files that were."""
    sqlite.write(lambda tx: tx.connection.exec_driver_sql("CREATE TABLE rows (n)"))
    waited: list[str] = []

    def sync(log: int) -> None:
        waited.append(os.readlink(f"/proc/self/fd/{log}"))
        for act in acts:
            act()

    acts: list[Callable[[], object]] = []
    monkeypatch.setattr(write_connection, "_sync", sync)
    return acts, waited


def _count(connection: Any) -> int:
    return connection.exec_driver_sql("SELECT count(*) FROM rows").scalar()


def test_only_a_write_that_is_not_durable_skips_the_disk_sync(sqlite, disk):
    _, waited = disk
    sqlite.write(_insert, durable=False)
    assert waited == []
    sqlite.write(_insert)
    assert waited == [f"{sqlite.engine.url.database}-wal"]


def test_a_write_that_waits_for_the_disk_does_not_block_other_writes(sqlite, disk):
    """This holds for writes of the same process and of other processes."""
    acts, waited = disk
    other = Database(sqlite.url, DatabaseTimeouts(lock_s=0.2))
    acts += [
        lambda: other.write(_insert, durable=False),
        lambda: sqlite.write(_insert, durable=False),
    ]
    sqlite.write(_insert)
    with sqlite.read() as connection:
        assert _count(connection) == 3
    assert len(waited) == 1
    other.close()


def test_a_writer_that_waits_for_the_sqlite_lock_polls_every_millisecond(sqlite, disk, monkeypatch):
    """SQLite itself would wait 25, 50, 100 ms between two attempts."""
    pauses = []
    with closing(sqlite3.connect(sqlite.engine.url.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 20:
                other.execute("COMMIT")

        monkeypatch.setattr(sqlite_db.time, "sleep", pause)
        sqlite.write(_insert)
    assert len(pauses) == 20 and max(pauses) <= 0.001


def test_a_write_waits_for_a_locked_database_at_most_for_the_lock_timeout(sqlite, disk):
    impatient = Database(sqlite.url, DatabaseTimeouts(lock_s=0.05))
    with closing(sqlite3.connect(sqlite.engine.url.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseUnavailable, match="locked"):
            impatient.write(_insert)
    impatient.write(_insert)
    impatient.close()


def test_a_write_whose_sync_fails_is_reported_as_unknown(sqlite, disk):
    acts, _ = disk
    acts.append(_fails)
    with pytest.raises(CommitUnknown, match="Input/output"):
        sqlite.write(_insert)
    sqlite.write(_insert, durable=False)


def test_after_a_failed_disk_sync_no_write_succeeds_before_the_log_is_rewritten(sqlite, disk):
    """After a failed sync the system drops the unwritten pages, so the next sync succeeds without them."""
    acts, _ = disk
    acts.append(_fails)
    with pytest.raises(CommitUnknown):
        sqlite.write(_insert)
    acts.clear()
    with sqlite.read() as reader:
        reader.exec_driver_sql("BEGIN")
        assert _count(reader) == 1
        with pytest.raises(CommitUnknown, match="rewritten"):
            sqlite.write(_insert)
        reader.exec_driver_sql("COMMIT")
    statements = []
    event.listen(sqlite.engine, "before_cursor_execute", lambda c, cursor, sql, *_: statements.append(sql))
    sqlite.write(_insert)
    sqlite.write(_insert)
    assert sum("wal_checkpoint" in sql for sql in statements) == 1


def _fails() -> None:
    raise OSError(5, "Input/output error")


def test_writes_that_share_a_commit_return_after_its_disk_sync(sqlite, disk):
    acts, waited = disk
    early = []
    acts.append(lambda: early.extend(answered))
    answered: list[bool] = []
    answered += [result is None for result in sqlite.commit_all([Write(_insert)] * 3)]
    assert early == [] and answered == [True] * 3 and len(waited) == 1


def test_the_log_is_waited_for_where_sqlite_keeps_it(tmp_path, monkeypatch):
    """Beside the file that a link leads to."""
    (tmp_path / "far").mkdir()
    (tmp_path / "record.db").symlink_to(tmp_path / "far" / "real.db")
    waited: list[str] = []
    monkeypatch.setattr(write_connection, "_sync", lambda log: waited.append(os.readlink(f"/proc/self/fd/{log}")))
    for url in (f"sqlite:///{tmp_path / 'record.db'}", f"sqlite:///file:{tmp_path / 'record.db'}?uri=true"):
        with closing(Database(url)) as database:
            database.write(lambda tx: tx.connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS rows (n)"))
            database.write(_insert)
    assert set(waited) == {str(tmp_path / "far" / "real.db-wal")} and len(waited) == 4


def test_without_a_write_ahead_log_sqlite_itself_syncs_each_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(write_connection, "_sync", lambda log: pytest.fail("there is no write-ahead log to sync"))
    with closing(Database(f"sqlite:///file:{tmp_path / 'record.db'}?uri=true&vfs=unix-dotfile")) as database:
        found = database.write(lambda tx: tx.connection.exec_driver_sql("PRAGMA synchronous").scalar())
    assert found == 2


def test_after_a_disk_error_the_log_is_rewritten_before_a_new_connection_commits(sqlite, disk, monkeypatch):
    """The kernel reports a write error to each descriptor that was open, and to none that is opened later."""

    def fail() -> None:
        raise OSError(5, "the disk is gone")

    acts, _ = disk
    acts.append(fail)
    assert isinstance(sqlite.commit_all([Write(_insert)])[0], CommitUnknown)
    acts.clear()
    rewrites: list[str] = []
    monkeypatch.setattr(sqlite_db, "checkpoint_log", lambda engine: rewrites.append("anew"))
    with closing(sqlite3.connect(sqlite.engine.url.database)) as other:
        other.execute("SELECT count(*) FROM rows").fetchone()  # So that the log stays.
        with pytest.raises(ZeroDivisionError):
            sqlite.write(lambda tx: 1 / 0)  # Its connection is given up.
        assert sqlite.commit_all([Write(_insert)]) == [None]
    assert rewrites == ["anew"]


def _is_in(name: str, thread: threading.Thread) -> bool:
    """Whether that is what the thread is at."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_name == name


def test_after_a_disk_error_the_log_is_rewritten_before_the_next_waiting_write_syncs(sqlite, disk, monkeypatch):
    """The kernel reports an error once for each open file: the sync of a second writer would succeed."""
    acts, waited = disk
    at_it, goes_on, results, rewrites = threading.Event(), threading.Event(), list[Any](), list[int]()
    rewrite = sqlite_db.checkpoint_log
    monkeypatch.setattr(sqlite_db, "checkpoint_log", lambda engine: (rewrite(engine), rewrites.append(len(waited))))

    def fail_once() -> None:
        if len(waited) == 1:
            at_it.set()
            goes_on.wait(10)
            raise OSError(5, "the disk is gone")

    def write() -> None:
        results.extend(sqlite.commit_all([Write(_insert)]))

    acts.append(fail_once)
    first, second = threading.Thread(target=write), threading.Thread(target=write)
    first.start()
    assert at_it.wait(10)
    second.start()
    eventually(lambda: _is_in("sync", second) or not second.is_alive())
    assert results == [], "the second write waits for the first sync"
    goes_on.set()
    first.join(10)
    second.join(10)
    assert {type(result) for result in results} == {CommitUnknown, type(None)}
    assert rewrites == [1], "the log is rewritten before the second sync"


def test_readers_wait_for_the_log_of_all_processes(sqlite, disk):
    _, synced = disk
    with closing(Database(sqlite.url)) as other:
        other.write(_insert, durable=False)
        for _ in range(2):
            sqlite.sync_for_readers()
    assert synced == [f"{sqlite.engine.url.database}-wal"] * 2


def test_readers_get_database_unavailable_when_the_disk_fails_or_the_pool_is_exhausted(sqlite, disk, monkeypatch):
    acts, _ = disk
    monkeypatch.setattr(sqlite.engine.pool, "_timeout", 0.01)
    monkeypatch.setattr(sqlite.engine.pool, "_max_overflow", 0)
    taken = [sqlite.engine.connect() for _ in range(sqlite.engine.pool.size() - 1)]  # The writer has one.
    with pytest.raises(DatabaseUnavailable):
        sqlite.sync_for_readers()
    for connection in taken:
        connection.close()
    sqlite.sync_for_readers()
    acts.append(_fails)
    with pytest.raises(DatabaseUnavailable, match="Input/output"):
        sqlite.sync_for_readers()


def test_readers_do_not_trust_a_disk_that_failed_for_a_writer_before_all_was_written_again(sqlite, disk, monkeypatch):
    """The kernel reports an error once to each file that was open, and nothing to one that is opened afterwards."""
    acts, _ = disk
    acts.append(_fails)
    assert isinstance(sqlite.commit_all([Write(_insert)])[0], CommitUnknown)
    acts.clear()
    rewrite = sqlite_db.checkpoint_log
    monkeypatch.setattr(sqlite_db, "checkpoint_log", lambda engine: _fails())
    with pytest.raises(DatabaseUnavailable, match="Input/output"):
        sqlite.sync_for_readers()
    again: list[None] = []
    monkeypatch.setattr(sqlite_db, "checkpoint_log", lambda engine: again.append(rewrite(engine)))
    sqlite.sync_for_readers()
    assert again == [None]
    sqlite.sync_for_readers()
    assert again == [None], "it is written again once"


def test_a_write_takes_no_file_descriptor(sqlite, disk):
    sqlite.write(_insert)
    before = set(os.listdir("/proc/self/fd"))
    during: list[set[str]] = []
    acts, _ = disk
    acts.append(lambda: during.append(set(os.listdir("/proc/self/fd"))))
    sqlite.write(_insert)
    assert len(during[0]) == len(before)


# -- by callers that must not wait -------------------------------------------------------------------------------


def _tried(database: Database, writes: list[Write[Any]]) -> list[Any] | None:
    """Return the results without a wait, or None if nothing was stored."""
    return database.try_commit_all(writes)


def _at_once(database: Database, writes: list[Write[Any]]) -> list[Any]:
    """Return the results after the commit by the loop and the sync by a thread."""
    results = database.try_commit_all(writes)
    assert results is not None
    try:
        database.sync()
    except CommitUnknown as unknown:
        return [result if isinstance(result, Exception) else unknown for result in results]
    return results


def test_a_write_that_must_not_wait_is_executed_at_once_without_other_writes(sqlite, disk):
    _, waited = disk
    assert _tried(sqlite, [Write(_insert, durable=False), Write(_refuse, durable=False)]) == [None, _REFUSAL]
    with sqlite.read() as connection:
        assert _count(connection) == 1
    assert waited == []


def test_writes_of_try_commit_all_are_visible_at_once_and_durable_after_a_sync(sqlite, disk):
    _, waited = disk
    assert sqlite.try_commit_all([Write(_insert), Write(_insert, durable=False)]) == [None, None]
    with sqlite.read() as connection:
        assert _count(connection) == 2, "other connections see the rows before the sync"
    assert waited == []
    sqlite.sync()
    assert waited == [f"{sqlite.engine.url.database}-wal"]


def test_after_a_failed_sync_writes_of_try_commit_all_are_unknown_and_refusals_stay(sqlite, disk):
    def fail() -> None:
        raise OSError(5, "the disk is gone")

    acts, _ = disk
    acts.append(fail)
    writes: list[Write[Any]] = [Write(_insert), Write(_refuse)]
    answers = _at_once(sqlite, writes)
    assert isinstance(answers[0], CommitUnknown)
    assert answers[1] is _REFUSAL


@pytest.mark.parametrize("do", [Database.commit_all, _at_once], ids=["by_a_thread", "at_once"])
def test_a_commit_is_unknown_while_the_log_cannot_be_rewritten_after_a_disk_failure(sqlite, disk, monkeypatch, do):
    """Rewriting the log needs another connection, which may not be available."""

    def fail() -> None:
        raise OSError(5, "the disk is gone")

    acts, waited = disk
    acts.append(fail)
    writes: list[Write[Any]] = [Write(_insert)]
    do(sqlite, writes)
    acts.clear()
    folder = Path(sqlite.engine.url.database).parent
    sqlite.engine.dispose()  # No connection is kept for readers.
    folder.rename(folder.with_name("away"))

    assert isinstance(do(sqlite, writes)[0], CommitUnknown)
    assert len(waited) == 1

    folder.with_name("away").rename(folder)
    assert do(sqlite, writes) == [None]
    assert len(waited) == 2


def test_try_commit_all_stores_nothing_if_the_writes_are_too_large(sqlite, disk):
    half = group_commit._MAX_LOOP_CHARS // 2
    assert _tried(sqlite, [Write(_insert, size=half), Write(_insert, size=half)]) == [None, None]
    assert _tried(sqlite, [Write(_insert, size=half), Write(_insert, size=half + 1)]) is None
    with sqlite.read() as connection:
        assert _count(connection) == 2


def test_try_commit_all_does_not_wait_for_another_process_and_keeps_its_connection(sqlite, disk, monkeypatch):
    monkeypatch.setattr(sqlite_db.time, "sleep", lambda seconds: pytest.fail("it waits"))
    sqlite.write(_insert, durable=False)
    monkeypatch.setattr(sqlite.engine, "connect", lambda: pytest.fail("it opens a new connection"))
    with closing(sqlite3.connect(sqlite.engine.url.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert _tried(sqlite, [Write(_insert, durable=False)]) is None
    sqlite.write(_insert, durable=False)
    assert _tried(sqlite, [Write(_insert, durable=False)]) == [None]


def test_try_commit_all_stores_nothing_while_its_process_is_writing(sqlite, disk, monkeypatch):
    def unit(tx: Any) -> None:
        _insert(tx)
        answers.append(_tried(sqlite, [Write(_insert, durable=False)]))

    answers: list[Any] = []
    sqlite.write(_insert)
    monkeypatch.setattr(sqlite.engine, "connect", lambda: pytest.fail("the connection is in use"))
    sqlite.write(unit)
    assert answers == [None]
    assert _tried(sqlite, [Write(_insert, durable=False)]) == [None], "the group has a free leader again"


def test_a_write_that_arrives_during_an_immediate_write_is_executed_after_it(sqlite, disk):
    def unit(tx: Any) -> None:
        other.start()
        while not sqlite._group._waiting:
            time.sleep(0.001)

    other = threading.Thread(target=lambda: sqlite.write(_insert, durable=False))
    assert _tried(sqlite, [Write(unit, durable=False)]) == [None]
    other.join(10)
    with sqlite.read() as connection:
        assert _count(connection) == 1


def test_a_nonblocking_commit_stores_all_its_writes_or_none(sqlite, disk):
    """Otherwise a thread repeats the writes: a start that finds its own job running takes it for another worker's."""

    def spoil(tx: Any) -> None:
        raise ValueError("spoiled")

    writes: list[Write[Any]] = [Write(unit, durable=False) for unit in (_insert, spoil, _insert)]
    assert _tried(sqlite, writes) is None
    with sqlite.read() as connection:
        assert _count(connection) == 0
    assert [type(outcome) for outcome in sqlite.commit_all(writes)] == [type(None), ValueError, type(None)]


def test_try_commit_all_does_not_look_up_the_outcome_of_a_commit(sqlite, disk, monkeypatch):
    monkeypatch.setattr(sqlite._group, "_find_outcome", lambda mark: pytest.fail("it looks up the outcome"))
    sqlite.write(_insert)

    def fail(connection: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    event.listen(sqlite.engine, "commit", fail)
    (answer,) = _tried(sqlite, [Write(_insert, durable=False)]) or []
    assert isinstance(answer, CommitUnknown)
    event.remove(sqlite.engine, "commit", fail)
    monkeypatch.undo()
    sqlite.write(_insert, durable=False)
    assert _tried(sqlite, [Write(_insert, durable=False)]) == [None], "the group has a free leader again"


def test_after_a_failed_commit_immediate_writes_are_declined_until_another_commit_succeeds(sqlite, disk):
    """On a full disk each attempt would use a connection, and each retry would look up the unknown commit."""

    def fail(connection: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    sqlite.write(_insert)
    writes: list[Write[Any]] = [Write(_insert)]
    event.listen(sqlite.engine, "commit", fail)
    assert isinstance((_tried(sqlite, writes) or [None])[0], CommitUnknown)
    assert _tried(sqlite, writes) is None
    with pytest.raises(DatabaseUnavailable):
        sqlite.write(_insert)
    assert _tried(sqlite, writes) is None
    event.remove(sqlite.engine, "commit", fail)
    sqlite.write(_insert)
    assert _tried(sqlite, writes) == [None]


# -- interruptions ---------------------------------------------------------------------------------------------


def test_a_write_that_is_interrupted_while_it_waits_does_not_block_later_writes(sqlite, disk, monkeypatch):
    """This holds for the write that would lead the next commit, too."""
    inside, go_on = threading.Event(), threading.Event()

    def unit(tx: Any) -> None:
        _insert(tx)
        inside.set()
        assert go_on.wait(10)

    leader = threading.Thread(target=lambda: sqlite.write(unit))
    leader.start()
    assert inside.wait(10)

    def interrupted(ticket: Any, seconds: float) -> bool:
        go_on.set()
        leader.join(10)
        assert ticket.leads
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(_Entry, "wait", interrupted)
        sqlite.write(_insert)
    sqlite.write(_insert)
    with sqlite.read() as connection:
        assert _count(connection) == 2


def test_an_interrupted_commit_is_still_synced_for_the_other_writers_of_its_group(sqlite, disk, monkeypatch):
    _, waited = disk
    outcomes = []

    def after_the_commit(batch: Any, *_: Any) -> bool:
        for ticket in batch[1:]:
            ticket.succeed(None)
        raise KeyboardInterrupt

    monkeypatch.setattr(sqlite._group, "_commit", after_the_commit)
    with pytest.raises(KeyboardInterrupt):
        outcomes.extend(sqlite.commit_all([Write(_insert), Write(_insert)]))
    assert len(waited) == 1 and outcomes == []


def test_a_write_that_is_interrupted_before_its_commit_does_not_block_later_writes(sqlite, disk, monkeypatch):
    """This holds while the error and its traceback are kept, too, as the Python prompt keeps them."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as kept:
        patched.setattr(write_connection.Writer, "commit", interrupted)
        sqlite.write(_insert)
    assert kept.tb is not None
    with closing(Database(sqlite.url, DatabaseTimeouts(lock_s=0))) as other:
        other.write(_insert)
    with sqlite.read() as connection:
        assert _count(connection) == 1


def test_a_write_that_is_interrupted_during_a_statement_does_not_block_later_writes(sqlite, disk):
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        sqlite.write(
            lambda tx: execute_raw(tx.connection, "INSERT INTO rows VALUES (1), (2) RETURNING n", (), interrupted)
        )
    assert kept.tb is not None
    with closing(Database(sqlite.url, DatabaseTimeouts(lock_s=0))) as other:
        other.write(_insert)
    with sqlite.read() as connection:
        assert _count(connection) == 1


# -- what PostgreSQL is asked for ------------------------------------------------------------------------------


def _asked(monkeypatch, query: str, **limits: float) -> dict[str, object]:
    """What a connection is made with."""
    given: list[dict[str, object]] = []

    def connect(*_: object, **options: object) -> None:
        given.append(options)
        raise ZeroDivisionError

    monkeypatch.setattr(postgresql._TimeLimitedConnection, "connect", connect)
    database = Database(f"postgresql://nobody@192.0.2.1/record{query}", DatabaseTimeouts(**limits))
    with pytest.raises(ZeroDivisionError), database.snapshot():
        pass
    return given[0]


def test_a_postgresql_that_vanishes_is_noticed_in_seconds(monkeypatch):
    asked = _asked(monkeypatch, "")
    silence_s = asked["keepalives_idle"] + asked["keepalives_interval"] * asked["keepalives_count"]
    assert silence_s <= 15
    assert asked["tcp_user_timeout"] <= 15_000
    assert asked["connect_timeout"] == 5


def test_postgresql_gets_the_timeouts_as_connection_options(monkeypatch):
    options = _asked(monkeypatch, "", lock_s=1.5, statement_s=7, idle_s=2)["options"]
    assert options.split("-c ")[1:] == [  # type: ignore[attr-defined]
        "statement_timeout=7000 ",
        "lock_timeout=1500 ",
        "idle_in_transaction_session_timeout=2000 ",
        "jit=off",
    ]
    pooled = _asked(monkeypatch, "", lock_s=0, statement_s=0, idle_s=0)  # A pooler may refuse them.
    assert "options" not in pooled and pooled["prepare_threshold"] is None


def test_the_options_of_the_url_take_precedence(monkeypatch):
    query = "?connect_timeout=9&keepalives_idle=60&tcp_user_timeout=0&options=-c%20lock_timeout%3D1"
    asked = _asked(monkeypatch, query)
    assert (asked["connect_timeout"], asked["keepalives_idle"], asked["tcp_user_timeout"]) == (9, "60", "0")
    assert str(asked["options"]).endswith("-c lock_timeout=1")  # the last one counts


def test_a_connection_takes_no_longer_than_there_is_time(monkeypatch):
    given = []
    monkeypatch.setattr(
        postgresql._TimeLimitedConnection, "connect", lambda **options: given.append(options["connect_timeout"])
    )
    with time_limits.time_limit(3.9):
        postgresql._connect(None, None, (), {"connect_timeout": 5})
    with time_limits.time_limit(1.9), pytest.raises(Exception, match="no time is left"):
        postgresql._connect(None, None, (), {"connect_timeout": 5})
    assert given == [3]


def test_a_write_is_answered_within_ten_seconds_at_worst():
    limits = DatabaseTimeouts()
    assert limits.turn_s + limits.transaction_s + limits.inquiry_s < 10
    assert limits.lock_s < limits.transaction_s  # or who waits for a lock would be taken for a silent server


def test_the_time_of_a_block_is_never_more_than_that_of_the_one_around_it():
    with time_limits.time_limit(1.0):
        with time_limits.time_limit(60.0):
            assert time_limits.time_left() <= 1.0
        with time_limits.time_limit(0.1):
            assert time_limits.time_left() <= 0.1
        assert time_limits.time_left() > 0.5
    assert time_limits.time_left() == float("inf")


def test_the_reason_for_an_unavailable_database_is_one_line():
    assert first_line(Exception("")) == "no reason given"
    assert first_line(Exception("connection refused\nIs the server running?")) == "connection refused"


def test_the_error_of_a_refused_write_alone_says_that_nothing_was_stored(tmp_path):
    url = f"sqlite:///{tmp_path / 'record.db'}"
    migrate.migrate_to(url, "0001")
    store = JobStore(Database(url))
    with pytest.raises(DatabaseUnavailable, match="slotkeeper migrate") as read:
        store.get("j1")
    with pytest.raises(DatabaseUnavailable, match="slotkeeper migrate") as write:
        store.submit([a_job()], T0)
    assert ["Nothing was stored" in str(error.value) for error in (read, write)] == [False, True]
