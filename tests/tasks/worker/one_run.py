"""A worker that runs one job at a time on request of a test, and a server with prepared outcomes.

There is neither HTTP nor a second process: the tests check how the worker handles each outcome.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.outcome import Outcome
from routing.progress import ProgressCommands
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.jobs.values import Job
from slotkeeper.registry.model_config import ModelConfig
from tasks.servers import DEFAULT, Health, HealthKind, RunDetails
from tasks.threads import BackgroundTask
from tasks.worker import worker_run
from tasks.worker.heartbeat import LeaseWatch
from tasks.worker.run_requests import RunRequests
from tasks.worker.server_call import ServerCall
from tasks.worker.worker import Worker
from tests.support.harness import Harness


class FakeServer:
    """A server that returns prepared outcomes in order and notes its requests; it calls `during` in each run."""

    description = DEFAULT
    is_node = False

    def __init__(self) -> None:
        self.answers: list[Outcome] = []
        self.asked: list[str] = []
        self.during: Callable[[], None] = lambda: None
        self.runs: frozenset[str] | None = None
        self.down = 0  # the number of health requests that it will not answer
        self.idempotent = True  # The server joins a repeated request to the run of the first.
        self.is_broken, self.has_ended = False, False  # the connection of a submit; the process
        self.abandoned: None = None

    async def submit(self, call: RunDetails) -> Outcome:
        self.asked.append("submit")
        self.during()
        return self.answers.pop(0)

    async def status(self, call: RunDetails, remote_id: str) -> Outcome:
        self._note_request("status", call)
        return self.answers.pop(0)

    async def cancel(self, call: RunDetails, remote_id: str | None = None) -> bool:
        self._note_request("cancel", call)
        return True

    def _note_request(self, kind: str, call: RunDetails) -> None:
        assert 10 <= call.deadline_s <= 30, "the timeout of such a request does not depend on the time of the run"
        self.asked.append(kind)

    async def health(self) -> Health:
        self.asked.append("health")
        self.down -= 1
        if self.down >= 0:
            return Health(HealthKind.DOWN)
        return Health(HealthKind.UP, job_ids=self.runs, idempotent=self.idempotent)

    def cut_off(self) -> None:
        self.asked.append("cut")

    def abandon(self) -> None:
        self.asked.append("abandon")

    async def refuses_connections(self) -> bool:
        return self.has_ended

    async def has_process_ended(self) -> bool:
        return self.has_ended


class FakeRunStore:
    """A store without a database; it calls `store_remote_id` to store an id."""

    def __init__(self, store_remote_id: Callable[[str | None], bool] = lambda remote_id: True) -> None:
        self._store_remote_id = store_remote_id
        self.used: list[str] = []
        """Names of the checks and writes, in order, without those of remote ids."""
        self.is_over = False  # Another process has ended the run.
        self.is_held = True  # The run may use its slot.

    async def store_remote_id(self, remote_id: str | None) -> bool:
        return self._store_remote_id(remote_id)

    async def store_sent_time(self) -> bool:
        self.used.append("sent time")
        return not self.is_over

    async def find_earlier_request(self) -> None:
        return None

    async def longest_usual_ms(self) -> int:
        return 3_600_000

    async def is_lease_held(self, *, fresh: bool) -> bool:
        self.used.append("lease, read again" if fresh else "lease")
        return self.is_held


def make_server_call(
    active: ActiveRun,
    watch: LeaseWatch,
    config: ModelConfig,
    session: Any,
    store: FakeRunStore | None = None,
    *,
    has_one_slot: bool = False,
) -> ServerCall:
    """Return a ServerCall without a database."""
    calls = RunRequests(active.run, config, session.description)
    return ServerCall(active, watch, session, calls, store or FakeRunStore(), has_one_slot=has_one_slot)


@contextmanager
def a_worker(harness: Harness, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    scripts = harness.dispatcher.leases.scripts
    # A test of the background tasks themselves undoes this.
    monkeypatch.setattr(BackgroundTask, "request", lambda task: task._function())
    worker = Worker(harness.dispatcher, WorkerCapacity(scripts), ProgressCommands(scripts), max_runs=64)
    worker.heartbeat.end()  # The tests call `beat`.
    worker.consumer = None  # Without a consumer the worker claims no job by itself.
    monkeypatch.setattr(worker.server_calls, "session_for", lambda *_: server)
    monkeypatch.setattr(worker_run, "_RETRY_S", 0.001)
    harness.worker = worker  # type: ignore[attr-defined]
    yield worker
    worker.close()


def run_open_offer(harness: Harness) -> str:
    """Run the job of the oldest wake-up, and return its id."""
    worker, offer = harness.worker, harness.notifications.offers.pop(0)  # type: ignore[attr-defined]
    worker.executor.run_open_offer(offer)
    assert worker.worker_loop.wait_until_idle(20)
    return str(offer.job_id)


def run(harness: Harness) -> Job:
    """Run the job of the oldest wake-up, and return the job from the database."""
    return harness.job(run_open_offer(harness))
