"""Duplicate, late and lost messages, and full workers."""

import asyncio
from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest

from routing.queue.leases import Lease
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.clock import boottime_s
from slotkeeper.db import Write
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.states import State
from tasks.worker import worker_run
from tasks.worker.heartbeat import LeaseWatch
from tasks.worker.worker_run import RetryingIo
from tests.support.builders import eventually
from tests.support.harness import Harness
from tests.tasks.worker.start_only import (
    CompletingWorker,
    StartOnlyWorker,
    make_worker,
    raise_redis_error,
    raise_unavailable,
    run_background_tasks_at_once,
)
from tools.cluster.direct_starts import begin_run

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


@pytest.mark.parametrize("started_by", ["message", "claimed offer"])
@sqlite
def test_a_duplicate_wake_up_starts_no_job_and_frees_no_slot(
    harness: Harness, worker: StartOnlyWorker, started_by: str
) -> None:
    """This also applies to the process that runs the job and owns its lease."""
    harness.register()
    first, second = harness.submit(), harness.submit()
    (offer,) = harness.notifications.offers
    if started_by == "message":
        assert worker.start(offer) is not None
    else:
        (claimed,) = harness.dispatcher.queues.offer("zimg", 1, claimant=worker.owner)
        worker.executor.run_claimed_offer(claimed)
        assert worker.started_jobs == [first]
    assert worker.start(offer) is None
    assert harness.queue.taken() == {"gpu-slot0": first}
    assert harness.state(first) is State.RUNNING and harness.state(second) is State.QUEUED


@sqlite
def test_a_duplicate_wake_up_frees_no_slot_while_redis_is_down(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    job_id = harness.submit()
    (offer,) = harness.notifications.offers
    assert worker.start(offer) is not None
    monkeypatch.setattr(harness.dispatcher.leases, "claim_command", raise_redis_error)
    assert worker.start(offer) is None
    assert harness.queue.taken() == {"gpu-slot0": job_id}


@sqlite
def test_a_wake_up_whose_job_another_worker_has_already_claimed_changes_nothing(
    harness: Harness, worker: StartOnlyWorker
) -> None:
    harness.register()
    job_id = harness.submit()
    (late,) = harness.notifications.offers
    (claimed,) = harness.dispatcher.queues.offer("zimg", 1, claimant="w2")
    assert begin_run(harness.dispatcher, claimed, "w2") is not None
    assert worker.start(late) is None
    assert harness.queue.taken() == {"gpu-slot0": job_id} and harness.state(job_id) is State.RUNNING


@sqlite
def test_a_job_whose_wake_up_is_lost_is_started_by_the_second_poll(harness: Harness, worker: StartOnlyWorker) -> None:
    """At the first poll the message may still be in the broker."""
    harness.register()
    job_id = harness.submit()
    assert worker.poll() == 0
    assert worker.poll() == 1
    assert worker.started_jobs == [job_id] and harness.state(job_id) is State.RUNNING


@sqlite
def test_the_first_poll_claims_jobs_that_are_not_offered_yet(harness: Harness, worker: StartOnlyWorker) -> None:
    """Jobs are not offered while no worker has capacity, for example before the first worker starts."""
    capacity = WorkerCapacity(harness.dispatcher.queues.scripts)
    harness.dispatcher.queues._capacity = capacity.total
    harness.register(2)
    waiting = [harness.submit() for _ in range(3)]
    assert harness.offered() == []
    assert worker.poll() == 2
    assert worker.started_jobs == waiting[:2] and harness.queue.waiting() == waiting[2:]


@sqlite
def test_a_worker_starts_no_more_jobs_than_its_capacity_and_the_oldest_first(
    harness: Harness, worker: StartOnlyWorker
) -> None:
    harness.register(5)
    jobs = [harness.submit() for _ in range(6)]
    worker.poll()
    assert worker.poll() == 3
    assert worker.started_jobs == jobs[:3] and worker.concurrency.free_places == 0
    assert worker.poll() == 0


@sqlite
def test_a_full_worker_shares_its_runs_between_models(harness: Harness, worker: StartOnlyWorker) -> None:
    """A full worker reads no messages, so without sharing it would run only the models that it already runs."""
    harness.register(3)
    harness.register(1, server="other", model="flux")
    busy = [harness.submit() for _ in range(6)]
    active_runs = [worker.start(offer) for offer in harness.notifications.offers[:3]]
    waiting = harness.submit("flux")
    worker.poll()
    worker.poll()
    assert worker.concurrency.free_places == 0

    for active in active_runs[:2]:
        assert active is not None
        settled = harness.settle(active, claimant=worker.concurrency.claimant)
        worker.worker_loop.spawn(worker.executor._start_next(active.lease, None, settled.next, boottime_s()))
        assert worker.worker_loop.wait_until_idle(60)
        worker.concurrency.remove(worker.concurrency._taken[active.lease.name])

    assert sorted(worker.started_jobs[3:]) == sorted([busy[3], waiting])


@sqlite
def test_a_worker_that_cannot_store_ends_accepts_at_most_one_more_job_until_it_can(
    harness: Harness, completing_worker: CompletingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is free, but more results would fill the memory of the worker."""
    harness.register()
    stored, waiting = Event(), [harness.submit() for _ in range(8)]
    settle_write = harness.store.settle_write

    def settle_once_available(*args: Any, **kwargs: Any) -> Write[Any]:
        write = settle_write(*args, **kwargs)
        return Write(lambda tx: write.unit(tx) if stored.is_set() else raise_unavailable())

    monkeypatch.setattr(harness.store, "settle_write", settle_once_available)
    completing_worker.executor.run_open_offer(harness.notifications.offers.pop(0))
    eventually(lambda: len(completing_worker.called_jobs) == 2 and completing_worker.concurrency._unfilled)
    assert completing_worker.concurrency.free_places == 0

    stored.set()

    assert completing_worker.worker_loop.wait_until_idle(20)
    assert completing_worker.called_jobs == waiting and completing_worker.concurrency.free_places == 1


@pytest.mark.parametrize("redis_answers", [True, False])
@sqlite
def test_a_run_that_the_poller_starts_before_its_message_is_handled_takes_a_place_until_it_ends(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch, redis_answers: bool
) -> None:
    """The poller claims the offer of a message whose own claim is in progress; the failed claim frees no place."""
    harness.register()
    job_id = harness.submit()
    (offer,) = harness.notifications.offers
    (claimed,) = harness.dispatcher.queues.offer("zimg", 1, claimant=worker.owner)
    claim_command = harness.dispatcher.leases.claim_command

    def claim_after_the_poller(*args: Any) -> Any:
        worker.executor.run_claimed_offer(claimed)
        return claim_command(*args) if redis_answers else raise_redis_error()

    monkeypatch.setattr(harness.dispatcher.leases, "claim_command", claim_after_the_poller)
    worker.executor.run_open_offer(offer)
    assert worker.started_jobs == [job_id] and worker.concurrency.free_places == 2
    assert harness.queue.taken() == {"gpu-slot0": job_id}


@sqlite
def test_the_background_tasks_of_a_draining_worker_read_the_capacity_of_the_other_workers(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its poller, which reads the capacity otherwise, has ended; released slots are offered up to that capacity."""
    reads: list[str] = []
    monkeypatch.setattr(worker.background_tasks._workers, "read_total", lambda: reads.append("read"))
    worker.background_tasks.run()
    assert reads == []
    worker.drain()
    worker.background_tasks.run()
    assert reads == ["read"]


@sqlite
def test_runs_that_wait_for_the_database_retry_at_different_times(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retried together, their writes would form one batch again, which may be too large."""
    monkeypatch.setattr(worker_run, "_RETRY_S", 1.0)
    waits: list[float] = []

    async def note_wait(watch: LeaseWatch, seconds: float) -> None:
        waits.append(seconds)
        watch.lost = len(waits) % 20 == 0

    monkeypatch.setattr(LeaseWatch, "sleep", note_wait)
    with pytest.raises(DatabaseUnavailable):
        asyncio.run(
            RetryingIo(worker.worker_loop, LeaseWatch(Lease("zimg", "one", "l", "w", "gpu-slot0")))._repeat_while_away(
                raise_unavailable
            )
        )
    assert len(set(waits)) > 10 and all(0.5 <= seconds <= 1.5 for seconds in waits)
