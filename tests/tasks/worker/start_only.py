"""Workers that start runs and make no server call."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import RedisError

from routing.dispatch.dispatcher import ActiveRun, Dispatcher
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.progress import ProgressCommands
from routing.queue.queues import Offer
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.db import Write
from slotkeeper.errors import DatabaseUnavailable
from tasks.threads import BackgroundTask
from tasks.worker import worker_run
from tasks.worker.worker import Worker
from tasks.worker.worker_run import WorkerRun
from tests.support.harness import Harness
from tools.cluster.direct_starts import claim_offer


class StartOnlyWorker(Worker):
    """A worker that starts runs and makes no server call; heartbeat and poller run only when a test calls them."""

    def __init__(self, dispatcher: Dispatcher, *args: Any, **kwargs: Any) -> None:
        super().__init__(dispatcher, *args, **kwargs)
        self.dispatcher = dispatcher
        self.heartbeat.end()
        self.consumer = object()
        self.executor._call_and_end = self._note_start  # type: ignore[method-assign]
        self.active_runs: dict[str, ActiveRun] = {}  # the started runs by lease, in order
        self.started: list[WorkerRun] = []

    async def _note_start(self, run: WorkerRun) -> None:
        self.active_runs[run.active.lease.name] = run.active
        self.started.append(run)
        self.heartbeat.remove(run.watch)

    @property
    def started_jobs(self) -> list[str]:
        """Wait until the worker is idle, and return the ids of the jobs that it has started."""
        assert self.worker_loop.wait_until_idle(60)
        return [active.run.job.id for active in self.active_runs.values()]

    def start(self, offer: Offer) -> ActiveRun | None:
        """Deliver a wake-up, and return the run that it starts, or None."""
        before = set(self.active_runs)
        self.executor.run_open_offer(offer)
        assert self.worker_loop.wait_until_idle(60)
        return None if offer.lease in before else self.active_runs.get(offer.lease)

    def start_newest(self, harness: Harness) -> ActiveRun:
        """Start the run of the wake-up that was published last."""
        active = self.start(harness.notifications.offers.pop())
        assert active is not None
        return active

    def start_claimed(self, offer: Offer) -> None:
        """Claim an offer, and deliver it as one that this worker has claimed already."""
        self.executor.run_claimed_offer(replace(offer, owner=self.owner) if self._claim(offer) else offer)
        assert self.worker_loop.wait_until_idle(60)

    def _claim(self, offer: Offer) -> bool:
        return claim_offer(self.dispatcher.leases, offer, self.owner) is not None

    def poll(self) -> int:
        """Poll once, and return the number of offers that the poller has claimed."""
        claimed = self.poller.poll_once()
        assert self.worker_loop.wait_until_idle(60)
        return claimed


class CompletingWorker(StartOnlyWorker):
    """A worker whose runs end at once, with a result and without a server call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.called_jobs: list[str] = []
        del self.executor._call_and_end
        self.server_calls.call = self._complete  # type: ignore[method-assign]

    async def _complete(self, run: WorkerRun) -> Outcome:
        self.called_jobs.append(run.active.run.job.id)
        return Outcome(OutcomeKind.DONE, result={"url": "x"})


def make_worker(kind: type[StartOnlyWorker], harness: Harness, capacity: int = 3) -> Iterator[Any]:
    scripts = harness.dispatcher.leases.scripts
    worker = kind(harness.dispatcher, WorkerCapacity(scripts), ProgressCommands(scripts), max_runs=capacity)
    harness.postponed = worker.background_tasks.retry_release
    yield worker
    worker.close()  # Otherwise its threads would run on during later tests, which have other databases.


def run_background_tasks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run background tasks at once, and retry with almost no delay."""
    monkeypatch.setattr(BackgroundTask, "request", lambda task: task._function())
    monkeypatch.setattr(worker_run, "_RETRY_S", 0.001)


def raise_unavailable(*_: Any, **__: Any) -> Any:
    raise DatabaseUnavailable("down")


def raise_redis_error(*_: Any) -> Any:
    raise RedisError("down")


def unavailable_write(*_: Any, **__: Any) -> Write[Any]:
    return Write(raise_unavailable)


def raising(error: Exception) -> Callable[[Any], Any]:
    def unit(_: Any) -> Any:
        raise error

    return unit
