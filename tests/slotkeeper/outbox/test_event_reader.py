"""The event reader returns each event once and in order, and skips none while the outbox grows."""

import random
import threading

import pytest
from sqlalchemy import insert, text

from slotkeeper.db import Database
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import events
from slotkeeper.jobs.values import JobError
from slotkeeper.outbox import event_reader, retention
from slotkeeper.outbox.event_reader import EventReader
from slotkeeper.outbox.retention import EventRetention
from slotkeeper.outbox.sink_cursors import SinkCursors
from tests.support.builders import SECOND, T0, a_job, a_queued_job, a_running_job, an_ended_job, at_once, eventually
from tests.support.ends import store_end
from tools.cluster.direct_starts import store_start

LATE = {"job_id": "late", "type": "job.enqueued", "at_ms": T0, "attempt": 0, "data": "{}"}


@pytest.fixture
def follower(database):
    """A Tail that has begun."""
    made = EventReader(database)
    made.skip_to_end()
    return made


def _read_next(follower):
    return [(entry.event.job_id, entry.event.type) for entry in follower.read()]


def test_a_new_reader_starts_after_the_existing_events_and_returns_each_event_once(store, follower):
    job = a_running_job(store).job
    assert _read_next(follower) == [(job.id, "job.enqueued"), (job.id, "job.started")]
    assert _read_next(follower) == []


def test_an_event_is_returned_with_its_job_and_the_server_of_its_attempt(store, follower):
    run = a_running_job(store, server="gpu1", tenant="acme", priority=2)
    store_end(store, run.job.id, 1, Reason.SERVER_ERROR, T0, error=JobError("server_error", "no"), due_ms=T0 + SECOND)
    store.promote_due(T0 + SECOND)
    store_start(store, run.job.id, "gpu2", "gpu2/0", "another", T0 + SECOND)
    store_end(store, run.job.id, 2, Reason.FINISHED, T0 + SECOND, result="{}")
    entries = follower.read()
    assert {(entry.model, entry.tenant, entry.priority) for entry in entries} == {("zimg", "acme", 2)}
    assert [(entry.event.type, entry.server) for entry in entries] == [
        ("job.enqueued", None),
        ("job.started", "gpu1"),
        ("job.delayed", "gpu1"),
        ("job.enqueued", "gpu1"),
        ("job.started", "gpu2"),
        ("job.completed", "gpu2"),
    ]
    assert entries[2].event.data["retry_in_ms"] == SECOND


def test_each_page_starts_after_the_last_event_of_the_previous_page(store, database):
    jobs = [a_queued_job(store).id for _ in range(5)]
    found, last, full = [], 0, True
    while full:
        page = event_reader.read_page(database, last, 2)
        found += [entry.event.job_id for entry in page.events]
        last, full = page.last, page.has_more
    assert found == jobs
    assert [entry.event.job_id for entry in event_reader.read_page(database, 0, 10, jobs[3]).events] == [jobs[3]]


@pytest.mark.postgres
def test_the_reader_waits_for_an_event_number_whose_transaction_commits_late(postgres_url):
    """PostgreSQL makes event numbers visible out of order."""
    database = Database(postgres_url)
    store, follower = JobStore(database), EventReader(database)
    a_queued_job(store)
    follower.skip_to_end()
    with database.engine.connect() as late:
        first = a_queued_job(store).id
        late.begin()
        late.execute(insert(events), LATE | {"job_id": first})
        second = a_queued_job(store).id
        assert [entry.event.job_id for entry in follower.read()] == [first]
        assert follower.read() == [] and follower.has_gap
        late.commit()
    assert [entry.event.job_id for entry in follower.read()] == [first, second]
    assert follower.read() == [] and not follower.has_gap
    database.close()


@pytest.mark.postgres
def test_an_event_number_that_was_rolled_back_does_not_block_the_reader(postgres_url):
    database = Database(postgres_url)
    store, follower = JobStore(database), EventReader(database)
    a_queued_job(store)
    follower.skip_to_end()
    with database.engine.connect() as gone:
        gone.begin()
        gone.execute(insert(events), LATE)
        job = a_queued_job(store).id
        assert follower.read() == []
        gone.rollback()
    assert [entry.event.job_id for entry in follower.read()] == [job]
    database.close()


@pytest.mark.postgres
def test_a_transaction_that_begins_after_a_missing_number_does_not_block_the_reader(postgres_url):
    database = Database(postgres_url)
    store, follower = JobStore(database), EventReader(database)
    a_queued_job(store)
    follower.skip_to_end()
    with database.engine.connect() as gone, database.engine.connect() as later:
        gone.begin()
        gone.execute(insert(events), LATE)
        job = a_queued_job(store).id
        assert follower.read() == []
        later.begin()
        later.execute(insert(events), LATE)
        gone.rollback()
        assert [entry.event.job_id for entry in follower.read()] == [job]
        later.rollback()
    database.close()


def _begin_reader(database):
    EventReader(database).skip_to_end()


def _begin_sink(database):
    assert SinkCursors(database).acquire("otlp", "me", T0, T0 + SECOND, backlog=0) is not None


@pytest.mark.postgres
@pytest.mark.parametrize("start", [_begin_reader, _begin_sink])
def test_reading_begins_only_after_open_write_transactions_have_ended(postgres_url, start):
    database = Database(postgres_url)
    before = a_queued_job(JobStore(database)).id
    begun = threading.Event()

    def begin() -> None:
        start(database)
        begun.set()

    with database.engine.connect() as late:
        late.begin()
        late.execute(insert(events), LATE | {"job_id": before})
        thread = threading.Thread(target=begin)
        thread.start()
        eventually(lambda: _readers(database) > 0)
        assert not begun.wait(0.1)
        late.commit()
        thread.join(10)
    assert begun.is_set()
    database.close()


def _readers(database: Database) -> int:
    query = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_locks%'"
    with database.read() as connection:
        return int(connection.execute(text(query)).scalar() or 0)


def test_with_many_writers_the_reader_skips_no_event_and_returns_none_twice(store, database, follower):
    found: list[int] = []
    done = threading.Event()

    def write() -> None:
        for _ in range(25):
            run = a_running_job(store)
            if random.random() < 0.5:
                store_end(store, run.job.id, 1, Reason.FINISHED, T0, result="{}")
            _fail(database)

    def read() -> None:
        while not done.is_set():
            found.extend(entry.event.id for entry in follower.read(7))

    reader = threading.Thread(target=read)
    reader.start()
    at_once(*[write] * 4)
    eventually(lambda: follower.position == _last(database))
    done.set()
    reader.join(10)
    while more := follower.read(1000):
        found.extend(entry.event.id for entry in more)
    with database.read() as connection:
        assert found == sorted(connection.execute(text("SELECT id FROM events")).scalars())


def _fail(database: Database) -> None:
    """Take a number and give it back; on PostgreSQL it is missing from now on."""

    def unit(tx):
        JobStore(database).submit_write([a_job()], T0).unit(tx)
        tx.flush()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        database.write(unit)


def _last(database: Database) -> int:
    with database.read() as connection:
        return int(connection.execute(text("SELECT max(id) FROM events")).scalar() or 0)


def test_has_all_since_is_true_until_an_event_after_the_position_is_deleted(store, database):
    job = an_ended_job(store, State.DEAD)
    first = event_reader.read_page(database, 0, 100).events[0].event.id
    a_queued_job(store, now_ms=T0 + SECOND)
    last = event_reader.read_page(database, 0, 100).last
    retention.delete_dead_job(store.database, job.id)
    assert event_reader.has_all_since(database, first)
    assert EventRetention(database).delete_next(T0 + 1, 0, last) == 3
    assert not event_reader.has_all_since(database, first)
    assert event_reader.has_all_since(database, last)


def test_a_position_beyond_the_last_event_of_the_database_is_not_complete(store, database):
    a_queued_job(store)
    assert not event_reader.has_all_since(database, _last(database) + 1)


def test_removing_older_events_later_lowers_nothing(store, database):
    waits = a_queued_job(store)
    an_ended_job(store)
    last, ageing = event_reader.read_page(database, 0, 100).last, EventRetention(database)
    retention.delete_ended_jobs(store.database, T0 + 1)
    assert ageing.delete_next(T0 + 1, 0, last) == 3
    store.cancel_waiting(waits.id, T0)
    retention.delete_ended_jobs(store.database, T0 + 1)
    assert ageing.delete_next(T0 + 1, 0, last) is None
    assert ageing.delete_next(T0 + 1, 0, last) == 1
    assert event_reader.has_all_since(database, last)
    assert not event_reader.has_all_since(database, last - 1)
