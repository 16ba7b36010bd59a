"""Retention deletes old jobs and their rows, keeps what is still needed, and counts both (JOB-3)."""

import pytest
from sqlalchemy import event, make_url, select

from slotkeeper.db import Database
from slotkeeper.db.schema import counters
from slotkeeper.errors import Conflict, DatabaseUnavailable
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import ACTIVE_STATES, FINAL_STATES, Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import messages
from slotkeeper.outbox import retention
from slotkeeper.outbox.tables import tries
from tests.support.builders import (
    CALLBACK,
    SECOND,
    T0,
    a_job_in,
    a_queued_job,
    a_start,
    an_ended_job,
    at_once,
    row_of,
    rows_in,
)
from tests.support.callbacks import claim, delivered, due_ids, failed
from tests.support.ends import store_end

LATER = T0 + 60 * SECOND


def _purged(database: Database) -> dict[State, int]:
    with database.read() as connection:
        rows = connection.execute(select(counters).where(counters.c.name.like("purged.%"))).all()
    return {State(row.name.removeprefix("purged.")): row.value for row in rows}


def test_counts_names_every_state_even_when_no_job_is_in_it(store):
    assert ledger.read(store.database).by_state == dict.fromkeys(State, 0)


def test_job_3_the_ledger_balances_at_every_step_of_every_life(database, store):
    """accepted = those that stand in each state + those removed, which are counted by the state they ended in."""
    accepted = 0
    for state in State:
        for _ in range(2):
            a_job_in(store, state)
            accepted += 1
            assert sum(ledger.read(store.database).by_state.values()) + sum(_purged(database).values()) == accepted
    assert set(ledger.read(store.database).by_state.values()) == {2}
    assert retention.delete_ended_jobs(store.database, T0 + 1, limit=3) == 3
    assert sum(ledger.read(store.database).by_state.values()) + sum(_purged(database).values()) == accepted
    assert retention.delete_ended_jobs(store.database, T0 + 1) == 7
    assert sum(ledger.read(store.database).by_state.values()) == 6
    assert _purged(database) == dict.fromkeys(FINAL_STATES, 2)


def test_purge_removes_what_ended_before_and_nothing_that_has_not_ended(store):
    old, new = an_ended_job(store, now_ms=T0), an_ended_job(store, now_ms=LATER)
    waiting = [a_job_in(store, state) for state in sorted(ACTIVE_STATES)]
    assert retention.delete_ended_jobs(store.database, LATER) == 1
    assert store.get(old.id) is None
    assert store.get(new.id) is not None
    assert all(store.get(job.id) is not None for job in waiting)


def test_the_retention_of_a_job_starts_at_its_end(store):
    job = a_queued_job(store, now_ms=T0)
    store.cancel_waiting(job.id, LATER)
    assert retention.delete_ended_jobs(store.database, LATER) == 0
    assert retention.delete_ended_jobs(store.database, LATER + 1) == 1


def test_purge_takes_along_what_hangs_on_the_job_but_for_its_events(database, store):
    old = an_ended_job(store, callback_url=CALLBACK)
    kept = an_ended_job(store, callback_url=CALLBACK, now_ms=LATER)
    for webhook_id in due_ids(database, LATER):
        delivered(database, claim(database, webhook_id, LATER, LATER + SECOND), LATER)
    assert (rows_in(database, messages), rows_in(database, tries)) == (0, 2)
    assert retention.delete_ended_jobs(store.database, LATER) == 1
    assert len(store.list_events(old.id)) == len(store.list_events(kept.id)) == 4, "also that its message came"
    assert rows_in(database, tries) == 1


def test_two_concurrent_purges_count_each_job_once(database, store):
    other = JobStore(Database(database.url))
    for _ in range(20):
        an_ended_job(store)
    removed = at_once(
        lambda: retention.delete_ended_jobs(store.database, LATER),
        lambda: retention.delete_ended_jobs(other.database, LATER),
    )
    assert sum(removed) == 20
    assert _purged(database) == {State.COMPLETED: 20}
    other.database.close()


def test_a_dead_job_can_be_deleted_and_stays_in_the_ledger(database, store):
    dead = an_ended_job(store, State.DEAD, callback_url=CALLBACK)
    (webhook_id,) = due_ids(database, LATER)
    delivered(database, claim(database, webhook_id, LATER, LATER + SECOND), LATER)
    assert retention.delete_dead_job(store.database, dead.id)
    assert not retention.delete_dead_job(store.database, dead.id)
    assert store.get(dead.id) is None
    assert _purged(database) == {State.DEAD: 1}
    assert rows_in(database, tries) == 0


def test_hook_1_a_dead_job_whose_message_is_still_pending_is_not_deleted(database, store):
    """The message is made from the job: without the job it could not be sent."""
    dead = an_ended_job(store, State.DEAD, callback_url=CALLBACK)
    (webhook_id,) = due_ids(database, LATER)
    with pytest.raises(Conflict) as refused:
        retention.delete_dead_job(store.database, dead.id)
    assert refused.value.facts == {"job_id": dead.id, "webhook_id": webhook_id}
    assert store.get(dead.id).state is State.DEAD
    assert (due_ids(database, LATER), _purged(database)) == ([webhook_id], {})
    message = claim(database, webhook_id, LATER, LATER + SECOND)
    failed(database, message, LATER, None)  # given up: no message is pending
    assert retention.delete_dead_job(store.database, dead.id)


def test_hook_1_each_message_of_a_job_that_died_twice_holds_it(database, store):
    dead = an_ended_job(store, State.DEAD, callback_url=CALLBACK)
    (first,) = due_ids(database, LATER)
    delivered(database, claim(database, first, LATER, LATER + SECOND), LATER)
    store.revive(dead.id, LATER)
    store_end(store, dead.id, a_start(store, dead.id).attempt, Reason.RETRIES_EXHAUSTED, LATER)
    with pytest.raises(Conflict):
        retention.delete_dead_job(store.database, dead.id)


def test_a_dead_job_is_either_deleted_or_revived_when_both_are_requested_at_once(database, store):
    other = JobStore(Database(database.url))
    for _ in range(5):
        dead = an_ended_job(store, State.DEAD)
        deleted, revived = at_once(
            lambda d=dead: retention.delete_dead_job(store.database, d.id), lambda d=dead: other.revive(d.id, LATER)
        )
        assert deleted == (revived is None)
        assert (store.get(dead.id) is None) == deleted
    other.database.close()


@pytest.mark.parametrize("state", sorted(set(State) - {State.DEAD}))
def test_only_a_dead_job_can_be_deleted(database, store, state):
    job = a_job_in(store, state)
    before = row_of(database, job.id)
    assert not retention.delete_dead_job(store.database, job.id)
    assert row_of(database, job.id) == before
    assert _purged(database) == {}


@pytest.mark.postgres
def test_hook_1_a_job_that_is_being_deleted_cannot_be_revived(postgres_url):
    """Between the check for pending messages and the delete, a revived job could get another message."""
    impatient = make_url(postgres_url).update_query_dict({"options": "-c lock_timeout=50ms"})
    database, hurried = Database(postgres_url), Database(impatient.render_as_string(hide_password=False))
    store, other = JobStore(database), JobStore(hurried)
    dead = an_ended_job(store, State.DEAD)
    tried: list[object] = []

    def revive(connection: object, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("DELETE FROM jobs"):
            tried.extend(at_once(lambda: other.revive(dead.id, LATER)))

    event.listen(database.engine, "before_cursor_execute", revive)
    assert retention.delete_dead_job(store.database, dead.id)
    (refused,) = tried
    assert isinstance(refused, DatabaseUnavailable) and "lock timeout" in str(refused)
    database.close()
    hurried.close()
