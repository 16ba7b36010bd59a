"""All jobs that are due at one time change their state, each once, in few statements."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import event, text

from slotkeeper.db import Database
from slotkeeper.jobs.states import ACTIVE_STATES, FINAL_STATES, Reason, State
from slotkeeper.jobs.store import JobStore
from tests.support.builders import (
    CALLBACK,
    SECOND,
    T0,
    a_delayed_job,
    a_job_in,
    a_queued_job,
    a_running_job,
    an_ended_job,
    at_once,
    row_of,
    trail_of,
)
from tests.support.callbacks import due_ids
from tests.support.ends import store_end

DUE, LATER = T0 + SECOND, T0 + 60 * SECOND


@contextmanager
def _statements(database: Database) -> Iterator[list[str]]:
    """Record the statements that the block executes."""
    statements: list[str] = []

    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(database.engine, "before_cursor_execute", note)
    yield statements
    event.remove(database.engine, "before_cursor_execute", note)


# -- deadlines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(ACTIVE_STATES))
def test_a_job_past_its_deadline_is_ended_whatever_it_is_doing(store, state):
    job = a_job_in(store, state, deadline_ms=DUE)
    a_job_in(store, state)  # has no deadline
    assert store.expire_overdue(DUE - 1) == []
    (moved,) = store.expire_overdue(DUE)
    assert (moved.job, moved.to, moved.attempt) == (job.queued, State.EXPIRED, job.attempt)
    after = store.get(job.id)
    assert (after.state, after.why, after.finished_ms, after.lease) == (
        State.EXPIRED,
        Reason.DEADLINE_PASSED,
        DUE,
        None,
    )
    assert after.error_message == f"Its deadline passed while it was {state}."
    assert store.expire_overdue(LATER) == []


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_job_1_a_deadline_ends_nothing_that_has_ended(database, store, state):
    job = an_ended_job(store, state, deadline_ms=DUE)
    before = row_of(database, job.id)
    assert store.expire_overdue(LATER) == []
    assert row_of(database, job.id) == before


def test_job_2_each_of_many_that_expire_has_its_one_event_with_its_attempt(store):
    waiting, running = a_queued_job(store, deadline_ms=DUE), a_running_job(store, deadline_ms=DUE)
    assert len(store.expire_overdue(LATER)) == 2
    assert trail_of(store, waiting.id)[1:] == [("job.expired", "deadline_passed", 0)]
    assert trail_of(store, running.job.id)[2:] == [("job.expired", "deadline_passed", 1)]
    assert store.list_events(waiting.id)[-1].data["error"]["message"] == "Its deadline passed while it was queued."


def test_hook_1_each_of_many_expired_jobs_with_a_callback_has_a_due_message(database, store):
    ids = [a_queued_job(store, deadline_ms=DUE, callback_url=CALLBACK).id for _ in range(3)]
    a_queued_job(store, deadline_ms=DUE)
    assert len(store.expire_overdue(LATER)) == 4
    assert sorted(due_ids(database, LATER)) == sorted(f"msg_{job_id}_0_expired" for job_id in ids)


def test_the_longest_overdue_jobs_expire_first_and_at_most_as_many_as_the_limit(store):
    late, soon, later = (a_queued_job(store, deadline_ms=DUE + n).id for n in (2, 1, 3))
    assert {moved.job.id for moved in store.expire_overdue(LATER, limit=2)} == {soon, late}
    assert [moved.job.id for moved in store.expire_overdue(LATER, limit=2)] == [later]


def test_two_concurrent_expirations_end_each_job_once(database, store):
    other = JobStore(Database(database.url))
    ids = [a_job_in(store, state, deadline_ms=DUE).id for state in ACTIVE_STATES for _ in range(10)]
    mine, theirs = at_once(lambda: store.expire_overdue(LATER), lambda: other.expire_overdue(LATER))
    assert Counter(moved.job.id for moved in mine + theirs) == Counter(ids)
    assert all(trail_of(store, job_id)[-1][0] == "job.expired" for job_id in ids)
    other.database.close()


def test_a_run_that_is_settled_while_it_expires_ends_once(database, store):
    other = JobStore(Database(database.url))
    runs = [a_running_job(store, deadline_ms=DUE) for _ in range(20)]
    settle = [
        lambda run=run: store_end(other, run.job.id, run.attempt, Reason.FINISHED, LATER, result="{}") for run in runs
    ]
    ended, *settled = at_once(lambda: store.expire_overdue(LATER), *settle)
    ended += store.expire_overdue(LATER)  # the first pass skipped jobs that were being settled
    assert Counter(moved.job.id for moved in [*ended, *filter(None, settled)]) == Counter(run.job.id for run in runs)
    other.database.close()


@pytest.mark.parametrize("many", [3, 60])
def test_many_deadlines_take_no_more_statements_than_few(database, store, many):
    for state in sorted(ACTIVE_STATES):
        for _ in range(many // 3):
            a_job_in(store, state, deadline_ms=DUE, callback_url=CALLBACK)
    with _statements(database) as statements:
        assert len(store.expire_overdue(LATER)) == many
    assert Counter(statement.split()[0] for statement in statements if "jobs" in statement) == {
        "SELECT": 2,
        "UPDATE": 3,
    }
    assert sum(statement.startswith("INSERT") for statement in statements) <= 2 * many.bit_length()


def test_a_search_for_due_jobs_that_finds_none_takes_no_write_lock(database, store):
    a_queued_job(store, deadline_ms=LATER)
    a_delayed_job(store, due_ms=LATER)
    with _statements(database) as statements:
        assert (store.expire_overdue(DUE), store.promote_due(DUE)) == ([], [])
    assert [statement.split()[0] for statement in statements] == ["SELECT", "SELECT"]


# -- due times -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [2, 40])
def test_many_due_jobs_take_no_more_statements_than_few(database, store, many):
    ids = [a_delayed_job(store).id for _ in range(many)]
    with _statements(database) as statements:
        assert [job.id for job in store.promote_due(LATER)] == ids
    assert Counter(statement.split()[0] for statement in statements if "jobs" in statement) == {
        "SELECT": 2,
        "UPDATE": 1,
    }
    assert all(trail_of(store, job_id)[-1] == ("job.enqueued", "due", 0) for job_id in ids)


def test_a_due_job_that_is_locked_by_a_cancel_does_not_block_other_due_jobs(postgres_url):
    database = Database(postgres_url)
    store = JobStore(database)
    held, free = a_delayed_job(store), a_delayed_job(store)
    with database.engine.begin() as somebody:
        somebody.execute(text("UPDATE jobs SET state = 'canceled', due_ms = NULL WHERE id = :id"), {"id": held.id})
        assert [job.id for job in store.promote_due(LATER)] == [free.id]
    assert store.promote_due(LATER) == []
    database.close()


# -- what waits ------------------------------------------------------------------------------------------------


def test_the_queued_jobs_of_all_models_are_read_in_order_of_acceptance(store):
    a_delayed_job(store)
    ids = [a_queued_job(store, model=model).id for model in ("zimg", "zvideo", "zimg")]
    assert [job.id for job in store.list_queued()] == ids
    assert [job.id for job in store.list_queued(limit=2)] == ids[:2]
    assert [job.id for job in store.list_queued(after_seq=store.get(ids[0]).seq)] == ids[1:]


def test_the_queued_jobs_of_more_models_than_one_statement_takes_are_listed_in_order(store):
    ids = [a_queued_job(store, model=f"m{n % 7}").id for n in range(12)]
    models = [f"idle{n}" for n in range(250)] + [f"m{n}" for n in range(7)]
    assert [job.id for job in store.list_queued(models)] == ids
    assert [job.id for job in store.list_queued(models, limit=5)] == ids[:5]
    assert store.list_queued([]) == []
