"""A worker that stops, deadlines of its runs, and its process lock."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from structlog.testing import capture_logs

from routing.dispatch.outcome import OutcomeKind
from routing.progress import ProgressCommands
from routing.queue.leases import Lease
from routing.queue.queues import Offer
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.jobs.states import Reason, State
from slotkeeper.process_locks import ProcessLocks
from tasks.worker.concurrency import TakenOffer
from tasks.worker.worker import Worker
from tests.support.builders import eventually
from tests.support.harness import SECOND, Harness
from tests.tasks.worker.start_only import (
    CompletingWorker,
    StartOnlyWorker,
    make_worker,
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


# -- a worker that stops ---------------------------------------------------------------------------------------


@sqlite
def test_a_stopping_worker_does_not_start_a_job_that_it_was_just_offered(
    harness: Harness, worker: StartOnlyWorker
) -> None:
    harness.register()
    second = [harness.submit() for _ in range(2)][1]
    active = worker.start_newest(harness)
    following = harness.settle(active, claimant=worker.concurrency.claimant).next
    assert following is not None and following.job_id == second
    worker.consumer = None

    worker.executor.run_claimed_offer(following)
    assert worker.worker_loop.wait_until_idle(60)

    assert (harness.state(second), harness.job(second).attempt) == (State.QUEUED, 0)
    assert harness.offered() == [second], "the job is offered to another worker"


@sqlite
def test_a_worker_whose_pool_stops_for_any_reason_claims_no_further_job(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery reports a stop by signal, but not a stop by remote control nor a consumer that gives up."""
    monkeypatch.setenv("SLOTKEEPER_GRACE_S", "0")
    harness.register()
    harness.submit()
    watch = worker.heartbeat.add(Lease("zimg", "one", "lease", worker.owner, "gpu-slot0"))
    worker.poll()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "close", lambda: None)  # The test still polls below.
        worker.drain_and_close()

    assert worker.poll() == 0 and worker.concurrency.free_places == 0 and worker.concurrency.claimant == ""
    eventually(lambda: watch.stop)


@sqlite
def test_a_consumer_that_starts_when_draining_has_begun_gets_no_jobs(harness: Harness, worker: StartOnlyWorker) -> None:
    """The consumer was still connecting when the worker received the signal to stop."""
    worker.drain()
    worker.start_consuming(SimpleNamespace(hostname="worker@host"))
    assert worker.concurrency.free_places == 0 and worker.concurrency.claimant == ""


@sqlite
def test_a_second_stop_signal_does_not_start_the_grace_time_again(
    harness: Harness, worker: StartOnlyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    monkeypatch.setattr(worker.poller, "end", lambda: ends.append("ended"))
    worker.drain()
    worker.drain()
    assert ends == ["ended"]


@sqlite
def test_a_run_that_begins_after_the_grace_time_is_stopped_at_once(harness: Harness, worker: StartOnlyWorker) -> None:
    """The worker had read its message before it stopped its other runs."""
    harness.register()
    harness.submit()
    worker.stop_runs()
    assert worker.start(harness.notifications.offers.pop()) is not None
    assert [run.watch.stop for run in worker.started] == [True]


@sqlite
def test_a_worker_that_stops_has_no_capacity(harness: Harness, worker: StartOnlyWorker) -> None:
    worker.poll()
    assert WorkerCapacity(harness.dispatcher.queues.scripts).total() == 3
    worker.drain()
    assert WorkerCapacity(harness.dispatcher.queues.scripts).total() == 0 and worker.concurrency.claimant == ""


# -- deadlines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OutcomeKind.BUSY, OutcomeKind.UNREACHABLE, OutcomeKind.RETRY, OutcomeKind.LOST])
@pytest.mark.parametrize(("late_ms", "state"), [(-1, None), (0, State.EXPIRED)])
@sqlite
def test_a_run_that_went_wrong_after_its_deadline_is_not_tried_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, kind: OutcomeKind, late_ms: int, state: State | None
) -> None:
    harness.register()
    job_id = harness.submit(ttl_s=60)
    active = harness.start()
    harness.later(60 * SECOND + late_ms)
    settled = harness.settle(active, kind)
    assert settled.moved is not None
    if state is None:
        assert harness.state(job_id) in (State.QUEUED, State.DELAYED)
    else:
        assert (harness.state(job_id), harness.job(job_id).why) == (state, Reason.DEADLINE_PASSED)


@sqlite
def test_a_result_that_arrives_after_the_deadline_completes_the_job(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    job_id = harness.submit(ttl_s=60)
    active = harness.start()
    harness.later(61 * SECOND)
    harness.settle(active)
    assert harness.state(job_id) is State.COMPLETED


# -- process locks ---------------------------------------------------------------------------------------------


def _worker_with_process_lock(harness: Harness, folder: Path) -> Worker:
    (folder / "record.db").touch()
    scripts, locks = harness.dispatcher.leases.scripts, ProcessLocks(folder / "workers")
    return Worker(harness.dispatcher, WorkerCapacity(scripts), ProgressCommands(scripts), 1, process_locks=locks)


@sqlite
def test_a_worker_that_ends_regularly_removes_its_process_lock(
    harness: Harness, worker: StartOnlyWorker, tmp_path: Path
) -> None:
    other = _worker_with_process_lock(harness, tmp_path)
    assert [unquote(file.name) for file in (tmp_path / "workers").iterdir()] == [other.owner]
    other.close()
    assert list((tmp_path / "workers").iterdir()) == []


@sqlite
def test_a_worker_that_ends_during_a_run_counts_as_dead_after_its_process_has_ended(
    harness: Harness, worker: StartOnlyWorker, tmp_path: Path
) -> None:
    other = _worker_with_process_lock(harness, tmp_path)
    other.concurrency.add(TakenOffer(Offer("zimg", "job", "lease", "gpu-slot0", "gpu", "zimg", 1)))
    other.close()
    locks = ProcessLocks(tmp_path / "workers")
    assert locks.find_dead() == [], "the threads of the worker may still write"
    own_locks = other.background_tasks._process_locks
    assert own_locks is not None
    os.close(own_locks._held.pop(other.owner))  # The kernel closes it when the process ends.
    assert locks.find_dead() == [other.owner]


@sqlite
def test_a_worker_that_cannot_create_its_process_lock_logs_that_and_starts(
    harness: Harness, worker: StartOnlyWorker, tmp_path: Path
) -> None:
    scripts, locks = harness.dispatcher.leases.scripts, ProcessLocks(tmp_path / "none" / "workers")
    with capture_logs() as lines:
        other = Worker(harness.dispatcher, WorkerCapacity(scripts), ProgressCommands(scripts), 1, process_locks=locks)
    assert [line["event"] for line in lines] == ["end_not_provable"]
    other.close()
