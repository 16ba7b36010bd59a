"""Workers die, freeze, wake up too late or are stopped: each job's run counts once, and no slot is lost."""

import signal
import time

import pytest

from slotkeeper.jobs.values import Job
from tests.support.cluster import Cluster, freeze, thaw
from tools.cluster.stack import Process, eventually

pytestmark = pytest.mark.e2e

# What is promised with the leases that are set by default, which are longer than these.
_RUNS_AGAIN_WITHIN_S = 15


def _ends(cluster: Cluster, job: Job) -> list[str]:
    """How the job ended: one event, or the promise is broken (JOB-1, JOB-2)."""
    return [event.type for event in cluster.store.list_events(job.id) if event.type == f"job.{job.state}"]


def _lost(cluster: Cluster, job_id: str) -> str:
    """Return the error that the database holds for the lost worker."""
    (lost,) = (event for event in cluster.store.list_events(job_id) if event.data["why"] == "lease_expired")
    return str(lost.data["error"]["message"])


def _has_given_up(worker: Process, job_id: str) -> bool:
    """Whether the worker has found that its run of this job was ended elsewhere, and is done with it."""
    return any("run_ended_elsewhere" in line and job_id in line for line in worker.log.splitlines())


def test_a_killed_workers_job_runs_again_within_seconds_before_later_jobs(cluster: Cluster) -> None:
    (first,) = cluster.ensure_workers(1)
    model, gate = cluster.model(1), cluster.gate()
    job_id = cluster.submit(model, gate)
    cluster.sent(model)
    following = cluster.submit(model, 0.02)
    cluster.start_worker()

    first.kill()
    killed = time.monotonic()
    cluster.started(job_id, 2, every_s=0.02)

    assert "has died" in _lost(cluster, job_id), "the job ran again before its lease expired"
    assert time.monotonic() - killed < _RUNS_AGAIN_WITHIN_S
    gate.open()
    job = cluster.until(job_id, "completed")
    assert (job.crashes, job.failures, job.attempts) == (1, 0, 2)
    assert cluster.until(following, "completed").crashes == 0
    assert [run["job_id"] for run in cluster.runs(model)] == [job_id, following], "the server knew the job by its key"


def test_a_worker_that_resumes_after_the_loss_of_its_lease_changes_nothing(cluster: Cluster) -> None:
    (zombie,) = cluster.ensure_workers(1)
    model, gate, next_gate = cluster.model(1), cluster.gate(), cluster.gate()
    job_id = cluster.submit(model, gate)
    cluster.sent(model)
    freeze(zombie)
    cluster.start_worker()
    following = cluster.submit(model, next_gate)
    cluster.started(job_id, 2)
    assert "stopped renewing" in _lost(cluster, job_id), "a worker that is stopped is not dead"
    gate.open()
    ended = cluster.until(job_id, "completed")
    assert (ended.attempt, ended.crashes) == (2, 1)
    cluster.until(following, "running")
    cluster.sent(model)
    before = cluster.lease(model, following)
    assert before

    thaw(zombie)
    eventually(lambda: _has_given_up(zombie, job_id), "the worker has given up the run")

    assert cluster.lease(model, following) == before
    assert list(cluster.taken(model).values()) == [following.encode()]
    assert cluster.row(job_id) == ended, "no second result"
    next_gate.open()
    assert _ends(cluster, ended) == ["job.completed"]
    assert _ends(cluster, cluster.until(following, "completed")) == ["job.completed"]
    assert [run["job_id"] for run in cluster.runs(model)] == [job_id, following]
    assert cluster.row(following).crashes == 0


def test_a_stopping_worker_finishes_short_runs_and_hands_back_long_runs(cluster: Cluster) -> None:
    (leaving,) = cluster.ensure_workers(1)
    quick, slow = cluster.model(1), cluster.polled_model(1)
    short_gate, long_gate = cluster.gate(), cluster.gate()
    short, long = cluster.submit(quick, short_gate), cluster.submit(slow, long_gate)
    cluster.sent(quick)
    cluster.sent(slow)
    cluster.sent_later(long)
    waiting = cluster.submit(quick, 0.02)

    leaving.popen.send_signal(signal.SIGTERM)
    eventually(lambda: "handed_back" in cluster.why(long), "the grace time is over")
    cluster.start_worker()
    cluster.started(long, 2)
    short_gate.open()
    long_gate.open()

    jobs = [cluster.until(job_id, "completed") for job_id in (short, waiting, long)]
    assert [(job.attempts, job.crashes, job.failures) for job in jobs] == [(1, 0, 0)] * 3
    assert leaving.popen.wait(60) == 0
    assert cluster.why(long) == ["submitted", "started", "handed_back", "started", "finished"]
    assert [run["job_id"] for run in cluster.runs(quick)] == [short, waiting]
    assert [run["job_id"] for run in cluster.runs(slow)] == [long], "the long job was not run again"
