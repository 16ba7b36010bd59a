"""The check of invariants finds each violation, and reports nothing in a healthy system."""

import itertools
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from sqlalchemy import text

from routing.dispatch.outcome import OutcomeKind
from routing.maintenance import deadlines, invariants
from routing.maintenance.invariants import Check, Finding
from routing.maintenance.reaper import REPORTED_AFTER
from routing.maintenance.server_report import ServerReport
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import balance_parts
from tasks import maintenance
from tests.support import passes
from tests.support.builders import an_ended_job
from tests.support.ends import store_end
from tests.support.harness import LEASE_MS, OFFER_MS, SETTINGS, UP_AND_IDLE, Harness
from tools.cluster.direct_starts import claim_offer


@pytest.fixture
def busy(harness: Harness) -> Iterator[Harness]:
    """A system that is well: j0 runs, j1 is offered, j2 and j3 wait, one is delayed, some have ended."""
    for _ in range(3):
        an_ended_job(harness.store, now_ms=harness.now)
    harness.register(2)
    for _ in range(4):
        harness.submit()
    harness.submit(delay_s=60)
    harness.start()
    harness.later(6_000)
    harness.dispatcher.leases.renew(
        "zimg", "w1", [held for held, _ in harness.dispatcher.leases.list_all(["zimg"])["zimg"]]
    )
    yield harness


WELL = {"gpu": ServerReport(True, 1, frozenset({"j0"}))}


def look(harness: Harness, reports: dict[str, ServerReport] = WELL) -> set[Finding]:
    return passes.find_violations(harness.dispatcher, reports)


def _execute(harness: Harness, statement: str) -> None:
    with harness.database.engine.begin() as connection:
        connection.execute(text(statement))


def test_a_healthy_system_has_no_finding_at_any_step_of_a_job(busy):
    assert look(busy) == set()
    while busy.notifications.offers:
        task = busy.start("w2")
        assert look(busy) == set()
        busy.settle(task, OutcomeKind.BUSY if task.run.attempt == 1 else OutcomeKind.DONE, retry_after_s=0.0)
        assert look(busy) == set()


def test_queue_1_a_queued_job_that_is_missing_in_redis_is_reported_until_it_is_enqueued_again(busy):
    job = busy.job("j2")
    busy.dispatcher.queues.withdraw("zimg", [job.queued])
    assert look(busy) == {Finding(Check.ROOM, "zimg")}
    passes.reconcile(busy.dispatcher)
    assert look(busy) == set()


def test_a_running_job_without_a_lease_is_found_until_it_has_one_again(busy):
    busy.redis.delete(busy.queue.key("leases:j0"))
    busy.redis.zrem(busy.queue.key("leases"), "j0")
    busy.redis.hdel(busy.queue.key("slots"), "gpu-slot0")
    assert look(busy) == {Finding(Check.RUN, "j0")}
    passes.restore_missing(busy)
    assert look(busy) == set()


@pytest.mark.parametrize("column", ["state = 'completed'", "lease = 'another w9'"])
def test_a_lease_without_its_run_is_found(busy, column):
    _execute(busy, f"UPDATE jobs SET {column} WHERE id = 'j0'")
    assert Finding(Check.LEASE, "j0") in look(busy, {})


def test_a_job_that_is_offered_and_never_started_is_found(harness):
    harness.register()
    job_id = harness.submit()
    for _ in range(REPORTED_AFTER):
        assert look(harness, {}) == set()
        harness.later(OFFER_MS)
        passes.reap(harness.dispatcher)
    assert look(harness, {}) == {Finding(Check.START, job_id)}
    assert harness.offered() == [job_id], "workers look for open offers themselves: no second message"
    harness.dispatcher.queues.offer("zimg", 1, claimant="w1")
    assert harness.redis.hget(harness.queue.key(f"leases:{job_id}"), "owner") == b"w1", "and find this one"


def test_a_job_whose_workers_die_before_its_start_is_found(harness):
    harness.register()
    job_id = harness.submit()
    for _ in range(REPORTED_AFTER):
        assert claim_offer(harness.dispatcher.leases, harness.notifications.offers.pop(), "w1")
        harness.later(LEASE_MS)
        passes.reap(harness.dispatcher)
    assert look(harness, {}) == {Finding(Check.START, job_id)}


def test_slot_1_the_check_finds_a_slot_whose_server_does_not_report_the_job(busy):
    assert look(busy, {"gpu": UP_AND_IDLE}) == {Finding(Check.SLOT, "j0")}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_job_3_the_check_finds_a_deleted_row(busy):
    _execute(busy, "DELETE FROM jobs WHERE id IN (SELECT id FROM jobs WHERE state = 'completed' LIMIT 1)")
    assert look(busy) == {Finding(Check.LEDGER, "ledger")}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_job_3_a_row_that_retention_removed_is_none_missing(busy):
    busy.later(100_000)
    busy.dispatcher.leases.renew("zimg", "w1", [held for held, _ in busy.dispatcher.leases.list_all(["zimg"])["zimg"]])
    assert deadlines.purge_ended_jobs(busy.dispatcher, retention_s=1) == 3
    book = ledger.read(busy.database)
    assert book.balanced and book.purged[State.COMPLETED] == 3 and book.accepted == 8


def test_a_lease_whose_run_has_just_ended_is_no_violation_until_it_should_have_expired(busy: Harness):
    """Its worker died between the end in the database and the release of the slot."""
    held = next(held for held, _ in busy.dispatcher.leases.list_all(["zimg"])["zimg"] if held.owner)
    job = busy.job(held.job_id)
    store_end(busy.store, job.id, job.attempt, Reason.FINISHED, busy.now, result="{}")
    assert Finding(Check.LEASE, job.id) not in passes.find_violations(busy.dispatcher, WELL)
    busy.later(SETTINGS.lease_ms)
    assert Finding(Check.LEASE, job.id) in passes.find_violations(busy.dispatcher, WELL)


# -- the task --------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(busy: Harness, monkeypatch: pytest.MonkeyPatch) -> Harness:
    passes.run_tasks_with(monkeypatch, busy.dispatcher)
    monkeypatch.setattr(maintenance, "database", lambda: busy.database)
    monkeypatch.setattr(maintenance, "read_reports", lambda servers: WELL)
    monkeypatch.setattr(maintenance, "_RECHECK_DELAY_S", 0)
    return busy


def test_a_check_raises_a_gauge_and_an_event_for_each_difference_and_lowers_it_again(watched):
    maintenance.check_invariants()
    assert set(ledger.read_findings(watched.database)) >= {check.value for check in Check}
    assert not any(ledger.read_findings(watched.database).values())

    lost = watched.job("j3")
    watched.dispatcher.queues.withdraw("zimg", [lost.queued])
    maintenance.check_invariants()
    assert ledger.read_findings(watched.database)[Check.ROOM] == 1
    assert [event.data for event in watched.store.list_events("zimg")] == [{"check": "queued_not_in_room"}]

    maintenance.reconcile_all()
    maintenance.check_invariants()
    assert not any(ledger.read_findings(watched.database).values())


def test_a_violation_that_the_second_check_does_not_find_is_not_reported(watched, monkeypatch):
    looks = iter([{Finding(Check.ROOM, "zimg"), Finding(Check.RUN, "j0")}, {Finding(Check.RUN, "j0")}])
    monkeypatch.setattr(invariants, "find_violations", lambda *_, with_transfers: next(looks))
    maintenance.check_invariants()
    assert {check for check, count in ledger.read_findings(watched.database).items() if count} == {Check.RUN}


def test_credits_that_do_not_balance_stay_a_finding_until_transfers_are_added_up_again(watched, monkeypatch):
    monkeypatch.setattr(maintenance, "_checks", itertools.count())

    def findings() -> int:
        maintenance.check_invariants()
        return ledger.read_findings(watched.database)[Check.CREDIT]

    for amount in (1, -1):
        part = {"tenant": "acme", "available": amount, "held": 0, "spent": 0}
        with watched.database.engine.begin() as connection:
            connection.execute(balance_parts.insert(), part)
        assert [findings() for _ in range(5)] == [amount == 1] * 5


# -- at size ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_ledger_reads_an_index_and_not_the_jobs(store: JobStore):
    """`python -m tools.benchmarks.recovery_benchmark ledger` measures this with 1,000,000 jobs; here are 100,000."""
    path = store.database.url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000) INSERT INTO jobs "
            "(id, model, state, why, priority, tenant, created_ms, source, payload) SELECT 'j' || i, 'zimg', "
            "CASE i % 3 WHEN 0 THEN 'queued' ELSE 'completed' END, 'submitted', 5, 'default', 0, 'rest', '{}' FROM n"
        )
    took_s = []
    for _ in range(5):
        began = time.thread_time()
        book = ledger.read(store.database)
        took_s.append(time.thread_time() - began)
    assert min(took_s) < 0.5
    assert book.balanced and book.accepted == 100_000 and book.by_state[State.QUEUED] == 33_333
