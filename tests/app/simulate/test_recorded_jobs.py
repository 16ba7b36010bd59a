"""What the record tells a simulation of a span of time: the jobs that came in it, as they came."""

import random
from itertools import pairwise

import pytest
from sqlalchemy import event

from app.simulate import history
from app.simulate.history import PastJob
from slotkeeper.jobs.states import State
from slotkeeper.outbox import retention
from tests.support.builders import SECOND, T0, a_delayed_job, a_job_in, a_queued_job, a_running_job, an_ended_job

HOUR = 3600 * SECOND
STARTED_OR_ENDED = sorted(set(State) - {State.QUEUED, State.DELAYED})


@pytest.mark.parametrize("state", STARTED_OR_ENDED)
def test_history_tells_what_a_simulation_needs_of_a_job(store, state):
    job = a_job_in(store, state, model="flux", priority=2, tenant="acme", constraints="gpu=A100")
    finished_ms = None if state is State.RUNNING else T0
    told = PastJob("flux", 2, "acme", "gpu=A100", T0, T0, finished_ms, None, state)
    assert list(history.read_past_jobs(store.database, T0, T0 + 1)) == [told]
    assert job.state is state


def test_history_tells_of_a_job_that_ended_without_a_start_and_not_of_one_that_only_waits(store):
    job = a_queued_job(store, now_ms=T0)
    a_queued_job(store, now_ms=T0)
    a_delayed_job(store, now_ms=T0)
    assert list(history.read_past_jobs(store.database, T0, T0 + 1)) == []
    store.cancel_waiting(job.id, T0 + SECOND)
    (told,) = history.read_past_jobs(store.database, T0, T0 + 1)
    assert (told.started_ms, told.finished_ms, told.state) == (None, T0 + SECOND, State.CANCELED)


def test_history_begins_at_its_first_moment_and_ends_before_its_last(store):
    for n in range(5):
        a_running_job(store, now_ms=T0 + n)
    assert [past.created_ms for past in history.read_past_jobs(store.database, T0 + 1, T0 + 3)] == [T0 + 1, T0 + 2]
    assert list(history.read_past_jobs(store.database, T0 + 3, T0 + 3)) == []
    assert list(history.read_past_jobs(store.database, T0 + 3, T0 + 1)) == []


def test_the_history_of_an_empty_record_is_empty(store):
    assert list(history.read_past_jobs(store.database, 0, T0)) == []


def test_history_goes_by_the_time_of_acceptance_even_where_the_clocks_disagree(store):
    """Two that accept jobs may be an hour apart; their numbers then do not go with the time."""
    draw = random.Random(4)
    times = [T0 + n * 600 * SECOND + draw.randrange(HOUR // 2) for n in range(60)]
    for at in times:
        a_running_job(store, now_ms=at)
    assert any(one > other for one, other in pairwise(times))
    for n in range(0, 60, 7):
        since, until = times[n], times[n] + 2 * HOUR
        expected = sorted(at for at in times if since <= at < until)
        assert [past.created_ms for past in history.read_past_jobs(store.database, since, until)] == expected


def test_jobs_of_one_moment_are_told_as_they_were_accepted(store):
    for priority in (3, 1, 2):
        a_running_job(store, priority=priority)
    assert [past.priority for past in history.read_past_jobs(store.database, T0, T0 + 1)] == [3, 1, 2]


def test_history_closes_the_gaps_that_removed_jobs_have_left(store):
    for n in range(20):
        (a_running_job if n % 5 == 0 else an_ended_job)(store, now_ms=T0 + n)
    assert retention.delete_ended_jobs(store.database, T0 + 20) == 16
    assert [past.created_ms - T0 for past in history.read_past_jobs(store.database, T0 + 1, T0 + 20)] == [5, 10, 15]


@pytest.mark.parametrize("size", [1, 7, 20, 100])
def test_the_pages_of_history_miss_and_double_nothing(store, size):
    for n in range(20):
        a_running_job(store, now_ms=T0 + n)
    assert [past.created_ms - T0 for past in history.read_past_jobs(store.database, T0, T0 + 20, size)] == list(
        range(20)
    )


def test_history_holds_one_page_at_a_time_and_nobody_waits_for_its_reader(database, store):
    for n in range(20):
        a_running_job(store, now_ms=T0 + n)
    cursors = []
    event.listen(database.engine, "before_cursor_execute", lambda c, cursor, *_: cursors.append(cursor))
    told = history.read_past_jobs(store.database, T0, T0 + 20, 2)
    assert next(told).created_ms == T0
    if database.engine.dialect.name == "postgresql":
        assert cursors[-1].name  # the rows stay at the server until they are fetched
    a_running_job(store, now_ms=T0 + 19)  # what comes meanwhile is accepted, and not told
    assert len(list(told)) == 19


def test_a_history_that_is_left_half_read_gives_its_connection_back(database, store):
    for n in range(5):
        a_running_job(store, now_ms=T0 + n)
    taken = database.engine.pool.checkedout()
    for _ in range(40):  # more than there are connections
        told = history.read_past_jobs(store.database, T0, T0 + 5, 1)
        next(told)
        told.close()  # type: ignore[attr-defined]
    assert database.engine.pool.checkedout() == taken
