"""Workers die, freeze, wake up too late or are stopped: each job's run counts once, and no slot is lost."""

import signal
import time

import pytest

from slotkeeper.jobs.values import Job
from tests.support.town import Town, freeze, thaw
from tools.cluster.stack import Process, eventually

pytestmark = pytest.mark.e2e

# What is promised with the leases that are set by default, which are longer than these.
_RUNS_AGAIN_WITHIN_S = 15


def _ends(town: Town, job: Job) -> list[str]:
    """How the job ended: one event, or the promise is broken (JOB-1, JOB-2)."""
    return [event.type for event in town.store.list_events(job.id) if event.type == f"job.{job.state}"]


def _lost(town: Town, job_id: str) -> str:
    """Return the error that the database holds for the lost worker."""
    (lost,) = (event for event in town.store.list_events(job_id) if event.data["why"] == "lease_expired")
    return str(lost.data["error"]["message"])


def _has_given_up(worker: Process, job_id: str) -> bool:
    """Whether the worker has found that its run of this job was ended elsewhere, and is done with it."""
    return any("run_ended_elsewhere" in line and job_id in line for line in worker.log.splitlines())


def test_a_killed_workers_job_runs_again_within_seconds_at_its_own_place(town: Town) -> None:
    (first,) = town.crew(1)
    model, gate = town.model(1), town.gate()
    job_id = town.submit(model, gate)
    town.sent(model)
    following = town.submit(model, 0.02)
    town.hire()

    first.kill()
    killed = time.monotonic()
    town.started(job_id, 2, every_s=0.02)

    assert "has died" in _lost(town, job_id), "nobody waited for its lease to expire"
    assert time.monotonic() - killed < _RUNS_AGAIN_WITHIN_S
    gate.open()
    job = town.until(job_id, "completed")
    assert (job.crashes, job.failures, job.attempts) == (1, 0, 2)
    assert town.until(following, "completed").crashes == 0
    assert [run["job_id"] for run in town.runs(model)] == [job_id, following], "the server knew the job by its key"


def test_a_worker_that_wakes_after_its_lease_has_gone_changes_nothing(town: Town) -> None:
    (zombie,) = town.crew(1)
    model, gate, next_gate = town.model(1), town.gate(), town.gate()
    job_id = town.submit(model, gate)
    town.sent(model)
    freeze(zombie)
    town.hire()
    following = town.submit(model, next_gate)
    town.started(job_id, 2)
    assert "stopped renewing" in _lost(town, job_id), "a worker that is stopped is not dead"
    gate.open()
    ended = town.until(job_id, "completed")
    assert (ended.attempt, ended.crashes) == (2, 1)
    town.until(following, "running")
    town.sent(model)
    before = town.lease(model, following)
    assert before

    thaw(zombie)
    eventually(lambda: _has_given_up(zombie, job_id), "it has done all that it meant to do")

    assert town.lease(model, following) == before
    assert list(town.taken(model).values()) == [following.encode()]
    assert town.row(job_id) == ended, "no second result"
    next_gate.open()
    assert _ends(town, ended) == ["job.completed"]
    assert _ends(town, town.until(following, "completed")) == ["job.completed"]
    assert [run["job_id"] for run in town.runs(model)] == [job_id, following]
    assert town.row(following).crashes == 0


def test_a_stopping_worker_finishes_short_runs_and_hands_back_long_runs(town: Town) -> None:
    (leaving,) = town.crew(1)
    quick, slow = town.model(1), town.polled_model(1)
    short_gate, long_gate = town.gate(), town.gate()
    short, long = town.submit(quick, short_gate), town.submit(slow, long_gate)
    town.sent(quick)
    town.sent(slow)
    town.sent_later(long)
    waiting = town.submit(quick, 0.02)

    leaving.popen.send_signal(signal.SIGTERM)
    eventually(lambda: "handed_back" in town.why(long), "the grace time is over")
    town.hire()
    town.started(long, 2)
    short_gate.open()
    long_gate.open()

    jobs = [town.until(job_id, "completed") for job_id in (short, waiting, long)]
    assert [(job.attempts, job.crashes, job.failures) for job in jobs] == [(1, 0, 0)] * 3
    assert leaving.popen.wait(60) == 0
    assert town.why(long) == ["submitted", "started", "handed_back", "started", "finished"]
    assert [run["job_id"] for run in town.runs(quick)] == [short, waiting]
    assert [run["job_id"] for run in town.runs(slow)] == [long], "the long job was not run again"
