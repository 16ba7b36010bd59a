"""A database that has lost its last moments, as after a restored backup, and a Redis that has not."""

import pytest
from sqlalchemy import delete

from routing.maintenance.server_report import ServerReport
from slotkeeper.errors import CommitUnknown
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import events, jobs
from slotkeeper.registry.identity import LOCAL_IDENTITY
from tasks.worker.worker import Worker
from tests.support import passes
from tests.support.stage import LEASE_MS, OFFER_MS, UP_AND_IDLE, Stage
from tests.tasks.worker.one_run import FakeServer, run_open_offer


def _lose(stage: Stage, job_id: str) -> None:
    """As if its submit, and all that came of it, had not reached the disk."""
    with stage.database.engine.begin() as connection:
        connection.execute(delete(events).where(events.c.job_id == job_id))
        connection.execute(delete(jobs).where(jobs.c.id == job_id))


def test_a_waiting_job_that_the_record_lost_is_offered_in_its_turn_and_its_slot_goes_on(
    stage: Stage, worker: Worker, server: FakeServer
) -> None:
    stage.register()
    lost, last = stage.submit(), stage.submit()
    _lose(stage, lost)
    run_open_offer(stage)
    assert stage.offered() == [last] and server.asked == []


@pytest.mark.parametrize(("is_claimed", "lasts_ms"), [(False, OFFER_MS), (True, LEASE_MS)])
def test_a_slot_held_for_a_job_that_the_database_lost_goes_to_the_next_job(
    stage: Stage, is_claimed: bool, lasts_ms: int
) -> None:
    stage.register()
    lost, last = stage.submit(), stage.submit()
    if is_claimed:
        stage.start()
    _lose(stage, lost)
    stage.told.offers.clear()
    stage.later(lasts_ms + 1)
    assert passes.reap(stage.dispatcher) == 1
    assert stage.offered() == [last]


def test_a_run_that_the_record_lost_keeps_its_slot_from_others_for_as_long_as_its_server_is_at_it(stage: Stage) -> None:
    stage.register()
    lost = stage.submit()
    stage.start()
    _lose(stage, lost)
    stage.later(LEASE_MS + 1)
    passes.reap(stage.dispatcher)
    passes.apply_reports(stage.dispatcher, {"gpu": ServerReport(True, 1, frozenset({lost}))})
    next_job = stage.submit()
    assert stage.offered() == []
    passes.apply_reports(stage.dispatcher, {"gpu": UP_AND_IDLE})
    assert stage.offered() == [next_job]


def test_a_submit_that_the_disk_has_refused_is_uncertain_and_redis_does_not_know_it_yet(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()

    def fails() -> None:
        raise OSError("the disk has failed")

    with monkeypatch.context() as patch:
        patch.setattr(stage.database._group._writer, "sync", fails)
        with pytest.raises(CommitUnknown):
            stage.dispatcher.submit([stage.a(id="one")], LOCAL_IDENTITY)
    assert stage.room.waiting() == [] and stage.offered() == []
    passes.reconcile(stage.dispatcher)
    assert stage.run_all() == ["one"]
    assert stage.state("one") is State.COMPLETED


def test_a_job_that_comes_again_by_its_own_id_holds_one_slot(stage: Stage) -> None:
    """The broker delivers an unacknowledged Celery message again, with the same id."""
    stage.register(2)
    stage.submit_all([stage.a(), stage.a()])
    one, two = stage.start(), stage.start()
    stage.submit(id="mine")
    _lose(stage, "mine")
    stage.later(50)
    stage.submit(id="mine")
    last = stage.submit()
    for ended in (one, two):
        stage.settle(ended)
    passes.sweep(stage.dispatcher)
    assert sorted(stage.offered()) == [last, "mine"]
