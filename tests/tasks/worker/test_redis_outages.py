"""Releases and cancellations while Redis is down."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import RedisError

from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.maintenance import deadlines
from routing.queue.leases import Lease, Leases, Renewal
from slotkeeper.jobs.states import State
from tasks.worker.heartbeat import LeaseWatch
from tasks.worker.server_calls import AbandonedCalls
from tests.support import passes
from tests.support.builders import eventually
from tests.support.ends import decided, end_in_order
from tests.support.harness import LEASE_MS, SECOND, Harness
from tests.tasks.worker.start_only import (
    CompletingWorker,
    StartOnlyWorker,
    make_worker,
    raise_redis_error,
    raise_unavailable,
    run_background_tasks_at_once,
)

sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    run_background_tasks_at_once(monkeypatch)


@pytest.fixture
def worker(harness: Harness) -> Iterator[StartOnlyWorker]:
    yield from make_worker(StartOnlyWorker, harness)


@pytest.fixture
def completing_worker(harness: Harness) -> Iterator[CompletingWorker]:
    yield from make_worker(CompletingWorker, harness, capacity=1)


# -- a release while Redis is down -----------------------------------------------------------------------------


@contextmanager
def _failing_releases(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Lease]]:
    """Let each release fail, and return a list of the leases whose release was tried."""
    tried: list[Lease] = []

    def refuse(_: Leases, lease: Lease, **__: Any) -> Any:
        tried.append(lease)
        raise RedisError("down")

    with monkeypatch.context() as outage:
        outage.setattr(Leases, "release_command", refuse)
        yield tried


@sqlite
def test_slot_2_a_slot_whose_release_failed_is_freed_by_the_first_heartbeat_that_reaches_redis(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    first, second = harness.submit(), harness.submit()
    active = worker.start_newest(harness)
    with _failing_releases(monkeypatch):
        assert harness.settle(active).moved is not None
        worker.heartbeat.beat()
    assert list(harness.queue.taken().values()) == [first]

    worker.heartbeat.beat()

    assert list(harness.queue.taken().values()) == [second]
    assert harness.run_all() == [second]
    worker.heartbeat.beat()
    assert harness.queue.taken() == {}


@sqlite
def test_a_job_whose_requeue_failed_is_requeued_by_the_first_heartbeat_that_reaches_redis(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    first, second = harness.submit(), harness.submit()
    active = worker.start_newest(harness)
    with _failing_releases(monkeypatch):
        harness.settle(active, OutcomeKind.BUSY, retry_after_s=0)
    worker.heartbeat.beat()
    assert harness.run_all() == [first, second], "the job keeps its place in the lane"


@sqlite
def test_lease_4_a_late_release_does_not_change_the_lease_of_the_next_run(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    harness.submit()
    active = worker.start_newest(harness)
    with _failing_releases(monkeypatch):
        harness.settle(active, OutcomeKind.BUSY, retry_after_s=0)
    harness.later(LEASE_MS)
    assert passes.reap(harness.dispatcher) == 1
    again = harness.start("w2")

    worker.heartbeat.beat()

    assert list(harness.queue.taken().values()) == [again.run.job.id]
    assert harness.renewal(again) is Renewal.RENEWED


@sqlite
def test_each_heartbeat_tries_only_one_release_while_redis_is_down(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt takes as long as its timeout, and no lease is renewed meanwhile."""
    harness.register(3)
    for _ in range(3):
        harness.submit()
    active_runs = [worker.start(offer) for offer in harness.notifications.offers]
    with _failing_releases(monkeypatch) as tried:
        for active in active_runs:
            assert active is not None
            harness.settle(active)
        tried.clear()
        worker.heartbeat.beat()
        assert len(tried) == 1


@sqlite
def test_a_restored_lease_of_a_removed_run_is_freed_by_the_first_heartbeat_that_reaches_redis(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    harness.submit()
    active = worker.start_newest(harness)
    watch = LeaseWatch(active.lease)
    watch.sent = watch.is_removed = True
    with _failing_releases(monkeypatch) as tried:
        worker.database_check.check({watch: True})
        assert tried == [active.lease]
    worker.heartbeat.beat()
    assert harness.queue.taken() == {}


@sqlite
def test_a_slot_whose_run_ends_while_redis_is_down_is_freed_by_the_first_heartbeat_that_reaches_redis(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    harness.submit()
    active = worker.start_newest(harness)
    silent = Outcome(OutcomeKind.RETRY, code="timed_out", server_still_running=True)
    assert end_in_order(harness.dispatcher, active, decided(harness.dispatcher, active, silent)).moved is not None
    assert list(harness.queue.taken()) == [active.lease.slot]
    abandoned = AbandonedCalls(worker.parts)
    with _failing_releases(monkeypatch) as tried:
        session, calls = SimpleNamespace(abandoned=True, is_run_over=_is_over), SimpleNamespace(poll_details=None)
        abandoned.note(active.lease.name, session, calls)  # type: ignore[arg-type]
        worker.worker_loop.call_soon(abandoned.observe, active)
        eventually(lambda: tried)
    eventually(lambda: worker.heartbeat.beat() or harness.queue.taken() == {})


async def _is_over(_: object) -> bool:
    return True


# -- a cancellation while Redis is down ------------------------------------------------------------------------


def _cancel_job(harness: Harness, job_id: str) -> None:
    with pytest.MonkeyPatch.context() as outage:
        outage.setattr(harness.dispatcher.queues, "withdraw", raise_redis_error)
        assert harness.dispatcher.cancel(job_id) is State.RUNNING


def _expire_job(harness: Harness, job_id: str) -> None:
    with pytest.MonkeyPatch.context() as outage:
        outage.setattr(harness.dispatcher.queues, "withdraw", raise_redis_error)
        harness.later(5 * SECOND)
        assert deadlines.expire_deadlines(harness.dispatcher) == 1


@pytest.mark.parametrize("end_job", [_cancel_job, _expire_job])
@sqlite
def test_a_worker_reads_a_cancellation_that_redis_could_not_deliver_from_the_database(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch, end_job: Callable[[Harness, str], None]
) -> None:
    harness.register(2)
    harness.submit(ttl_s=5)
    harness.submit()
    active_runs = [worker.start(offer) for offer in harness.notifications.offers]
    watches = [worker.heartbeat.add(active.lease) for active in active_runs if active is not None]
    notified = Event()
    watches[0].on_change(notified.set)
    with monkeypatch.context() as outage:
        outage.setattr(harness.dispatcher.leases, "renew", raise_redis_error)
        worker.heartbeat.beat()
        end_job(harness, watches[0].lease.job_id)

    worker.heartbeat.beat()

    assert notified.wait(30)
    assert [watch.cancel for watch in watches] == [True, False]


@sqlite
def test_the_heartbeat_does_not_read_the_database_while_redis_responds(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    harness.submit()
    active = worker.start_newest(harness)
    watch = worker.heartbeat.add(active.lease)
    monkeypatch.setattr(harness.store, "get_statuses", raise_unavailable)
    worker.heartbeat.beat()
    assert not (watch.cancel or watch.lost)
