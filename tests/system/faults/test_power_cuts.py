"""A database that has lost its latest commits, as after a restored backup, and a Redis that has not."""

import pytest
from sqlalchemy import delete

from routing.maintenance.server_report import ServerReport
from slotkeeper.errors import CommitUnknown
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import events, jobs
from slotkeeper.registry.identity import LOCAL_IDENTITY
from tasks.worker.worker import Worker
from tests.support import passes
from tests.support.harness import LEASE_MS, OFFER_MS, UP_AND_IDLE, Harness
from tests.tasks.worker.one_run import FakeServer, run_open_offer


def _lose(harness: Harness, job_id: str) -> None:
    """As if its submit, and all that came of it, had not reached the disk."""
    with harness.database.engine.begin() as connection:
        connection.execute(delete(events).where(events.c.job_id == job_id))
        connection.execute(delete(jobs).where(jobs.c.id == job_id))


def test_a_waiting_job_that_the_database_lost_is_not_run_and_the_next_job_gets_its_slot(
    harness: Harness, worker: Worker, server: FakeServer
) -> None:
    harness.register()
    lost, last = harness.submit(), harness.submit()
    _lose(harness, lost)
    run_open_offer(harness)
    assert harness.offered() == [last] and server.asked == []


@pytest.mark.parametrize(("is_claimed", "lasts_ms"), [(False, OFFER_MS), (True, LEASE_MS)])
def test_a_slot_held_for_a_job_that_the_database_lost_goes_to_the_next_job(
    harness: Harness, is_claimed: bool, lasts_ms: int
) -> None:
    harness.register()
    lost, last = harness.submit(), harness.submit()
    if is_claimed:
        harness.start()
    _lose(harness, lost)
    harness.notifications.offers.clear()
    harness.later(lasts_ms + 1)
    assert passes.reap(harness.dispatcher) == 1
    assert harness.offered() == [last]


def test_a_run_that_the_database_lost_blocks_its_slot_until_its_server_reports_no_run(
    harness: Harness,
) -> None:
    harness.register()
    lost = harness.submit()
    harness.start()
    _lose(harness, lost)
    harness.later(LEASE_MS + 1)
    passes.reap(harness.dispatcher)
    passes.apply_reports(harness.dispatcher, {"gpu": ServerReport(True, 1, frozenset({lost}))})
    next_job = harness.submit()
    assert harness.offered() == []
    passes.apply_reports(harness.dispatcher, {"gpu": UP_AND_IDLE})
    assert harness.offered() == [next_job]


def test_a_submit_whose_disk_write_failed_raises_commit_unknown_and_is_enqueued_later(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()

    def fails() -> None:
        raise OSError("the disk has failed")

    with monkeypatch.context() as patch:
        patch.setattr(harness.database._group._writer, "sync", fails)
        with pytest.raises(CommitUnknown):
            harness.dispatcher.submit([harness.a(id="one")], LOCAL_IDENTITY)
    assert harness.queue.waiting() == [] and harness.offered() == []
    passes.reconcile(harness.dispatcher)
    assert harness.run_all() == ["one"]
    assert harness.state("one") is State.COMPLETED


def test_a_job_that_is_submitted_again_with_the_same_id_holds_one_slot(harness: Harness) -> None:
    """The broker delivers an unacknowledged Celery message again, with the same id."""
    harness.register(2)
    harness.submit_all([harness.a(), harness.a()])
    one, two = harness.start(), harness.start()
    harness.submit(id="mine")
    _lose(harness, "mine")
    harness.later(50)
    harness.submit(id="mine")
    last = harness.submit()
    for ended in (one, two):
        harness.settle(ended)
    passes.sweep(harness.dispatcher)
    assert sorted(harness.offered()) == [last, "mine"]
