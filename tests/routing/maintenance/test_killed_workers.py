"""The runs of workers that were killed on this machine are reaped at once, and the runs of live workers never."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError

from routing.maintenance import rebuild
from routing.queue.leases import Lease, Renewal
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.jobs.states import Reason, State
from slotkeeper.process_locks import ProcessLocks
from slotkeeper.redis.keys import Keys
from tests.support import passes
from tests.support.builders import at_once
from tests.support.ends import end_run_with, free, hand_back, release, store_end
from tests.support.harness import LEASE_MS, SECOND, Harness
from tools.cluster.direct_starts import claim_offer, store_start

KILLED, LIVING = "worker/killed", "worker/living"


class Deaths:
    """Workers on this machine, and the maintenance that reaps those that died."""

    def __init__(self, harness: Harness, folder: Path) -> None:
        self._stage, self.process_locks = harness, ProcessLocks(folder)
        self.workers = WorkerCapacity(harness.dispatcher.queues.scripts)
        for worker in (KILLED, LIVING):
            self.process_locks.acquire(worker)
            self.workers.report(worker, 1)

    def kill(self, worker: str = KILLED) -> None:
        """Release the lock of the worker, as the kernel does when a process dies."""
        os.close(self.process_locks._held.pop(worker))

    def reap(self) -> int:
        return passes.reap_dead_workers(self._stage.dispatcher, self.workers, self.process_locks)


@pytest.fixture
def deaths(harness: Harness, tmp_path: Path) -> Deaths:
    (tmp_path / "record.db").touch()
    harness.register(2)
    return Deaths(harness, tmp_path / "workers")


def test_the_run_of_a_killed_worker_is_offered_again_at_once_on_its_slot_and_a_live_ones_is_kept(harness, deaths):
    lost, kept = harness.submit(), harness.submit()
    task, other = harness.start(KILLED), harness.start(LIVING)
    harness.remote(task)
    harness.later(LEASE_MS * 3 // 4)
    harness.renewal(task)
    assert deaths.reap() == 0, "the process is alive, although it does not renew"
    deaths.kill()
    assert deaths.reap() == 1
    job = harness.job(lost)
    assert (job.state, job.why, job.crashes, job.failures) == (State.QUEUED, Reason.LEASE_EXPIRED, 1, 0)
    assert (job.error_code, job.error_message) == (
        "worker_lost",
        f"The worker that ran it on {task.lease.slot} has died.",
    )
    again = harness.start(LIVING)
    assert (again.run.remote_id, again.run.attempt, again.lease.slot) == ("r-1", 2, task.lease.slot)
    assert harness.state(kept) is State.RUNNING and harness.job(kept).crashes == 0
    assert harness.renewal(other) is Renewal.RENEWED and harness.renewal(task) is Renewal.LOST


def test_a_killed_worker_that_was_stopping_costs_its_job_nothing(harness, deaths):
    job_id = harness.submit()
    for number in range(4):  # One more than the deaths that a job may pay for.
        worker = f"worker/stopped{number}"
        deaths.process_locks.acquire(worker)
        harness.start(worker)
        deaths.workers.report_stopping(worker)
        deaths.kill(worker)
        assert deaths.reap() == 1
        job = harness.job(job_id)
        assert (job.state, job.why, job.crashes) == (State.QUEUED, Reason.HANDED_BACK, 0), number
    assert deaths.workers.read_total() == 2, "the capacity of the other workers"


def test_a_silent_worker_that_was_stopping_costs_its_job_nothing(harness, deaths):
    job_id = harness.submit()
    harness.start(LIVING)
    deaths.workers.report_stopping(LIVING)
    harness.later(LEASE_MS)
    assert passes.reap(harness.dispatcher) == 1
    assert (harness.job(job_id).why, harness.job(job_id).crashes) == (Reason.HANDED_BACK, 0)


def test_the_error_of_a_reaped_run_names_a_silent_worker_and_does_not_call_it_dead(harness, deaths):
    job_id = harness.submit()
    harness.start(LIVING)
    harness.later(LEASE_MS)
    assert deaths.reap() == 0
    assert passes.reap(harness.dispatcher) == 1
    assert "stopped renewing" in (harness.job(job_id).error_message or "")


def test_a_killed_worker_adds_no_capacity(deaths):
    deaths.kill()
    deaths.reap()
    assert deaths.workers.read_total() == 1


def test_a_worker_that_is_killed_before_its_first_claim_is_removed_at_once(harness, deaths):
    job_id = harness.submit()
    deaths.kill()
    assert deaths.reap() == 0
    assert deaths.process_locks.find_dead() == []
    assert harness.offered() == [job_id], "an unclaimed offer belongs to no worker"


def test_a_claim_that_a_killed_worker_sent_last_is_found_by_the_next_check(harness, deaths):
    first, second = harness.submit(), harness.submit()
    harness.start(KILLED)
    late = harness.notifications.offers.pop()
    deaths.kill()
    assert deaths.reap() == 1
    assert claim_offer(harness.dispatcher.leases, late, KILLED) is not None, "it was on its way"
    assert deaths.reap() == 1
    assert deaths.process_locks.find_dead() == [KILLED]
    assert deaths.reap() == 0
    assert deaths.process_locks.find_dead() == []
    assert {harness.state(job_id) for job_id in (first, second)} == {State.QUEUED}


def test_a_start_of_a_killed_worker_that_arrives_after_the_first_check_is_found_by_a_later_one(harness, deaths):
    """PostgreSQL commits a request that it has received, also when the client has died."""
    job_id = harness.submit()
    offer = harness.notifications.offers.pop()
    assert claim_offer(harness.dispatcher.leases, offer, KILLED) is not None
    deaths.kill()
    assert deaths.reap() == 1
    lease = f"{offer.lease} {KILLED}"
    assert store_start(harness.store, job_id, offer.server, offer.slot, lease, harness.now, fleet="zimg") is not None
    assert deaths.reap() == 0, "its job is offered again"
    again = harness.notifications.offers.pop()
    assert claim_offer(harness.dispatcher.leases, again, LIVING) is not None
    free(
        harness.dispatcher, Lease(again.fleet, job_id, again.lease, LIVING, again.slot), return_to_lane=False
    )  # It finds a run.
    assert deaths.reap() == 1
    assert (harness.state(job_id), harness.job(job_id).why) == (State.QUEUED, Reason.LEASE_EXPIRED)
    deaths.reap()
    assert deaths.process_locks.find_dead() == []


def test_a_claim_of_a_killed_worker_without_a_start_costs_the_job_nothing(harness, deaths):
    job_id = harness.submit()
    assert claim_offer(harness.dispatcher.leases, harness.notifications.offers.pop(), KILLED) is not None
    deaths.kill()
    assert deaths.reap() == 1
    assert (harness.job(job_id).crashes, harness.job(job_id).attempt) == (0, 0)
    assert harness.offered() == [job_id]


def test_a_slot_whose_run_had_ended_is_only_freed(harness, deaths):
    """Its worker was killed between the end in the database and the release of the slot."""
    job_id = harness.submit()
    task = harness.start(KILLED)
    store_end(harness.store, job_id, task.run.attempt, Reason.FINISHED, harness.now, result="1")
    deaths.kill()
    assert deaths.reap() == 1
    assert (harness.state(job_id), harness.job(job_id).crashes, harness.free()) == (State.COMPLETED, 0, 2)


def test_a_run_that_released_its_slot_and_did_not_end_is_reaped_at_once(harness, deaths):
    """Its worker was killed after the release of the slot and before the end in the database; the next run has it."""
    passing, following = harness.submit(), harness.submit()
    task = harness.start(KILLED)
    harness.start(KILLED)
    release(harness.dispatcher.leases, task.lease, return_to_lane=False, claimant=KILLED)
    deaths.kill()
    assert deaths.reap() == 2
    assert [harness.job(job_id).why for job_id in (passing, following)] == [Reason.LEASE_EXPIRED] * 2
    assert sorted(harness.offered()) == [passing, following]
    assert passes.restore_missed(harness.dispatcher) == 0


def test_a_lease_that_is_handed_back_between_the_reapers_read_and_write_is_not_reaped(harness, deaths, monkeypatch):
    job_id = harness.submit()
    task = harness.start(KILLED)
    deaths.kill()
    look = harness.dispatcher.leases.list_all

    def and_then_it_is_handed_back(fleets: Any) -> Any:
        found = look(fleets)
        hand_back(harness.dispatcher, task)
        harness.start(LIVING)
        return found

    monkeypatch.setattr(harness.dispatcher.leases, "list_all", and_then_it_is_handed_back)
    assert deaths.reap() == 0
    job = harness.job(job_id)
    assert (job.state, job.attempt, job.crashes) == (State.RUNNING, 2, 0)


def test_a_quarantined_slot_and_a_lease_that_another_reaper_has_seized_are_not_reaped(harness, deaths):
    drains, other = harness.submit(), harness.submit()
    end_run_with(harness.dispatcher, harness.start(KILLED), Reason.CANCEL_REQUESTED, server_still_running="canceled")
    task = harness.start(KILLED)
    assert harness.dispatcher.leases.seize(task.lease, "reaper", 10 * SECOND, only_expired=False) is not None
    deaths.kill()
    assert deaths.reap() == 0
    assert harness.state(other) is State.RUNNING
    assert sorted(harness.queue.taken().values()) == sorted([other, f"{drains}~1"])


def _spoil(harness: Harness) -> Callable[[], Any]:
    key = Keys("test").fleet_key("flux", "leases")
    harness.redis.set(key, "of another kind")
    return lambda: harness.redis.delete(key)


def test_a_killed_worker_is_not_removed_while_a_queue_cannot_be_read(harness, deaths):
    harness.register(model="flux", server="spoiled")
    mend = _spoil(harness)
    job_id = harness.submit()
    harness.start(KILLED)
    deaths.kill()
    assert deaths.reap() == 1, "the broken queue blocks no other queue"
    assert deaths.reap() == 0
    assert deaths.process_locks.find_dead() == [KILLED]
    mend()
    deaths.reap()
    assert deaths.process_locks.find_dead() == [] and harness.offered() == [job_id]


def test_a_killed_worker_is_not_removed_while_one_of_its_jobs_cannot_be_reaped(harness, deaths, faults):
    job_id = harness.submit()
    harness.start(KILLED)
    deaths.kill()
    with faults("UPDATE jobs"):
        assert deaths.reap() == 0
    assert deaths.process_locks.find_dead() == [KILLED] and harness.state(job_id) is State.RUNNING


def test_a_killed_worker_is_not_removed_while_redis_is_unavailable(harness, deaths):
    deaths.kill()
    away = harness.cut_off()
    with pytest.raises(RedisError):
        passes.reap_dead_workers(away, WorkerCapacity(away.queues.scripts), deaths.process_locks)
    assert deaths.process_locks.find_dead() == [KILLED]


def test_the_runs_of_a_queue_in_rebuild_are_reaped_after_the_rebuild(harness, deaths):
    job_id = harness.submit()
    task = harness.start(KILLED)
    deaths.kill()
    harness.lose_redis()
    assert deaths.reap() == 0
    assert harness.state(job_id) is State.RUNNING and deaths.process_locks.find_dead() == [KILLED]
    rebuild.rebuild_queue(harness.dispatcher, "zimg")
    assert deaths.reap() == 1
    assert harness.state(job_id) is State.QUEUED
    assert [(offer.job_id, offer.slot) for offer in harness.notifications.offers][-1] == (job_id, task.lease.slot)


def test_concurrent_reapers_reap_each_lease_of_a_killed_worker_once(harness, deaths):
    ids = [harness.submit(), harness.submit()]
    for _ in ids:
        harness.start(KILLED)
    deaths.kill()
    at_once(*[deaths.reap for _ in range(3)])
    assert [harness.job(job_id).crashes for job_id in ids] == [1, 1]
    assert sorted(harness.offered()) == ids
