"""The past jobs of a time window, as a simulation reads them from the database."""

import random
from itertools import pairwise

import pytest
from sqlalchemy import event

from app.simulate.recorded_load import PastJob, read_past_jobs
from slotkeeper.jobs.states import State
from slotkeeper.outbox import retention
from tests.support.builders import SECOND, T0, a_delayed_job, a_job_in, a_queued_job, a_running_job, an_ended_job

HOUR = 3600 * SECOND
STARTED_OR_ENDED = sorted(set(State) - {State.QUEUED, State.DELAYED})


@pytest.mark.parametrize("state", STARTED_OR_ENDED)
def test_a_past_job_has_the_fields_for_a_simulation(store, state):
    job = a_job_in(store, state, model="flux", priority=2, tenant="acme", constraints="gpu=A100")
    finished_ms = None if state is State.RUNNING else T0
    past_job = PastJob("flux", 2, "acme", "gpu=A100", T0, T0, finished_ms, None, state)
    assert list(read_past_jobs(store.database, T0, T0 + 1)) == [past_job]
    assert job.state is state


def test_past_jobs_include_jobs_that_ended_without_a_start_and_no_waiting_jobs(store):
    job = a_queued_job(store, now_ms=T0)
    a_queued_job(store, now_ms=T0)
    a_delayed_job(store, now_ms=T0)
    assert list(read_past_jobs(store.database, T0, T0 + 1)) == []
    store.cancel_waiting(job.id, T0 + SECOND)
    (past_job,) = read_past_jobs(store.database, T0, T0 + 1)
    assert (past_job.started_ms, past_job.finished_ms, past_job.state) == (None, T0 + SECOND, State.CANCELED)


def test_past_jobs_are_read_from_the_first_time_to_before_the_last(store):
    for n in range(5):
        a_running_job(store, now_ms=T0 + n)
    assert [past.created_ms for past in read_past_jobs(store.database, T0 + 1, T0 + 3)] == [T0 + 1, T0 + 2]
    assert list(read_past_jobs(store.database, T0 + 3, T0 + 3)) == []
    assert list(read_past_jobs(store.database, T0 + 3, T0 + 1)) == []


def test_an_empty_database_has_no_past_jobs(store):
    assert list(read_past_jobs(store.database, 0, T0)) == []


def test_past_jobs_are_sorted_by_acceptance_even_if_clocks_differ(store):
    """The clocks of two processes that accept jobs may differ by an hour; `seq` then does not follow the time."""
    rng = random.Random(4)
    times = [T0 + n * 600 * SECOND + rng.randrange(HOUR // 2) for n in range(60)]
    for at in times:
        a_running_job(store, now_ms=at)
    assert any(one > other for one, other in pairwise(times))
    for n in range(0, 60, 7):
        since, until = times[n], times[n] + 2 * HOUR
        expected = sorted(at for at in times if since <= at < until)
        assert [past.created_ms for past in read_past_jobs(store.database, since, until)] == expected


def test_past_jobs_of_the_same_time_are_in_order_of_acceptance(store):
    for priority in (3, 1, 2):
        a_running_job(store, priority=priority)
    assert [past.priority for past in read_past_jobs(store.database, T0, T0 + 1)] == [3, 1, 2]


def test_past_jobs_are_found_despite_removed_jobs(store):
    for n in range(20):
        (a_running_job if n % 5 == 0 else an_ended_job)(store, now_ms=T0 + n)
    assert retention.delete_ended_jobs(store.database, T0 + 20) == 16
    assert [past.created_ms - T0 for past in read_past_jobs(store.database, T0 + 1, T0 + 20)] == [5, 10, 15]


@pytest.mark.parametrize("size", [1, 7, 20, 100])
def test_pages_of_past_jobs_are_complete_without_duplicates(store, size):
    for n in range(20):
        a_running_job(store, now_ms=T0 + n)
    assert [past.created_ms - T0 for past in read_past_jobs(store.database, T0, T0 + 20, size)] == list(range(20))


def test_reading_past_jobs_holds_one_page_and_blocks_no_writer(database, store):
    for n in range(20):
        a_running_job(store, now_ms=T0 + n)
    cursors = []
    event.listen(database.engine, "before_cursor_execute", lambda c, cursor, *_: cursors.append(cursor))
    past_jobs = read_past_jobs(store.database, T0, T0 + 20, 2)
    assert next(past_jobs).created_ms == T0
    if database.engine.dialect.name == "postgresql":
        assert cursors[-1].name  # a server-side cursor: rows stay at the server until they are fetched
    a_running_job(store, now_ms=T0 + 19)  # a job that is submitted meanwhile is accepted, and not read
    assert len(list(past_jobs)) == 19


def test_closing_an_iterator_of_past_jobs_releases_its_connection(database, store):
    for n in range(5):
        a_running_job(store, now_ms=T0 + n)
    before = database.engine.pool.checkedout()
    for _ in range(40):  # more than there are connections
        past_jobs = read_past_jobs(store.database, T0, T0 + 5, 1)
        next(past_jobs)
        past_jobs.close()  # type: ignore[attr-defined]
    assert database.engine.pool.checkedout() == before
