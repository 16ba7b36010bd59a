"""A worker that takes one job after another when it is told to, and a server that answers what a test says.

Neither HTTP nor a second process: what is looked at is what the worker makes of the answers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from routing.dispatch.outcome import Outcome
from routing.progress import ProgressCommands
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.jobs.values import Job
from tasks.servers import DEFAULT, Call, Health, HealthKind
from tasks.threads import BackgroundTask
from tasks.worker import worker_run
from tasks.worker.worker import Worker
from tests.support.stage import Stage


class FakeServer:
    """Gives its answers one after another; notes what it is asked.  `during`: what happens while it runs a job."""

    description = DEFAULT

    def __init__(self) -> None:
        self.answers: list[Outcome] = []
        self.asked: list[str] = []
        self.during: Callable[[], None] = lambda: None
        self.runs: frozenset[str] | None = None
        self.down = 0  # how often it does not answer for its health
        self.idempotent = True  # It joins a repeated request to its run.
        self.is_broken, self.has_ended = False, False  # its connection under a submit; its process
        self.abandoned: None = None

    async def submit(self, call: Call) -> Outcome:
        self.asked.append("submit")
        self.during()
        return self.answers.pop(0)

    async def status(self, call: Call, remote_id: str) -> Outcome:
        self._note_question("status", call)
        return self.answers.pop(0)

    async def cancel(self, call: Call, remote_id: str | None = None) -> bool:
        self._note_question("cancel", call)
        return True

    def _note_question(self, what: str, call: Call) -> None:
        assert 10 <= call.deadline_s <= 30, "a question has its time, whatever is left of the run's, and no more"
        self.asked.append(what)

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


@contextmanager
def a_worker(stage: Stage, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    scripts = stage.dispatcher.leases.scripts
    monkeypatch.setattr(
        BackgroundTask, "request", lambda task: task._function()
    )  # at once, but where a test is about that
    found = Worker(stage.dispatcher, WorkerCapacity(scripts), ProgressCommands(scripts), max_runs=64)
    found.heartbeat.end()  # The tests beat.
    found.consumer = None  # It takes nothing by itself, but where a test is about that.
    monkeypatch.setattr(found.server_calls, "session_for", lambda *_: server)
    monkeypatch.setattr(worker_run, "_RETRY_S", 0.001)
    stage.worker = found  # type: ignore[attr-defined]
    yield found
    found.close()


def run_open_offer(stage: Stage) -> str:
    """Do what the oldest wake-up asks for, and return the id of its job."""
    worker, offer = stage.worker, stage.told.offers.pop(0)  # type: ignore[attr-defined]
    worker.executor.run_open_offer(offer)
    assert worker.worker_loop.wait_until_idle(20)
    return str(offer.job_id)


def run(stage: Stage) -> Job:
    """Take up the oldest wake-up, and return the job as it then stands in the database."""
    return stage.job(run_open_offer(stage))
