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
from tests.support.harness import LEASE_MS, SECOND, SETTINGS, Harness
from tools.cluster.direct_starts import begin_run, claim_offer

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

DONE = Outcome(OutcomeKind.DONE, result={"url": "x"})
PENDING = Outcome(OutcomeKind.PENDING, remote_id="r-1")
UNKNOWN = Outcome(OutcomeKind.UNKNOWN)
FAULT = Outcome(OutcomeKind.RETRY, code="server_error", message="500")


def _raise_unavailable(*_: object, **__: object) -> Any:
    raise DatabaseUnavailable("down")


def _lose_leases(harness: Harness, *job_ids: str) -> None:
    """Remove these leases, as a failover to an older replica does; the queue stays open."""
    for job_id in job_ids:
        slot = harness.queue.lease_of(job_id)["slot"]
        harness.redis.delete(harness.queue.key(f"leases:{job_id}"))
        harness.redis.zrem(harness.queue.key("leases"), job_id)
        harness.redis.hdel(harness.queue.key("slots"), slot)
        harness.redis.hdel(harness.queue.key("held"), "default|zimg")
        harness.queue.set_free(slot, harness.now)


def _start_run(harness: Harness, worker: Worker) -> tuple[ActiveRun, LeaseWatch]:
    """Start the run of the oldest wake-up, and return it with a watch whose request counts as sent."""
    active = begin_run(harness.dispatcher, harness.notifications.offers.pop(0), worker.owner)
    assert active is not None
    watch = worker.heartbeat.add(active.lease)
    watch.sent = True
    return active, watch


def test_a_lease_that_redis_lost_is_written_again_and_the_run_continues(harness, worker):
    harness.register()
    job_id = harness.submit()
    active, watch = _start_run(harness, worker)
    _lose_leases(harness, job_id)
    worker.heartbeat.beat()
    assert not watch.lost
    assert harness.queue.taken() == {"gpu-slot0": job_id} and harness.queue.members("free") == []
    assert harness.renewal(active) is Renewal.RENEWED
    assert harness.settle(active).moved is not None and harness.free() == 1


def test_a_run_whose_slot_was_reassigned_continues_and_holds_the_slot_after_the_other_run(harness, worker):
    """The server still runs the older one and can refuse the newer; the outcomes of both are stored."""
    harness.register()
    first, second, third = (harness.submit() for _ in range(3))
    active, watch = _start_run(harness, worker)
    _lose_leases(harness, first)
    passes.sweep(harness.dispatcher)
    other = harness.start("w2")
    assert (other.run.job.id, other.lease.slot) == (second, active.lease.slot)
    worker.heartbeat.beat()
    assert not watch.lost and [harness.renewal(run) for run in (active, other)] == [Renewal.RENEWED] * 2
    harness.settle(other, OutcomeKind.BUSY)
    assert harness.queue.taken() == {"gpu-slot0": first}, "the slot accepts no third job"
    assert harness.settle(active).moved is not None
    harness.later(SECOND)
    passes.sweep(harness.dispatcher)
    assert harness.run_all() == [second, third]
    assert [harness.job(job_id).crashes for job_id in (first, second, third)] == [0, 0, 0]


def test_a_lease_is_lost_if_another_worker_has_the_job(harness, worker):
    harness.register()
    harness.submit()
    active, watch = _start_run(harness, worker)
    harness.later(LEASE_MS)
    passes.reap(harness.dispatcher)
    again = harness.start("w2")
    before = harness.queue.dump()
    worker.heartbeat.beat()
    assert watch.lost and harness.queue.dump() == before
    assert harness.settle(active).moved is None and harness.renewal(again) is Renewal.RENEWED


def test_two_runs_of_one_job_in_one_worker_have_separate_lease_watches(harness, worker):
    """The worker was disconnected from Redis until the lease expired, and then claimed the next offer of the job."""
    harness.register()
    harness.submit()
    _, older = _start_run(harness, worker)
    harness.later(LEASE_MS)
    passes.reap(harness.dispatcher)
    active, newer = _start_run(harness, worker)
    harness.later(LEASE_MS - SECOND)
    worker.heartbeat.beat()
    assert older.lost and not newer.lost
    assert harness.queue.expiry_of(active.lease.job_id) == harness.now + LEASE_MS
    worker.heartbeat.stop_all()
    assert older.stop and newer.stop
    worker.heartbeat.remove(older)
    assert worker.heartbeat.watches() == [newer]


def test_no_lease_counts_as_lost_while_the_database_is_down(harness, worker, monkeypatch):
    harness.register()
    job_id = harness.submit()
    _, watch = _start_run(harness, worker)
    _lose_leases(harness, job_id)
    monkeypatch.undo()
    monkeypatch.setattr(lease_checks, "_RETRY_S", 0.001)
    was_read = threading.Event()
    failures, get_statuses = iter(range(2)), harness.store.get_statuses
    monkeypatch.setattr(
        harness.store,
        "get_statuses",
        lambda ids: (was_read.set(), _raise_unavailable() if next(failures, None) is not None else get_statuses(ids))[
            1
        ],
    )
    worker.heartbeat.beat()
    assert was_read.wait(10) and not watch.lost
    eventually(lambda: harness.queue.taken() == {"gpu-slot0": job_id})
    assert not watch.lost


def test_a_worker_that_has_ended_does_not_read_the_database_again(harness, worker, monkeypatch):
    harness.register()
    job_id = harness.submit()
    _start_run(harness, worker)
    _lose_leases(harness, job_id)
    monkeypatch.undo()
    monkeypatch.setattr(harness.store, "get_statuses", _raise_unavailable)
    pauses, wait = threading.Event(), worker.database_check._ended.wait
    monkeypatch.setattr(worker.database_check._ended, "wait", lambda _: (pauses.set(), wait(20))[1])
    worker.heartbeat.beat()
    assert pauses.wait(10), "the check pauses before it reads again"
    pauses.clear()
    worker.close()
    eventually(lambda: not worker.database_check._task._is_running)
    assert not pauses.is_set()


def test_leases_are_renewed_in_time_though_the_database_is_silent(harness, worker, monkeypatch):
    harness.register(2)
    harness.submit(), harness.submit()
    watches = [_start_run(harness, worker)[1] for _ in range(2)]
    monkeypatch.undo()
    read_began, silence_ends, reading = threading.Event(), threading.Event(), set[threading.Thread]()

    def wait_and_fail(_: object) -> None:
        reading.add(threading.current_thread())
        read_began.set()
        silence_ends.wait(5)
        _raise_unavailable()

    monkeypatch.setattr(harness.store, "get_statuses", wait_and_fail)
    worker.heartbeat._was_away = True
    try:
        for _ in range(5):
            harness.later(LEASE_MS - SECOND)
            worker.heartbeat.beat()
        assert read_began.wait(10) and threading.current_thread() not in reading
        assert harness.queue.expiry_of(watches[0].lease.job_id) == harness.now + LEASE_MS
        assert passes.reap(harness.dispatcher) == 0
    finally:
        silence_ends.set()


@pytest.mark.parametrize("busy", [False, True])
def test_a_run_without_a_lease_and_without_a_worker_ends_even_if_another_job_has_its_slot(harness, worker, busy):
    harness.register()
    first = harness.submit()
    harness.start("dead")
    _lose_leases(harness, first)
    if busy:
        harness.submit()
        other = harness.start("w2")
        assert other.lease.slot == harness.job(first).slot
    assert passes.restore_missed(harness.dispatcher) == 0
    harness.later(restore_leases._GRACE_MS)
    assert [passes.restore_missed(harness.dispatcher) for _ in range(2)] == [1, 0]
    lasts_ms = SETTINGS.renew_every_ms * 9 // 4
    if busy:
        assert harness.renewal(other) is Renewal.RENEWED
    harness.later(lasts_ms - 1)
    assert passes.reap(harness.dispatcher) == 0
    if busy:
        assert harness.renewal(other) is Renewal.RENEWED
    harness.later(1)
    passes.reap(harness.dispatcher)
    job = harness.job(first)
    assert (job.state, job.why, job.crashes) == (State.QUEUED, Reason.LEASE_EXPIRED, 1)
    again = harness.start("w3")
    assert again.run.job.id == first and harness.settle(again).moved is not None
    if busy:
        assert harness.settle(other).moved is not None
    assert harness.queue.taken() == {} and harness.free() == 1


def test_a_worker_whose_renewal_is_late_keeps_a_lease_that_maintenance_has_restored(harness, worker):
    harness.register()
    job_id = harness.submit()
    active = harness.start("w1")
    _lose_leases(harness, job_id)
    assert passes.restore_missed(harness.dispatcher) == 0
    harness.later(restore_leases._GRACE_MS)
    assert passes.restore_missed(harness.dispatcher) == 1
    harness.later(2 * SETTINGS.renew_every_ms)
    assert passes.reap(harness.dispatcher) == 0
    assert harness.renewal(active) is Renewal.RENEWED and harness.job(job_id).crashes == 0


def test_a_lease_that_maintenance_has_restored_lasts_no_longer_than_any_other(harness, worker):
    """With the longest permitted renewal interval, two and a quarter intervals are longer than a lease."""
    harness.dispatcher.settings = SETTINGS.model_copy(update={"renew_every_ms": LEASE_MS // 2 - 1})
    harness.register()
    job_id = harness.submit()
    harness.start("w1")
    _lose_leases(harness, job_id)
    passes.restore_missed(harness.dispatcher)
    harness.later(restore_leases._GRACE_MS)
    assert passes.restore_missed(harness.dispatcher) == 1
    assert harness.queue.expiry_of(job_id) == harness.now + LEASE_MS


def test_a_run_that_ends_while_its_lease_is_written_again_leaves_none(harness, worker, monkeypatch):
    harness.register()
    first, second = harness.submit(), harness.submit()
    active = harness.start("w1")
    _lose_leases(harness, first)
    restore = harness.dispatcher.leases.restore

    def settle_and_restore(*args: Any) -> int:
        harness.settle(active)
        return restore(*args)

    monkeypatch.setattr(harness.dispatcher.leases, "restore", settle_and_restore)
    passes.restore_missing(harness)
    assert harness.run_all() == [second] and harness.queue.taken() == {}


def test_a_run_that_ends_while_its_queue_is_rebuilt_leaves_no_lease(harness, worker, monkeypatch):
    harness.register()
    first, second = harness.submit(), harness.submit()
    active = harness.start("w1")
    harness.lose_redis()
    restore, calls = harness.dispatcher.leases.restore, itertools.count(1)

    def settle_and_restore_once(*args: Any) -> int:
        if next(calls) == 1:
            harness.settle(active)
        return restore(*args)

    monkeypatch.setattr(harness.dispatcher.leases, "restore", settle_and_restore_once)
    passes.sweep(harness.dispatcher)
    assert next(calls) > 1 and harness.state(first) is State.COMPLETED
    assert harness.run_all() == [second] and harness.queue.taken() == {}


def test_a_run_that_began_while_its_queue_was_rebuilt_is_refused_and_offered_again(harness, worker, monkeypatch):
    """Its lease was claimed before Redis lost its data, and its start follows the read of the running jobs."""
    harness.register()
    first, second = harness.submit(), harness.submit()
    offer = replace(harness.notifications.offers.pop(0), owner="w1")
    assert claim_offer(harness.dispatcher.leases, offer, "w1")
    harness.lose_redis()
    list_running = harness.store.list_running
    starts = iter([lambda: begin_run(harness.dispatcher, offer, "w1")])

    def list_and_start_once() -> Any:
        running = list_running()
        next(starts, lambda: None)()
        return running

    monkeypatch.setattr(harness.store, "list_running", list_and_start_once)
    passes.sweep(harness.dispatcher)
    assert harness.queue.taken() == {offer.slot: first} and harness.queue.waiting() == [second]
    assert harness.store.list_running() == [] and harness.run_all() == [first, second]


def test_a_resumed_run_that_began_while_its_queue_was_rebuilt_is_offered_in_its_slot(harness, worker, monkeypatch):
    """As above, but the run starts just before maintenance restores the offer that the worker had claimed."""
    harness.register()
    first, second = harness.submit(), harness.submit()
    assert hand_back(harness.dispatcher, harness.start())
    offer = replace(harness.notifications.offers.pop(0), owner="w1")
    assert claim_offer(harness.dispatcher.leases, offer, "w1")
    harness.lose_redis()
    restore_offers = harness.dispatcher.leases.restore_offers

    def start_and_restore(*args: Any) -> int:
        begin_run(harness.dispatcher, offer, "w1")
        return restore_offers(*args)

    monkeypatch.setattr(harness.dispatcher.leases, "restore_offers", start_and_restore)
    passes.sweep(harness.dispatcher)
    assert harness.queue.taken() == {offer.slot: first} and harness.queue.waiting() == [second]
    assert harness.store.list_running() == [] and harness.queue.lease_of(first)["owner"] == ""


def test_a_run_that_is_handed_back_while_its_queue_is_rebuilt_is_offered_only_in_its_slot(harness, worker, monkeypatch):
    harness.register(1, server="z")
    job_id = harness.submit()
    active = harness.start("w1")
    harness.register(1, server="a")
    harness.lose_redis()
    restore, calls = harness.dispatcher.leases.restore, itertools.count()

    def hand_back_and_restore(*args: Any) -> int:
        if next(calls) == 0:
            assert hand_back(harness.dispatcher, active)
        return restore(*args)

    monkeypatch.setattr(harness.dispatcher.leases, "restore", hand_back_and_restore)
    passes.sweep(harness.dispatcher)
    assert next(calls) > 0
    assert harness.queue.taken() == {active.lease.slot: job_id} and harness.queue.lease_of(job_id)["owner"] == ""
