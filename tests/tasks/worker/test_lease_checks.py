"""A worker that was stopped (SIGSTOP, a suspended host) uses no slot by a lease whose time is over."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as Broken

from routing.dispatch.dispatcher import active_run_of
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.dispatch.run_steps import RunSteps
from routing.queue.leases import Lease
from slotkeeper.jobs.states import State
from tasks.servers import Health
from tasks.worker import executor
from tasks.worker.heartbeat import LeaseWatch
from tasks.worker.lease_checks import LeaseCheck
from tasks.worker.worker import Worker
from tests.support import passes
from tests.support.ends import free
from tests.support.stage import LEASE_MS, SETTINGS, Stage
from tests.tasks.worker.one_run import FakeServer, run

_STOPPED_MS = 2 * LEASE_MS


@pytest.fixture
def ages(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The steady clock goes on by so many ms, as while the process is stopped."""
    passed_s, real = [0.0], time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: real(which) + passed_s[0])

    def age(ms: int) -> None:
        passed_s[0] += ms / 1000

    return age


@pytest.fixture
def stop(stage: Stage, ages: Callable[[int], None]) -> Callable[[], None]:
    """The worker is stopped for longer than its leases last, and maintenance is not."""

    def stop() -> None:
        ages(_STOPPED_MS)
        stage.later(_STOPPED_MS)
        passes.reap(stage.dispatcher)

    return stop


def _at(point: str, act: Callable[[], None]) -> Callable[[str], None]:
    """Have `act` done when this crash point is passed for the first time."""
    left = [point]

    def crash_at(passed: str) -> None:
        if passed in left:
            left.remove(passed)
            act()

    return crash_at


def test_a_worker_that_was_stopped_after_its_claim_starts_nothing(
    stage: Stage, worker: Worker, server: FakeServer, stop: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit()
    monkeypatch.setattr(executor, "crash_at", _at("start_claimed", stop))

    run(stage)

    assert server.asked == [] and stage.state(job_id) is State.QUEUED
    _expect_to_complete(stage, server, job_id, attempt=1)


def test_a_worker_that_was_stopped_after_its_start_sends_nothing(
    stage: Stage, worker: Worker, server: FakeServer, stop: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit()
    monkeypatch.setattr(executor, "crash_at", _at("start_committed", stop))

    run(stage)

    assert server.asked == [] and stage.job(job_id).crashes == 1, "its reaper could not know that nothing was sent"
    _expect_to_complete(stage, server, job_id, attempt=2, crashes=1)


def test_a_start_that_was_stored_after_its_lease_was_gone_is_put_back_and_costs_nothing(
    stage: Stage, worker: Worker, server: FakeServer, stop: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit()
    start = RunSteps.start

    async def start_late(*given: Any) -> Any:
        monkeypatch.setattr(RunSteps, "start", start)
        stop()
        return await start(*given)

    monkeypatch.setattr(RunSteps, "start", start_late)
    run(stage)

    assert server.asked == []
    assert [event.data["why"] for event in stage.store.list_events(job_id)] == ["submitted", "started", "handed_back"]
    _expect_to_complete(stage, server, job_id, attempt=2)


def test_a_lease_that_came_back_beside_another_is_not_used_for_a_first_request(
    stage: Stage,
    worker: Worker,
    server: FakeServer,
    ages: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage.register()
    first, second = stage.submit(), stage.submit()

    def lose_the_slot_to_the_second() -> None:
        ages(_STOPPED_MS)
        (active,) = (active_run_of(stage.dispatcher, stage.job(first)),)
        assert active is not None
        free(stage.dispatcher, active.lease, return_to_lane=False)
        stage.start("w2")
        assert passes.restore_missing(stage) == 1

    monkeypatch.setattr(executor, "crash_at", _at("start_committed", lose_the_slot_to_the_second))
    run(stage)

    assert server.asked == [] and list(stage.room.taken().values()) == [second]
    assert (stage.state(first), stage.job(first).crashes) == (State.QUEUED, 0)
    assert first in stage.room.waiting()


def test_a_lost_lease_of_a_run_that_was_not_sent_is_not_written_again(
    stage: Stage, worker: Worker, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit()

    def lose_the_lease_and_beat() -> None:
        active = active_run_of(stage.dispatcher, stage.job(job_id))
        assert active is not None
        free(stage.dispatcher, active.lease, return_to_lane=False)
        worker.heartbeat.beat()

    monkeypatch.setattr(executor, "crash_at", _at("start_committed", lose_the_lease_and_beat))
    run(stage)

    assert "submit" not in server.asked
    assert (stage.state(job_id), stage.job(job_id).crashes) == (State.QUEUED, 0)


def test_a_worker_that_was_stopped_sends_no_request_again(
    stage: Stage, worker: Worker, server: FakeServer, stop: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.register()
    job_id = stage.submit()
    server.during, server.runs, server.answers = stop, frozenset(), [Outcome(OutcomeKind.UNKNOWN)]
    health = server.health

    async def health_and_beat() -> Health:
        if server.asked.count("health") == 1:
            worker.heartbeat.beat()
        return await health()

    monkeypatch.setattr(server, "health", health_and_beat)
    monkeypatch.setattr("tasks.worker.server_call._HEALTH_PERIOD_S", 0.001)
    run(stage)

    assert server.asked.count("submit") == 1, "the slot may be another job's"
    assert stage.job(job_id).crashes == 1


def _expect_to_complete(stage: Stage, server: FakeServer, job_id: str, *, attempt: int, crashes: int = 0) -> None:
    server.answers = [Outcome(OutcomeKind.DONE, result={"url": "x"})]
    stage.told.offers += stage.dispatcher.queues.offer("zimg", 1)
    run(stage)
    job = stage.job(job_id)
    assert (job.state, job.attempt, job.crashes) == (State.COMPLETED, attempt, crashes)
    assert stage.free() == 1


@pytest.mark.parametrize(("age_ms", "holds"), [(LEASE_MS - 1, True), (LEASE_MS, False)])
def test_while_redis_is_away_a_lease_holds_for_its_own_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, age_ms: int, holds: bool
) -> None:
    monkeypatch.setattr("tasks.worker.lease_checks.boottime_s", lambda: age_ms / 1000)

    async def ask(_: object) -> str:
        raise Broken("Redis is away.")

    watch = LeaseWatch(Lease("zimg", "j1", "l1", "w1", "gpu-slot0"), confirmed_at_s=0.0)
    assert asyncio.run(LeaseCheck(stage.dispatcher.leases, SETTINGS, ask).is_still_held(watch)) is holds
