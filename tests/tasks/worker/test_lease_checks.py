"""A worker that was suspended (SIGSTOP, a suspended host) uses no slot of an expired lease."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

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
from tests.support.harness import LEASE_MS, SETTINGS, Harness
from tests.tasks.worker.one_run import FakeServer, run

_SUSPENDED_MS = 2 * LEASE_MS


@pytest.fixture
def advance_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that advances the monotonic clock by ms, as happens while the process is suspended."""
    passed_s, real = [0.0], time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda which: real(which) + passed_s[0])

    def advance(ms: int) -> None:
        passed_s[0] += ms / 1000

    return advance


@pytest.fixture
def suspend(harness: Harness, advance_clock: Callable[[int], None]) -> Callable[[], None]:
    """Return a function that suspends the worker until its leases have expired, while maintenance runs on."""

    def suspend() -> None:
        advance_clock(_SUSPENDED_MS)
        harness.later(_SUSPENDED_MS)
        passes.reap(harness.dispatcher)

    return suspend


def _at(point: str, act: Callable[[], None]) -> Callable[[str], None]:
    """Return a replacement for `crash_at` that calls `act` when the run first passes this crash point."""
    pending = [point]

    def crash_at(passed: str) -> None:
        if passed in pending:
            pending.remove(passed)
            act()

    return crash_at


def test_a_worker_that_was_stopped_after_its_claim_starts_nothing(
    harness: Harness, worker: Worker, server: FakeServer, suspend: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    job_id = harness.submit()
    monkeypatch.setattr(executor, "crash_at", _at("start_claimed", suspend))

    run(harness)

    assert server.asked == [] and harness.state(job_id) is State.QUEUED
    _assert_completes(harness, server, job_id, attempt=1)


def test_a_worker_that_was_stopped_after_its_start_sends_nothing(
    harness: Harness, worker: Worker, server: FakeServer, suspend: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    job_id = harness.submit()
    monkeypatch.setattr(executor, "crash_at", _at("start_committed", suspend))

    run(harness)

    assert server.asked == [] and harness.job(job_id).crashes == 1, "the reaper cannot know that no request was sent"
    _assert_completes(harness, server, job_id, attempt=2, crashes=1)


def test_a_start_that_was_stored_after_the_loss_of_its_lease_is_handed_back_and_costs_no_retry(
    harness: Harness, worker: Worker, server: FakeServer, suspend: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    job_id = harness.submit()
    start = RunSteps.start

    async def suspend_and_start(*args: Any) -> Any:
        monkeypatch.setattr(RunSteps, "start", start)
        suspend()
        return await start(*args)

    monkeypatch.setattr(RunSteps, "start", suspend_and_start)
    run(harness)

    assert server.asked == []
    assert [event.data["why"] for event in harness.store.list_events(job_id)] == ["submitted", "started", "handed_back"]
    _assert_completes(harness, server, job_id, attempt=2)


def test_a_lease_that_is_restored_beside_another_is_not_used_for_a_first_request(
    harness: Harness,
    worker: Worker,
    server: FakeServer,
    advance_clock: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness.register()
    first, second = harness.submit(), harness.submit()

    def lose_the_slot_to_the_second() -> None:
        advance_clock(_SUSPENDED_MS)
        active = active_run_of(harness.dispatcher, harness.job(first))
        assert active is not None
        free(harness.dispatcher, active.lease, return_to_lane=False)
        harness.start("w2")
        assert passes.restore_missing(harness) == 1

    monkeypatch.setattr(executor, "crash_at", _at("start_committed", lose_the_slot_to_the_second))
    run(harness)

    assert server.asked == [] and list(harness.queue.taken().values()) == [second]
    assert (harness.state(first), harness.job(first).crashes) == (State.QUEUED, 0)
    assert first in harness.queue.waiting()


def test_a_lost_lease_of_a_run_that_was_not_sent_is_not_written_again(
    harness: Harness, worker: Worker, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    job_id = harness.submit()

    def lose_the_lease_and_beat() -> None:
        active = active_run_of(harness.dispatcher, harness.job(job_id))
        assert active is not None
        free(harness.dispatcher, active.lease, return_to_lane=False)
        worker.heartbeat.beat()

    monkeypatch.setattr(executor, "crash_at", _at("start_committed", lose_the_lease_and_beat))
    run(harness)

    assert "submit" not in server.asked
    assert (harness.state(job_id), harness.job(job_id).crashes) == (State.QUEUED, 0)


def test_a_worker_that_was_stopped_sends_no_request_again(
    harness: Harness, worker: Worker, server: FakeServer, suspend: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    job_id = harness.submit()
    server.during, server.runs, server.answers = suspend, frozenset(), [Outcome(OutcomeKind.UNKNOWN)]
    health = server.health

    async def health_and_beat() -> Health:
        if server.asked.count("health") == 1:
            worker.heartbeat.beat()
        return await health()

    monkeypatch.setattr(server, "health", health_and_beat)
    monkeypatch.setattr("tasks.worker.server_call._HEALTH_PERIOD_S", 0.001)
    run(harness)

    assert server.asked.count("submit") == 1, "another job may have the slot"
    assert harness.job(job_id).crashes == 1


def test_a_request_is_not_sent_again_while_maintenance_ends_the_run(
    harness: Harness, worker: Worker, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maintenance has seized the lease, and its transaction has not ended the run yet."""
    harness.register()
    harness.submit()
    health = server.health

    def seize() -> None:
        (watch,) = worker.heartbeat.watches()
        assert harness.dispatcher.leases.seize(watch.lease, "maintenance", LEASE_MS, only_expired=False)

    async def health_then_end() -> Health:
        if server.asked.count("health") == 2:
            worker.heartbeat.watches()[0].end("lost")
        return await health()

    server.during, server.runs, server.answers = seize, frozenset(), [Outcome(OutcomeKind.UNKNOWN)]
    monkeypatch.setattr(server, "health", health_then_end)
    monkeypatch.setattr("tasks.worker.server_call._HEALTH_PERIOD_S", 0.001)
    run(harness)
    assert server.asked.count("submit") == 1


def _assert_completes(harness: Harness, server: FakeServer, job_id: str, *, attempt: int, crashes: int = 0) -> None:
    server.answers = [Outcome(OutcomeKind.DONE, result={"url": "x"})]
    harness.notifications.offers += harness.dispatcher.queues.offer("zimg", 1)
    run(harness)
    job = harness.job(job_id)
    assert (job.state, job.attempt, job.crashes) == (State.COMPLETED, attempt, crashes)
    assert harness.free() == 1


@pytest.mark.parametrize(("age_ms", "is_valid"), [(LEASE_MS - 1, True), (LEASE_MS, False)])
def test_while_redis_is_down_a_lease_stays_valid_until_it_expires(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, age_ms: int, is_valid: bool
) -> None:
    monkeypatch.setattr("tasks.worker.lease_checks.boottime_s", lambda: age_ms / 1000)

    async def fail(_: object) -> str:
        raise RedisConnectionError("Redis is down.")

    watch = LeaseWatch(Lease("zimg", "j1", "l1", "w1", "gpu-slot0"), confirmed_at_s=0.0)
    assert asyncio.run(LeaseCheck(harness.dispatcher.leases, SETTINGS, fail).is_still_held(watch)) is is_valid
