"""Leases that Redis has lost, and leases that are written again."""

import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest

from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.maintenance import restore_leases
from routing.queue.leases import Renewal
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.states import Reason, State
from tasks.worker import lease_checks
from tasks.worker.heartbeat import LeaseWatch
from tasks.worker.worker import Worker
from tests.support import passes
from tests.support.builders import eventually
from tests.support.ends import hand_back
from tests.support.stage import LEASE_MS, SECOND, SETTINGS, Stage
from tools.cluster.direct_starts import begin_run, claim_offer

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

DONE = Outcome(OutcomeKind.DONE, result={"url": "x"})
PENDING = Outcome(OutcomeKind.PENDING, remote_id="r-1")
UNKNOWN = Outcome(OutcomeKind.UNKNOWN)
FAULT = Outcome(OutcomeKind.RETRY, code="server_error", message="500")


def _raise_unavailable(*_: object, **__: object) -> Any:
    raise DatabaseUnavailable("down")


def _lose_leases(stage: Stage, *job_ids: str) -> None:
    """Remove these leases, as a failover to an older replica does; the queue stays open."""
    for job_id in job_ids:
        slot = stage.room.lease_of(job_id)["slot"]
        stage.redis.delete(stage.room.key(f"leases:{job_id}"))
        stage.redis.zrem(stage.room.key("leases"), job_id)
        stage.redis.hdel(stage.room.key("slots"), slot)
        stage.redis.hdel(stage.room.key("held"), "default|zimg")
        stage.room.set_free(slot, stage.now)


def _start_run(stage: Stage, worker: Worker) -> tuple[ActiveRun, LeaseWatch]:
    """Start the run of the oldest wake-up, and return it with a watch whose request counts as sent."""
    active = begin_run(stage.dispatcher, stage.told.offers.pop(0), worker.owner)
    assert active is not None
    watch = worker.heartbeat.add(active.lease)
    watch.sent = True
    return active, watch


def test_a_lease_that_redis_lost_is_written_again_and_the_run_goes_on(stage, worker):
    stage.register()
    job_id = stage.submit()
    active, watch = _start_run(stage, worker)
    _lose_leases(stage, job_id)
    worker.heartbeat.beat()
    assert not watch.lost
    assert stage.room.taken() == {"gpu-slot0": job_id} and stage.room.members("free") == []
    assert stage.renewal(active) is Renewal.RENEWED
    assert stage.settle(active).moved is not None and stage.free() == 1


def test_a_run_whose_slot_was_given_away_meanwhile_goes_on_beside_and_has_the_slot_next(stage, worker):
    """The server still runs the older one and can refuse the newer; the outcomes of both are stored."""
    stage.register()
    first, second, third = (stage.submit() for _ in range(3))
    active, watch = _start_run(stage, worker)
    _lose_leases(stage, first)
    passes.sweep(stage.dispatcher)
    other = stage.start("w2")
    assert (other.run.job.id, other.lease.slot) == (second, active.lease.slot)
    worker.heartbeat.beat()
    assert not watch.lost and [stage.renewal(run) for run in (active, other)] == [Renewal.RENEWED] * 2
    stage.settle(other, OutcomeKind.BUSY)
    assert stage.room.taken() == {"gpu-slot0": first}, "the slot accepts no third job"
    assert stage.settle(active).moved is not None
    stage.later(SECOND)
    passes.sweep(stage.dispatcher)
    assert stage.run_all() == [second, third]
    assert [stage.job(job_id).crashes for job_id in (first, second, third)] == [0, 0, 0]


def test_a_lease_that_another_has_by_now_is_lost(stage, worker):
    stage.register()
    stage.submit()
    active, watch = _start_run(stage, worker)
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    again = stage.start("w2")
    before = stage.room.dump()
    worker.heartbeat.beat()
    assert watch.lost and stage.room.dump() == before
    assert stage.settle(active).moved is None and stage.renewal(again) is Renewal.RENEWED


def test_two_runs_of_one_job_in_one_worker_have_separate_lease_watches(stage, worker):
    """The worker was disconnected from Redis until the lease expired, and then claimed the next offer of the job."""
    stage.register()
    stage.submit()
    _, older = _start_run(stage, worker)
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    active, newer = _start_run(stage, worker)
    stage.later(LEASE_MS - SECOND)
    worker.heartbeat.beat()
    assert older.lost and not newer.lost
    assert stage.room.expiry_of(active.lease.job_id) == stage.now + LEASE_MS
    worker.heartbeat.stop_all()
    assert older.stop and newer.stop
    worker.heartbeat.remove(older)
    assert worker.heartbeat.watches() == [newer]


def test_no_lease_counts_as_lost_while_the_database_is_down(stage, worker, monkeypatch):
    stage.register()
    job_id = stage.submit()
    _, watch = _start_run(stage, worker)
    _lose_leases(stage, job_id)
    monkeypatch.undo()
    monkeypatch.setattr(lease_checks, "_RETRY_S", 0.001)
    was_read = threading.Event()
    failures, get_statuses = iter(range(2)), stage.store.get_statuses
    monkeypatch.setattr(
        stage.store,
        "get_statuses",
        lambda ids: (was_read.set(), _raise_unavailable() if next(failures, None) is not None else get_statuses(ids))[
            1
        ],
    )
    worker.heartbeat.beat()
    assert was_read.wait(10) and not watch.lost
    eventually(lambda: stage.room.taken() == {"gpu-slot0": job_id})
    assert not watch.lost


def test_a_worker_that_has_ended_does_not_read_the_database_again(stage, worker, monkeypatch):
    stage.register()
    job_id = stage.submit()
    _start_run(stage, worker)
    _lose_leases(stage, job_id)
    monkeypatch.undo()
    monkeypatch.setattr(stage.store, "get_statuses", _raise_unavailable)
    pauses, wait = threading.Event(), worker.database_check._ended.wait
    monkeypatch.setattr(worker.database_check._ended, "wait", lambda _: (pauses.set(), wait(20))[1])
    worker.heartbeat.beat()
    assert pauses.wait(10), "the check pauses before it reads again"
    pauses.clear()
    worker.close()
    eventually(lambda: not worker.database_check._task._is_running)
    assert not pauses.is_set()


def test_leases_are_renewed_in_time_though_the_database_is_silent(stage, worker, monkeypatch):
    stage.register(2)
    stage.submit(), stage.submit()
    watches = [_start_run(stage, worker)[1] for _ in range(2)]
    monkeypatch.undo()
    read_began, silence_ends, reading = threading.Event(), threading.Event(), set[threading.Thread]()

    def wait_and_fail(_: object) -> None:
        reading.add(threading.current_thread())
        read_began.set()
        silence_ends.wait(5)
        _raise_unavailable()

    monkeypatch.setattr(stage.store, "get_statuses", wait_and_fail)
    worker.heartbeat._was_away = True
    try:
        for _ in range(5):
            stage.later(LEASE_MS - SECOND)
            worker.heartbeat.beat()
        assert read_began.wait(10) and threading.current_thread() not in reading
        assert stage.room.expiry_of(watches[0].lease.job_id) == stage.now + LEASE_MS
        assert passes.reap(stage.dispatcher) == 0
    finally:
        silence_ends.set()


@pytest.mark.parametrize("busy", [False, True])
def test_a_run_without_a_lease_and_without_a_worker_ends_even_if_another_job_has_its_slot(stage, worker, busy):
    stage.register()
    first = stage.submit()
    stage.start("dead")
    _lose_leases(stage, first)
    if busy:
        stage.submit()
        other = stage.start("w2")
        assert other.lease.slot == stage.job(first).slot
    assert passes.restore_missed(stage.dispatcher) == 0
    stage.later(restore_leases._GRACE_MS)
    assert [passes.restore_missed(stage.dispatcher) for _ in range(2)] == [1, 0]
    lasts_ms = SETTINGS.renew_every_ms * 9 // 4
    if busy:
        assert stage.renewal(other) is Renewal.RENEWED
    stage.later(lasts_ms - 1)
    assert passes.reap(stage.dispatcher) == 0
    if busy:
        assert stage.renewal(other) is Renewal.RENEWED
    stage.later(1)
    passes.reap(stage.dispatcher)
    job = stage.job(first)
    assert (job.state, job.why, job.crashes) == (State.QUEUED, Reason.LEASE_EXPIRED, 1)
    again = stage.start("w3")
    assert again.run.job.id == first and stage.settle(again).moved is not None
    if busy:
        assert stage.settle(other).moved is not None
    assert stage.room.taken() == {} and stage.free() == 1


def test_a_worker_whose_renewal_is_late_keeps_a_lease_that_maintenance_has_restored(stage, worker):
    stage.register()
    job_id = stage.submit()
    active = stage.start("w1")
    _lose_leases(stage, job_id)
    assert passes.restore_missed(stage.dispatcher) == 0
    stage.later(restore_leases._GRACE_MS)
    assert passes.restore_missed(stage.dispatcher) == 1
    stage.later(2 * SETTINGS.renew_every_ms)
    assert passes.reap(stage.dispatcher) == 0
    assert stage.renewal(active) is Renewal.RENEWED and stage.job(job_id).crashes == 0


def test_a_lease_that_maintenance_has_restored_lasts_no_longer_than_any_other(stage, worker):
    """With the longest permitted renewal interval, two and a quarter intervals are longer than a lease."""
    stage.dispatcher.settings = SETTINGS.model_copy(update={"renew_every_ms": LEASE_MS // 2 - 1})
    stage.register()
    job_id = stage.submit()
    stage.start("w1")
    _lose_leases(stage, job_id)
    passes.restore_missed(stage.dispatcher)
    stage.later(restore_leases._GRACE_MS)
    assert passes.restore_missed(stage.dispatcher) == 1
    assert stage.room.expiry_of(job_id) == stage.now + LEASE_MS


def test_a_run_that_ends_while_its_lease_is_written_again_leaves_none(stage, worker, monkeypatch):
    stage.register()
    first, second = stage.submit(), stage.submit()
    active = stage.start("w1")
    _lose_leases(stage, first)
    restore = stage.dispatcher.leases.restore

    def settle_and_restore(*args: Any) -> int:
        stage.settle(active)
        return restore(*args)

    monkeypatch.setattr(stage.dispatcher.leases, "restore", settle_and_restore)
    passes.restore_missing(stage)
    assert stage.run_all() == [second] and stage.room.taken() == {}


def test_a_run_that_ends_while_its_room_is_rebuilt_leaves_no_lease(stage, worker, monkeypatch):
    stage.register()
    first, second = stage.submit(), stage.submit()
    active = stage.start("w1")
    stage.lose_redis()
    restore, calls = stage.dispatcher.leases.restore, itertools.count(1)

    def settle_and_restore_once(*args: Any) -> int:
        if next(calls) == 1:
            stage.settle(active)
        return restore(*args)

    monkeypatch.setattr(stage.dispatcher.leases, "restore", settle_and_restore_once)
    passes.sweep(stage.dispatcher)
    assert next(calls) > 1 and stage.state(first) is State.COMPLETED
    assert stage.run_all() == [second] and stage.room.taken() == {}


def test_a_run_that_began_while_its_queue_was_rebuilt_is_refused_and_offered_again(stage, worker, monkeypatch):
    """Its lease was claimed before Redis lost its data, and its start follows the read of the running jobs."""
    stage.register()
    first, second = stage.submit(), stage.submit()
    offer = replace(stage.told.offers.pop(0), owner="w1")
    assert claim_offer(stage.dispatcher.leases, offer, "w1")
    stage.lose_redis()
    list_running = stage.store.list_running
    starts = iter([lambda: begin_run(stage.dispatcher, offer, "w1")])

    def list_and_start_once() -> Any:
        running = list_running()
        next(starts, lambda: None)()
        return running

    monkeypatch.setattr(stage.store, "list_running", list_and_start_once)
    passes.sweep(stage.dispatcher)
    assert stage.room.taken() == {offer.slot: first} and stage.room.waiting() == [second]
    assert stage.store.list_running() == [] and stage.run_all() == [first, second]


def test_a_resumed_run_that_began_while_its_queue_was_rebuilt_is_offered_in_its_slot(stage, worker, monkeypatch):
    """As above, but the run starts just before maintenance restores the offer that the worker had claimed."""
    stage.register()
    first, second = stage.submit(), stage.submit()
    assert hand_back(stage.dispatcher, stage.start())
    offer = replace(stage.told.offers.pop(0), owner="w1")
    assert claim_offer(stage.dispatcher.leases, offer, "w1")
    stage.lose_redis()
    restore_offers = stage.dispatcher.leases.restore_offers

    def start_and_restore(*args: Any) -> int:
        begin_run(stage.dispatcher, offer, "w1")
        return restore_offers(*args)

    monkeypatch.setattr(stage.dispatcher.leases, "restore_offers", start_and_restore)
    passes.sweep(stage.dispatcher)
    assert stage.room.taken() == {offer.slot: first} and stage.room.waiting() == [second]
    assert stage.store.list_running() == [] and stage.room.lease_of(first)["owner"] == ""


def test_a_run_that_is_handed_back_while_its_room_is_rebuilt_is_offered_in_its_slot_alone(stage, worker, monkeypatch):
    stage.register(1, server="z")
    job_id = stage.submit()
    active = stage.start("w1")
    stage.register(1, server="a")
    stage.lose_redis()
    restore, calls = stage.dispatcher.leases.restore, itertools.count()

    def hand_back_and_restore(*args: Any) -> int:
        if next(calls) == 0:
            assert hand_back(stage.dispatcher, active)
        return restore(*args)

    monkeypatch.setattr(stage.dispatcher.leases, "restore", hand_back_and_restore)
    passes.sweep(stage.dispatcher)
    assert next(calls) > 0
    assert stage.room.taken() == {active.lease.slot: job_id} and stage.room.lease_of(job_id)["owner"] == ""
