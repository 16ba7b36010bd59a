"""What the record answers about many jobs at once: lists, the queue, what runs where, and what was."""

import random
from itertools import pairwise

import pytest
from sqlalchemy import event

from jobs.record import Past
from jobs.states import State, Why
from tests.support.builders import SECOND, T0, a_delayed_job, a_job_in, a_queued_job, a_running_job, an_ended_job

HOUR = 3600 * SECOND
STARTED_OR_ENDED = sorted(set(State) - {State.QUEUED, State.DELAYED})


def test_listing_goes_from_the_newest_on_and_its_cursor_misses_and_doubles_nothing(store):
    ids = [a_queued_job(store).id for _ in range(7)]
    page, seen = store.find(limit=3), []
    while page:
        seen += [job.id for job in page]
        assert len(seen) <= len(ids)
        a_queued_job(store, model="new")  # comes in between two pages
        page = store.find(limit=3, before_seq=page[-1].seq)
    assert seen == ids[::-1]


def test_listing_filters_by_state_model_and_tenant_together(store):
    wanted = a_queued_job(store, model="flux", tenant="acme")
    a_queued_job(store, model="flux")
    a_queued_job(store, tenant="acme")
    a_job_in(store, State.RUNNING, model="flux", tenant="acme")
    found = store.find(state=State.QUEUED, model="flux", tenant="acme")
    assert [job.id for job in found] == [wanted.id]
    assert (found[0].payload, found[0].result) == (None, None)  # lists stay small


def test_the_queue_is_told_in_order_of_acceptance_and_in_pages(store):
    ids = [a_queued_job(store, model=model).id for model in ("zimg", "flux", "zimg", "trellis", "zimg")]
    a_delayed_job(store)
    first = store.queued(["zimg", "flux"], limit=2)
    rest = store.queued(["zimg", "flux"], after_seq=first[-1].seq)
    assert [w.id for w in first + rest] == [ids[0], ids[1], ids[2], ids[4]]
    assert store.queued([]) == []


def test_order_1_jobs_are_numbered_as_they_are_accepted(store):
    numbers = [a_queued_job(store).seq for _ in range(5)]
    assert numbers == sorted(set(numbers))


def test_a_task_message_can_be_written_without_the_payload(store):
    job = a_queued_job(store, tier=2, envelope='{"link":1}')
    assert store.headers(job.id) == ("zimg", 2, 0, '{"link":1}')


# -- history ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STARTED_OR_ENDED)
def test_history_tells_what_a_simulation_needs_of_a_job(store, state):
    job = a_job_in(store, state, model="flux", tier=2, tenant="acme", needs="gpu=A100")
    finished_ms = None if state is State.RUNNING else T0
    told = Past("flux", 2, "acme", "gpu=A100", T0, T0, finished_ms, state)
    assert list(store.history(T0, T0 + 1)) == [told]
    assert job.state is state


def test_history_tells_of_a_job_that_ended_without_a_start_and_not_of_one_that_only_waits(store):
    job = a_queued_job(store, now=T0)
    a_queued_job(store, now=T0)
    a_delayed_job(store, now=T0)
    assert list(store.history(T0, T0 + 1)) == []
    store.end_waiting(job.id, Why.CANCEL_REQUESTED, T0 + SECOND)
    (told,) = store.history(T0, T0 + 1)
    assert (told.started_ms, told.finished_ms, told.state) == (None, T0 + SECOND, State.CANCELED)


def test_history_begins_at_its_first_moment_and_ends_before_its_last(store):
    for n in range(5):
        a_running_job(store, now=T0 + n)
    assert [past.created_ms for past in store.history(T0 + 1, T0 + 3)] == [T0 + 1, T0 + 2]
    assert list(store.history(T0 + 3, T0 + 3)) == []
    assert list(store.history(T0 + 3, T0 + 1)) == []


def test_the_history_of_an_empty_record_is_empty(store):
    assert list(store.history(0, T0)) == []


def test_history_goes_by_the_time_of_acceptance_even_where_the_clocks_disagree(store):
    """Two that accept jobs may be an hour apart; their numbers then do not go with the time."""
    draw = random.Random(4)
    times = [T0 + n * 600 * SECOND + draw.randrange(HOUR // 2) for n in range(60)]
    for at in times:
        a_running_job(store, now=at)
    assert any(one > other for one, other in pairwise(times))
    for n in range(0, 60, 7):
        since, until = times[n], times[n] + 2 * HOUR
        expected = sorted(at for at in times if since <= at < until)
        assert [past.created_ms for past in store.history(since, until)] == expected


def test_jobs_of_one_moment_are_told_as_they_were_accepted(store):
    for tier in (3, 1, 2):
        a_running_job(store, tier=tier)
    assert [past.tier for past in store.history(T0, T0 + 1)] == [3, 1, 2]


def test_history_closes_the_gaps_that_removed_jobs_have_left(store):
    for n in range(20):
        (a_running_job if n % 5 == 0 else an_ended_job)(store, now=T0 + n)
    assert store.purge(T0 + 20) == 16
    assert [past.created_ms - T0 for past in store.history(T0 + 1, T0 + 20)] == [5, 10, 15]


@pytest.mark.parametrize("size", [1, 7, 20, 100])
def test_the_pages_of_history_miss_and_double_nothing(store, size):
    for n in range(20):
        a_running_job(store, now=T0 + n)
    assert [past.created_ms - T0 for past in store.history(T0, T0 + 20, size)] == list(range(20))


def test_history_holds_one_page_at_a_time_and_nobody_waits_for_its_reader(database, store):
    for n in range(20):
        a_running_job(store, now=T0 + n)
    cursors = []
    event.listen(database.engine, "before_cursor_execute", lambda c, cursor, *_: cursors.append(cursor))
    told = store.history(T0, T0 + 20, 2)
    assert next(told).created_ms == T0
    if database.engine.dialect.name == "postgresql":
        assert cursors[-1].name  # the rows stay at the server until they are fetched
    a_running_job(store, now=T0 + 19)  # what comes meanwhile is accepted, and not told
    assert len(list(told)) == 19


def test_a_history_that_is_left_half_read_gives_its_connection_back(database, store):
    for n in range(5):
        a_running_job(store, now=T0 + n)
    taken = database.engine.pool.checkedout()
    for _ in range(40):  # more than there are connections
        told = store.history(T0, T0 + 5, 1)
        next(told)
        told.close()
    assert database.engine.pool.checkedout() == taken
