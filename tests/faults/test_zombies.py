"""Workers die, freeze, wake up too late, or are told to stop: each job's run counts once, and no slot is lost."""

import signal
import time
from typing import Any

import pytest

from jobs.record import Job
from tests.faults.stage import LEASE_S, Town, freeze, thaw, town
from tests.support.stack import eventually

__all__ = ["town"]
pytestmark = pytest.mark.e2e


def _ends(town: Town, job: Job) -> list[str]:
    """How the job ended: one event, or the promise is broken (JOB-1, JOB-2)."""
    return [event.type for event in town.store.events_of(job.id) if event.type == f"job.{job.state}"]


def _lease(town: Town, model: str, job_id: str) -> dict[bytes, bytes]:
    assert town.stack.valkey is not None
    with town.stack.valkey.client() as redis:
        return redis.hgetall(f"slotkeeper:{{{model}}}:leases:{job_id}")


def _taken(town: Town, model: str) -> dict[bytes, bytes]:
    assert town.stack.valkey is not None
    with town.stack.valkey.client() as redis:
        return redis.hgetall(f"slotkeeper:{{{model}}}:slots")


def test_a_killed_workers_job_runs_again_within_seconds_at_its_own_place(town: Town) -> None:
    (first,) = town.crew(1)
    model = town.model(1)
    job_id = town.submit(model, LEASE_S + 3)
    town.until(job_id, "running")
    town.sent(model)
    following = town.submit(model, 0.02)
    town.hire()

    first.kill()
    killed = time.monotonic()
    eventually(lambda: town.starts(job_id) == 2, "it is started again", every_s=0.02)

    assert time.monotonic() - killed < LEASE_S + 3
    job = town.until(job_id, "completed")
    assert (job.crashes, job.failures, job.attempts) == (1, 0, 2)
    assert town.until(following, "completed").crashes == 0
    assert [run["job_id"] for run in town.runs(model)] == [job_id, following], "the server knew the job by its key"


def test_a_worker_that_wakes_after_its_lease_has_gone_changes_nothing(town: Town) -> None:
    (zombie,) = town.crew(1)
    model = town.model(1)
    job_id = town.submit(model, LEASE_S + 1)
    town.until(job_id, "running")
    town.sent(model)
    freeze(zombie)
    town.hire()
    following = town.submit(model, 2.5)
    ended = town.until(job_id, "completed")
    assert (ended.attempt, ended.crashes) == (2, 1)
    town.until(following, "running")
    before = _lease(town, model, following)

    thaw(zombie)
    eventually(lambda: "Task infer" in zombie.log.rsplit("received", 1)[-1], "its task has ended", 10)
    while town.row(following).state == "running":
        assert _lease(town, model, following).get(b"lease", before[b"lease"]) == before[b"lease"]
        assert list(_taken(town, model).values()) in ([following.encode()], [])
        time.sleep(0.05)

    assert town.row(job_id) == ended, "no second result"
    assert _ends(town, ended) == ["job.completed"]
    assert _ends(town, town.until(following, "completed")) == ["job.completed"]
    assert [run["job_id"] for run in town.runs(model)] == [job_id, following]
    assert town.row(following).crashes == 0


def test_a_worker_that_is_told_to_stop_finishes_what_is_short_and_hands_back_what_is_long(town: Town) -> None:
    (leaving,) = town.crew(1)
    quick, slow = town.model(1), town.polled_model(1)
    short, long = town.submit(quick, 0.8), town.submit(slow, LEASE_S + 3)
    town.until(short, "running")
    town.sent(slow)
    town.sent_later(long)
    waiting = town.submit(quick, 0.02)

    leaving.popen.send_signal(signal.SIGTERM)
    town.hire()

    jobs = [town.until(job_id, "completed") for job_id in (short, waiting, long)]
    assert [(job.attempts, job.crashes, job.failures) for job in jobs] == [(1, 0, 0)] * 3
    assert leaving.popen.wait(10) == 0
    assert _trail(town, long) == ["submitted", "started", "handed_back", "started", "finished"]
    assert [run["job_id"] for run in town.runs(quick)] == [short, waiting]
    assert [run["job_id"] for run in town.runs(slow)] == [long], "it was not run again"


def _trail(town: Town, job_id: str) -> list[Any]:
    return [event.data["why"] for event in town.store.events_of(job_id)]
