"""A queued job's position and estimated start."""

import pytest
from redis.exceptions import ConnectionError

from routing.queries.positions import QueuePosition, StartEstimate, queue_position, read_position
from routing.queue.queues import Position
from routing.queue.worker_capacity import WorkerCapacity
from tests.support.harness import SECOND, Harness

MINUTE = 60 * SECOND


@pytest.fixture
def measured(harness: Harness) -> Harness:
    """A model with two slots whose runs take a minute."""
    harness.register(2)
    harness.submit()
    task = harness.start()
    harness.hold(task, MINUTE)
    harness.settle(task)
    return harness


@pytest.mark.parametrize(
    ("ahead", "run_ms", "slots", "wait_ms"),
    [(0, MINUTE, 1, MINUTE), (3, MINUTE, 2, 2 * MINUTE), (3, None, 2, None), (3, MINUTE, 0, None)],
)
def test_the_estimate_is_jobs_times_mean_run_time_by_slots(ahead, run_ms, slots, wait_ms):
    assert Position(ahead, run_ms).estimated_wait_ms(slots) == wait_ms


def test_a_waiting_job_has_a_position_and_an_estimate(measured: Harness) -> None:
    ids = [measured.submit() for _ in range(4)]
    assert read_position(measured.dispatcher, measured.living_worker(), measured.job(ids[3]).queued) == QueuePosition(
        2, StartEstimate(MINUTE, 1, MINUTE, 2)
    )


def test_an_offered_job_is_being_started(measured: Harness) -> None:
    job = measured.job(measured.submit()).queued
    assert read_position(measured.dispatcher, measured.living_worker(), job) == QueuePosition(
        None, StartEstimate(0, 0, None, None), offered=True
    )


def test_a_job_of_a_paused_model_has_a_position_and_no_estimate(measured: Harness) -> None:
    job = measured.job([measured.submit() for _ in range(3)][2]).queued
    measured.catalog.set_model_state("zimg", "paused")
    found = read_position(measured.dispatcher, measured.living_worker(), job)
    assert (found.position, found.estimate) == (1, None)


def test_a_job_that_redis_does_not_have_has_no_position(harness: Harness) -> None:
    harness.register(1)
    job = harness.job(harness.submit()).queued
    harness.lose_redis()
    assert read_position(harness.dispatcher, harness.living_worker(), job) == QueuePosition()
    assert queue_position(harness.dispatcher, harness.living_worker(), job, None) == QueuePosition()


def test_after_a_redis_error_the_position_is_not_requested_again_at_once(harness: Harness, monkeypatch) -> None:
    harness.register(1)
    job, calls, workers = harness.job(harness.submit()).queued, [], harness.living_worker()

    def fail(*_):
        calls.append(1)
        raise ConnectionError

    monkeypatch.setattr(harness.dispatcher.queues, "job_status", fail)
    assert [read_position(harness.dispatcher, workers, job) for _ in range(3)] == [QueuePosition()] * 3
    assert len(calls) == 1


def test_without_a_live_worker_no_start_is_estimated(measured: Harness) -> None:
    jobs = [measured.job(measured.submit()).queued for _ in range(4)]
    nobody = WorkerCapacity(measured.dispatcher.slots.scripts)
    found = [read_position(measured.dispatcher, nobody, job) for job in (jobs[0], jobs[3])]
    assert [(one.position, one.estimate) for one in found] == [(None, None), (2, None)]
