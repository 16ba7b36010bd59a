"""Accepted jobs are counted apart from the stored rows, so a row that vanishes is detected (JOB-3)."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select

from routing.queries import job_list
from slotkeeper.config import DatabaseTimeouts
from slotkeeper.db import Database
from slotkeeper.errors import IdempotencyConflict
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import accepted, jobs
from slotkeeper.outbox import retention
from tests.support.builders import T0, a_job, a_job_in, a_queued_job, an_ended_job


def _vanish(database: Database, job_id: str) -> None:
    with database.engine.begin() as connection:
        for table, column in (("events", "job_id"), ("jobs", "id")):
            connection.exec_driver_sql(f"DELETE FROM {table} WHERE {column} = '{job_id}'")


def _parts(database: Database) -> int:
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(accepted)).scalar_one()


def _count_rows(database: Database) -> dict[State, int]:
    with database.read() as connection:
        found = connection.execute(select(jobs.c.state, func.count()).group_by(jobs.c.state))
        return dict.fromkeys(State, 0) | {State(state): count for state, count in found}


def test_job_3_a_job_that_vanished_behind_our_back_is_missed(database, store):
    jobs = [a_queued_job(store) for _ in range(3)]
    assert ledger.read(database).balanced
    _vanish(database, jobs[1].id)
    found = ledger.read(database)
    assert (found.accepted, sum(found.by_state.values()), found.balanced) == (3, 2, False)
    ledger.fold(database, most=1)
    assert not ledger.read(database).balanced
    a_queued_job(store)
    assert ledger.read(database).accepted == 4


def test_jobs_are_counted_by_state_without_reading_the_completed_ones(database, store):
    for state in State:
        for _ in range(2):
            a_job_in(store, state)
    assert ledger.count_by_state(database) == _count_rows(database) == dict.fromkeys(State, 2)
    retention.delete_ended_jobs(store.database, T0 * 2, limit=3)
    store.submit([a_job(id=job_list.find_jobs(store.database, state=State.QUEUED)[0].id)], T0)  # a doubled message
    assert ledger.count_by_state(database) == ledger.read(database).by_state == _count_rows(database)


def test_job_3_what_was_not_accepted_is_not_counted(database, store):
    first = a_job(idempotency_key="k", fingerprint="one")
    store.submit([first], T0)
    store.submit([a_job(id=first.id)], T0)  # a doubled message
    store.submit([a_job(idempotency_key="k", fingerprint="one")], T0)
    with pytest.raises(IdempotencyConflict):  # The first of the two is undone.
        store.submit([a_job(), a_job(idempotency_key="k", fingerprint="two")], T0)
    found = ledger.read(database)
    assert (found.accepted, found.balanced) == (1, True)


def test_job_3_what_is_removed_after_its_end_is_not_missed(database, store):
    for _ in range(3):
        an_ended_job(store)
    assert retention.delete_ended_jobs(store.database, T0 * 2) == 3
    found = ledger.read(database)
    assert (found.accepted, found.balanced) == (3, True)


def test_job_3_every_job_that_is_submitted_while_the_ledger_is_folded_is_counted(database):
    patient = DatabaseTimeouts(turn_s=60, transaction_s=60, lock_s=60)
    two = [Database(database.url, patient) for _ in range(2)]
    stores = [JobStore(one) for one in two]

    def submit(n: int) -> None:
        stores[n % 2].submit([a_job(), a_job()], T0)
        if n % 5 == 0:
            ledger.fold(two[n % 2], most=0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(submit, range(60)))
    for one in two:
        one.close()
    found = ledger.read(database)
    assert (found.accepted, found.balanced) == (120, True)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_the_parts_are_added_up_when_they_are_many(database, store):
    for _ in range(5):
        a_queued_job(store)
    ledger.fold(database, most=5)
    assert _parts(database) == 5
    ledger.fold(database, most=4)
    assert _parts(database) == 1
    assert ledger.read(database).accepted == 5
