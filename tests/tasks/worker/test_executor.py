"""The life and end of one run in its worker, whatever is away, late or taken over meanwhile."""

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from routing.maintenance import restore_leases
from routing.queue.leases import Renewal
from slotkeeper import json_text, large_json
from slotkeeper.clock import clock
from slotkeeper.db import Write
from slotkeeper.errors import ClockWasSet, DatabaseUnavailable
from slotkeeper.jobs.states import Reason, State
from tasks import offer_messages
from tasks.inference import infer
from tasks.servers import SPOOL_AFTER_BYTES
from tasks.servers.call import Call
from tasks.servers.description import Description
from tasks.worker import lease_checks, run_calls, server_call, worker_run
from tasks.worker.heartbeat import LeaseWatch
from tasks.worker.worker import Worker
from tasks.worker.worker_run import RetryingIo
from tests.support import passes
from tests.support.builders import eventually
from tests.support.ends import hand_back, release, store_end
from tests.support.stage import LEASE_MS, SECOND, SETTINGS, Stage
from tests.tasks.worker.one_run import FakeServer, make_server_call, run
from tools.cluster.direct_starts import begin_run, claim_offer

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

DONE = Outcome(OutcomeKind.DONE, result={"url": "x"})
PENDING = Outcome(OutcomeKind.PENDING, remote_id="r-1")
UNKNOWN = Outcome(OutcomeKind.UNKNOWN)
FAULT = Outcome(OutcomeKind.RETRY, code="server_error", message="500")


def _away(*_: object, **__: object) -> Any:
    raise DatabaseUnavailable("away")


def _away_for(times: int, act: Callable[..., Write[Any]]) -> Callable[..., Write[Any]]:
    left = iter(range(times))

    def at_last(*args: Any, **more: Any) -> Write[Any]:
        write = act(*args, **more)
        return Write(lambda tx: _away() if next(left, None) is not None else write.unit(tx))

    return at_last


# -- the record is away ----------------------------------------------------------------------------------------


def test_a_record_that_is_away_when_a_server_takes_the_job_up_costs_nothing(stage, worker, server, monkeypatch):
    stage.register(model_type="async", poll_interval=0.001)
    job_id = stage.submit()
    server.answers = [PENDING, DONE]
    monkeypatch.setattr(stage.store, "remote_id_write", _away_for(3, stage.store.remote_id_write))
    assert run(stage).state is State.COMPLETED
    job = stage.job(job_id)
    assert (job.state, job.crashes, job.failures, job.attempt) == (State.COMPLETED, 0, 0, 1)
    assert server.asked == ["submit", "status"]


@pytest.mark.parametrize("what", ["settle_write", "remote_id_write"])
def test_a_record_that_stays_away_ends_nothing_and_is_held_against_nobody(stage, worker, server, monkeypatch, what):
    """The worker stops at last: the lease is left to expire, and the job to whoever takes it up then."""
    monkeypatch.setattr(worker_run, "_STOP_LIMIT_S", 0.0)
    stage.register(model_type="async", poll_interval=0.001)
    job_id = stage.submit()
    server.answers = [PENDING, DONE]
    with monkeypatch.context() as away:
        away.setattr(stage.store, what, lambda *_, **__: (worker.heartbeat.stop_all(), Write(_away))[1])
        run(stage)
    assert (stage.state(job_id), stage.job(job_id).crashes) == (State.RUNNING, 0)
    if what == "settle_write":  # Its slot was passed on, so its lease comes back from the record.
        assert passes.restore_missing(stage) == 1
    else:
        assert stage.redis.hgetall(stage.room.key("stats:server:gpu")).keys() <= {b"taken", b"loaded"}
    assert list(stage.room.taken().values()) == [job_id]


@pytest.mark.parametrize("what", ["settle_write", "remote_id_write"])
def test_a_write_that_is_refused_because_the_clock_was_set_is_made_anew(stage, worker, server, monkeypatch, what):
    stage.register(model_type="async", poll_interval=0.001)
    job_id = stage.submit()
    server.answers, made = [PENDING, DONE], getattr(stage.store, what)
    refused: list[Write[Any]] = []

    def once_too_old(*args: Any, **more: Any) -> Write[Any]:
        if refused:
            return made(*args, **more)
        refused.append(Write(_clock_was_set))
        return refused[0]

    monkeypatch.setattr(stage.store, what, once_too_old)
    assert run(stage).state is State.COMPLETED
    job = stage.job(job_id)
    assert (len(refused), job.attempt, job.crashes) == (1, 1, 0)


def test_a_retry_keeps_its_delay_if_the_clock_is_set_while_its_end_is_stored(stage, worker, server, monkeypatch):
    stage.register(max_retries=3)
    job_id = stage.submit()
    server.answers, made = [FAULT], stage.store.settle_write
    due: list[int] = []

    def note(*args: Any, **more: Any) -> Write[Any]:
        due.append(more["due_ms"])
        if len(due) > 1:
            return made(*args, **more)
        monkeypatch.setattr(clock, "moved_since", lambda _: 7_200_000)
        return Write(_clock_was_set)

    monkeypatch.setattr(stage.store, "settle_write", note)
    run(stage)
    assert due[1] == due[0] + 7_200_000 == stage.job(job_id).due_ms


def _clock_was_set(*_: object) -> Any:
    raise ClockWasSet("The clock was set.")


# -- the slot does not wait for the record ----------------------------------------------------------------------


def test_the_slot_of_a_run_whose_server_has_answered_does_not_wait_for_the_record(stage, worker, server, monkeypatch):
    stage.register()
    first, second = stage.submit(), stage.submit()
    server.answers, stored = [DONE, DONE], RetryingIo.commit
    waits: list[str] = []
    worker.consumer = object()

    async def late(io: RetryingIo, write: Any) -> Any:
        waits.append(io._watch.lease.job_id)
        while len(server.asked) < 2:
            await asyncio.sleep(0.001)
        return await stored(io, write)

    monkeypatch.setattr(RetryingIo, "commit", late)
    run(stage)
    assert waits == [first, second] and server.asked == ["submit", "submit"]
    assert [stage.state(it) for it in (first, second)] == [State.COMPLETED] * 2


def test_a_large_result_is_read_and_written_outside_the_loop(stage, worker, server):
    read_by: list[str] = []

    def read(size: int) -> bytes:
        read_by.append(threading.current_thread().name)
        return b'"' + b"x" * (size - 2) + b'"'

    stage.register()
    job_id = stage.submit()
    server.answers = [
        Outcome(
            OutcomeKind.DONE,
            result=json_text.RawJson(json_text.FilePart(SPOOL_AFTER_BYTES + 1, read), large_json.get_member),
        )
    ]
    run(stage)
    assert len(stage.job(job_id).result or "") == SPOOL_AFTER_BYTES + 1
    assert read_by and "engine" not in read_by


@pytest.mark.parametrize(
    "outcome",
    [FAULT, Outcome(OutcomeKind.BUSY), Outcome(OutcomeKind.RETRY, code="timed_out", server_still_running=True)],
)
def test_a_slot_whose_job_comes_back_or_whose_server_is_at_it_waits_for_the_record(
    stage, worker, server, monkeypatch, outcome
):
    stage.register()
    first = stage.submit()
    server.answers = [outcome]
    states: list[State] = []
    release = stage.dispatcher.leases.release_command

    def noted(*args: Any, **more: Any) -> Any:
        states.append(stage.state(first))
        return release(*args, **more)

    monkeypatch.setattr(stage.dispatcher.leases, "release_command", noted)
    run(stage)
    assert states and State.RUNNING not in states


def test_a_full_worker_stores_an_end_while_it_searches_for_the_next_job(stage, worker, server, monkeypatch):
    """The search asks Redis for each other fleet, in a thread."""
    stage.register()
    job_id = stage.submit()
    worker.concurrency.limit, worker.consumer = 1, SimpleNamespace()
    server.answers = [DONE]
    searched, may_end = threading.Event(), threading.Event()

    def search(_: str) -> None:
        searched.set()
        may_end.wait(60)

    monkeypatch.setattr(worker.poller, "claim_in_turn", search)
    worker.executor.run_open_offer(stage.told.offers.pop(0))
    try:
        eventually(lambda: stage.state(job_id) is State.COMPLETED)
        assert searched.wait(10)
    finally:
        may_end.set()


def test_nothing_keeps_what_a_run_that_has_ended_held(stage, worker, server, monkeypatch):
    """Collections are seldom, and payloads may be large."""
    calls: list[weakref.ref[server_call.ServerCall]] = []
    run_call = server_call.ServerCall.run

    def noted(call: server_call.ServerCall) -> Any:
        calls.append(weakref.ref(call))
        return run_call(call)

    monkeypatch.setattr(server_call.ServerCall, "run", noted)
    server.answers = [DONE]
    stage.register()
    stage.submit()
    gc.disable()
    try:
        run(stage)
        eventually(lambda: calls[0]() is None)
    finally:
        gc.enable()


def test_a_run_whose_end_is_on_its_way_to_the_record_is_not_taken_for_one_without_a_lease(stage, worker, server):
    stage.register()
    job_id = stage.submit()
    task = stage.start("w1")
    release(stage.dispatcher.leases, task.lease, return_to_lane=False)
    assert passes.restore_missed(stage.dispatcher) == 0
    stage.later(restore_leases._GRACE_MS - 1)
    assert passes.restore_missed(stage.dispatcher) == 0
    assert store_end(stage.store, job_id, 1, Reason.FINISHED, stage.now, result="{}") is not None
    stage.later(1)
    assert passes.restore_missed(stage.dispatcher) == 0 and stage.room.taken() == {}


def test_a_lease_that_was_written_again_while_its_end_was_stored_is_freed(stage, worker, server, monkeypatch):
    stage.register()
    first = stage.submit()
    server.answers, stored = [DONE], RetryingIo.commit

    async def late(io: RetryingIo, write: Any) -> Any:
        hold = io._watch
        hold.slot_released_at_s = None
        worker.heartbeat.beat()
        assert hold.restored and stage.room.taken() == {"gpu-slot0": first}
        return await stored(io, write)

    monkeypatch.setattr(RetryingIo, "commit", late)
    run(stage)
    assert stage.state(first) is State.COMPLETED and stage.room.taken() == {} and stage.free() == 1


# -- a call whose answer was lost -------------------------------------------------------------------------------


def test_a_call_that_only_lost_its_connection_is_sent_again_and_costs_nothing(stage, worker, server, monkeypatch):
    """The server answers from its recent results, or runs it now: nobody has died under it."""
    monkeypatch.setattr(server_call, "_HEALTH_PERIOD_S", 0.001)
    stage.register()
    job_id = stage.submit()
    server.answers, server.runs = [UNKNOWN, DONE], frozenset()
    run(stage)
    assert server.asked == ["submit", "health", "submit"]
    assert (stage.state(job_id), stage.job(job_id).crashes, stage.job(job_id).attempt) == (State.COMPLETED, 0, 1)


def test_a_call_that_is_lost_again_is_a_crash(stage, worker, server, monkeypatch):
    monkeypatch.setattr(server_call, "_HEALTH_PERIOD_S", 0.001)
    stage.register()
    job_id = stage.submit()
    server.answers, server.runs = [UNKNOWN, UNKNOWN], frozenset()
    run(stage)
    assert server.asked == ["submit", "health", "submit", "health"]
    assert (stage.job(job_id).why, stage.job(job_id).crashes) == (Reason.SERVER_LOST, 1)


def test_a_call_whose_server_went_away_meanwhile_is_not_sent_again(stage, worker, server, monkeypatch):
    """The job may have brought it down."""
    monkeypatch.setattr(server_call, "_HEALTH_PERIOD_S", 0.001)
    stage.register()
    job_id = stage.submit()
    server.answers, server.runs, server.down = [UNKNOWN], frozenset(), 2
    run(stage)
    assert server.asked == ["submit", "health", "health", "health"]
    assert (stage.job(job_id).why, stage.job(job_id).crashes) == (Reason.SERVER_LOST, 1)


# -- Redis does not know the lease -----------------------------------------------------------------------------


def _forgotten(stage: Stage, *job_ids: str) -> None:
    """An older copy of Redis' data has taken over: it is open, and lacks these leases."""
    for job_id in job_ids:
        slot = stage.room.lease_of(job_id)["slot"]
        stage.redis.delete(stage.room.key(f"leases:{job_id}"))
        stage.redis.zrem(stage.room.key("leases"), job_id)
        stage.redis.hdel(stage.room.key("slots"), slot)
        stage.redis.hdel(stage.room.key("held"), "default|zimg")
        stage.redis.zadd(stage.room.key("free"), {slot: stage.now})


def _begun(stage: Stage, worker: Worker) -> tuple[ActiveRun, LeaseWatch]:
    task = begin_run(stage.dispatcher, stage.told.offers.pop(0), worker.owner)
    assert task is not None
    watch = worker.heartbeat.add(task.lease)
    watch.sent = True
    return task, watch


def test_a_lease_that_redis_lost_is_written_again_and_the_run_goes_on(stage, worker):
    stage.register()
    job_id = stage.submit()
    task, hold = _begun(stage, worker)
    _forgotten(stage, job_id)
    worker.heartbeat.beat()
    assert not hold.lost
    assert stage.room.taken() == {"gpu-slot0": job_id} and stage.room.members("free") == []
    assert stage.renewal(task) is Renewal.RENEWED
    assert stage.settle(task).moved is not None and stage.free() == 1


def test_a_run_whose_slot_was_given_away_meanwhile_goes_on_beside_and_has_the_slot_next(stage, worker):
    """The server is at the older run and decides who gets in; what comes of either is stored."""
    stage.register()
    first, second, third = (stage.submit() for _ in range(3))
    task, hold = _begun(stage, worker)
    _forgotten(stage, first)
    passes.sweep(stage.dispatcher)
    other = stage.start("w2")
    assert (other.run.job.id, other.lease.slot) == (second, task.lease.slot)
    worker.heartbeat.beat()
    assert not hold.lost and [stage.renewal(it) for it in (task, other)] == [Renewal.RENEWED] * 2
    stage.settle(other, OutcomeKind.BUSY)
    assert stage.room.taken() == {"gpu-slot0": first}, "no third one is sent there"
    assert stage.settle(task).moved is not None
    stage.later(SECOND)
    passes.sweep(stage.dispatcher)
    assert stage.run_all() == [second, third]
    assert [stage.job(it).crashes for it in (first, second, third)] == [0, 0, 0]


def test_a_lease_that_another_has_by_now_is_lost(stage, worker):
    stage.register()
    stage.submit()
    task, hold = _begun(stage, worker)
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    again = stage.start("w2")
    before = stage.room.dump()
    worker.heartbeat.beat()
    assert hold.lost and stage.room.dump() == before
    assert stage.settle(task).moved is None and stage.renewal(again) is Renewal.RENEWED


def test_two_runs_of_one_job_in_one_worker_hear_each_of_its_own_lease(stage, worker):
    """It was cut off from Redis for as long as a lease lasts, and took the job's next offer itself."""
    stage.register()
    stage.submit()
    _, older = _begun(stage, worker)
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    task, newer = _begun(stage, worker)
    stage.later(LEASE_MS - SECOND)
    worker.heartbeat.beat()
    assert older.lost and not newer.lost
    assert stage.room.expiry_of(task.lease.job_id) == stage.now + LEASE_MS
    worker.heartbeat.stop_all()
    assert older.stop and newer.stop
    worker.heartbeat.remove(older)
    assert worker.heartbeat.watches() == [newer]


def test_while_the_record_is_away_no_lease_is_taken_for_lost(stage, worker, monkeypatch):
    stage.register()
    job_id = stage.submit()
    _, hold = _begun(stage, worker)
    _forgotten(stage, job_id)
    monkeypatch.undo()
    monkeypatch.setattr(lease_checks, "_RETRY_S", 0.001)
    asked = threading.Event()
    left, briefs = iter(range(2)), stage.store.get_statuses
    monkeypatch.setattr(
        stage.store,
        "get_statuses",
        lambda ids: (asked.set(), _away() if next(left, None) is not None else briefs(ids))[1],
    )
    worker.heartbeat.beat()
    assert asked.wait(10) and not hold.lost
    eventually(lambda: stage.room.taken() == {"gpu-slot0": job_id})
    assert not hold.lost


def test_a_worker_that_has_ended_asks_the_record_no_more(stage, worker, monkeypatch):
    stage.register()
    job_id = stage.submit()
    _begun(stage, worker)
    _forgotten(stage, job_id)
    monkeypatch.undo()
    monkeypatch.setattr(stage.store, "get_statuses", _away)
    asked, wait = threading.Event(), worker.database_check._ended.wait
    monkeypatch.setattr(worker.database_check._ended, "wait", lambda _: (asked.set(), wait(20))[1])
    worker.heartbeat.beat()
    assert asked.wait(10), "it asks again in a while"
    asked.clear()
    worker.close()
    eventually(lambda: not worker.database_check._task._is_running)
    assert not asked.is_set()


def test_leases_are_renewed_in_time_though_the_database_is_silent(stage, worker, monkeypatch):
    stage.register(2)
    stage.submit(), stage.submit()
    holds = [_begun(stage, worker)[1] for _ in range(2)]
    monkeypatch.undo()
    asked, silent, waiting = threading.Event(), threading.Event(), set[threading.Thread]()

    def is_silent(_: object) -> None:
        waiting.add(threading.current_thread())
        asked.set()
        silent.wait(5)
        _away()

    monkeypatch.setattr(stage.store, "get_statuses", is_silent)
    worker.heartbeat._was_away = True
    try:
        for _ in range(5):
            stage.later(LEASE_MS - SECOND)
            worker.heartbeat.beat()
        assert asked.wait(10) and threading.current_thread() not in waiting
        assert stage.room.expiry_of(holds[0].lease.job_id) == stage.now + LEASE_MS
        assert passes.reap(stage.dispatcher) == 0
    finally:
        silent.set()


@pytest.mark.parametrize("busy", [False, True])
def test_a_run_without_a_lease_and_without_a_worker_ends_whoever_holds_its_slot(stage, worker, busy):
    stage.register()
    first = stage.submit()
    stage.start("dead")
    _forgotten(stage, first)
    if busy:
        stage.submit()
        other = stage.start("w2")
        assert other.lease.slot == stage.job(first).slot
    assert passes.restore_missed(stage.dispatcher) == 0
    stage.later(restore_leases._GRACE_MS)
    assert [passes.restore_missed(stage.dispatcher) for _ in range(2)] == [1, 0]
    lasts_ms = SETTINGS.renew_every_ms * 9 // 4
    if busy:
        assert stage.renewal(other) is Renewal.RENEWED
    stage.later(lasts_ms - 1)
    assert passes.reap(stage.dispatcher) == 0
    if busy:
        assert stage.renewal(other) is Renewal.RENEWED
    stage.later(1)
    passes.reap(stage.dispatcher)
    job = stage.job(first)
    assert (job.state, job.why, job.crashes) == (State.QUEUED, Reason.LEASE_EXPIRED, 1)
    again = stage.start("w3")
    assert again.run.job.id == first and stage.settle(again).moved is not None
    if busy:
        assert stage.settle(other).moved is not None
    assert stage.room.taken() == {} and stage.free() == 1


def test_a_living_worker_one_of_whose_renewals_is_late_keeps_a_lease_that_was_missed(stage, worker):
    stage.register()
    job_id = stage.submit()
    task = stage.start("w1")
    _forgotten(stage, job_id)
    assert passes.restore_missed(stage.dispatcher) == 0
    stage.later(restore_leases._GRACE_MS)
    assert passes.restore_missed(stage.dispatcher) == 1
    stage.later(2 * SETTINGS.renew_every_ms)
    assert passes.reap(stage.dispatcher) == 0
    assert stage.renewal(task) is Renewal.RENEWED and stage.job(job_id).crashes == 0


def test_a_lease_that_was_missed_lasts_no_longer_than_any_other(stage, worker):
    """Two renewals and a bit may be longer than a lease where workers renew as seldom as they may."""
    stage.dispatcher.settings = SETTINGS.model_copy(update={"renew_every_ms": LEASE_MS // 2 - 1})
    stage.register()
    job_id = stage.submit()
    stage.start("w1")
    _forgotten(stage, job_id)
    passes.restore_missed(stage.dispatcher)
    stage.later(restore_leases._GRACE_MS)
    assert passes.restore_missed(stage.dispatcher) == 1
    assert stage.room.expiry_of(job_id) == stage.now + LEASE_MS


def test_a_run_that_ends_while_its_lease_is_written_again_leaves_none(stage, worker, monkeypatch):
    stage.register()
    first, second = stage.submit(), stage.submit()
    task = stage.start("w1")
    _forgotten(stage, first)
    restore = stage.dispatcher.leases.restore

    def ends_just_before(*args: Any) -> int:
        stage.settle(task)
        return restore(*args)

    monkeypatch.setattr(stage.dispatcher.leases, "restore", ends_just_before)
    passes.restore_missing(stage)
    assert stage.run_all() == [second] and stage.room.taken() == {}


def test_a_run_that_ends_while_its_room_is_rebuilt_leaves_no_lease(stage, worker, monkeypatch):
    stage.register()
    first, second = stage.submit(), stage.submit()
    task = stage.start("w1")
    stage.lose_redis()
    restore, restored = stage.dispatcher.leases.restore, itertools.count(1)

    def ends_just_before(*args: Any) -> int:
        if next(restored) == 1:
            stage.settle(task)
        return restore(*args)

    monkeypatch.setattr(stage.dispatcher.leases, "restore", ends_just_before)
    passes.sweep(stage.dispatcher)
    assert next(restored) > 1 and stage.state(first) is State.COMPLETED
    assert stage.run_all() == [second] and stage.room.taken() == {}


def test_a_run_that_began_while_its_room_was_rebuilt_is_refused_and_offered_again(stage, worker, monkeypatch):
    """Its lease was claimed before Redis was emptied, its start comes after the running jobs were read."""
    stage.register()
    first, second = stage.submit(), stage.submit()
    offer = replace(stage.told.offers.pop(0), owner="w1")
    assert claim_offer(stage.dispatcher.leases, offer, "w1")
    stage.lose_redis()
    read = stage.store.list_running
    begin = iter([lambda: begin_run(stage.dispatcher, offer, "w1")])

    def begins_just_after() -> Any:
        found = read()
        next(begin, lambda: None)()
        return found

    monkeypatch.setattr(stage.store, "list_running", begins_just_after)
    passes.sweep(stage.dispatcher)
    assert stage.room.taken() == {offer.slot: first} and stage.room.waiting() == [second]
    assert stage.store.list_running() == [] and stage.run_all() == [first, second]


def test_a_resumed_run_that_began_while_its_room_was_rebuilt_is_offered_in_its_slot(stage, worker, monkeypatch):
    """As above; its start comes just before the offer that it had claimed is restored."""
    stage.register()
    first, second = stage.submit(), stage.submit()
    assert hand_back(stage.dispatcher, stage.start())
    offer = replace(stage.told.offers.pop(0), owner="w1")
    assert claim_offer(stage.dispatcher.leases, offer, "w1")
    stage.lose_redis()
    restore_offers = stage.dispatcher.leases.restore_offers

    def begins_just_before(*args: Any) -> int:
        begin_run(stage.dispatcher, offer, "w1")
        return restore_offers(*args)

    monkeypatch.setattr(stage.dispatcher.leases, "restore_offers", begins_just_before)
    passes.sweep(stage.dispatcher)
    assert stage.room.taken() == {offer.slot: first} and stage.room.waiting() == [second]
    assert stage.store.list_running() == [] and stage.room.lease_of(first)["owner"] == ""


def test_a_run_that_is_handed_back_while_its_room_is_rebuilt_is_offered_in_its_slot_alone(stage, worker, monkeypatch):
    stage.register(1, server="z")
    job_id = stage.submit()
    task = stage.start("w1")
    stage.register(1, server="a")
    stage.lose_redis()
    restore, times = stage.dispatcher.leases.restore, itertools.count()

    def is_handed_back_just_before(*args: Any) -> int:
        if next(times) == 0:
            assert hand_back(stage.dispatcher, task)
        return restore(*args)

    monkeypatch.setattr(stage.dispatcher.leases, "restore", is_handed_back_just_before)
    passes.sweep(stage.dispatcher)
    assert next(times) > 0
    assert stage.room.taken() == {task.lease.slot: job_id} and stage.room.lease_of(job_id)["owner"] == ""


# -- a resumed run ---------------------------------------------------------------------------------------------


def _resumed(stage: Stage, **changes: Any) -> str:
    """A polled job whose worker has died, and nobody has looked after it for two minutes."""
    stage.register(model_type="async", poll_interval=0.001, max_poll_time=60.0)
    job_id = stage.submit(**changes)
    stage.remote(stage.start("w1"))
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    stage.later(120 * SECOND)
    return job_id


def test_a_resumed_run_is_asked_for_once_before_it_is_given_up(stage, worker, server):
    job_id = _resumed(stage)
    server.answers = [DONE]
    assert run(stage).state is State.COMPLETED
    assert (stage.state(job_id), server.asked) == (State.COMPLETED, ["status"])


def test_a_resumed_run_that_has_not_ended_in_its_time_is_given_up(stage, worker, server):
    job_id = _resumed(stage)
    server.answers = [PENDING]
    run(stage)
    job = stage.job(job_id)
    assert (job.state, job.error_code, server.asked) == (State.DELAYED, "timed_out", ["status", "cancel"])


# -- a polled run ----------------------------------------------------------------------------------------------


def test_a_question_has_its_own_time_however_long_its_run_may_take(stage, worker, server):
    stage.register(model_type="async", poll_interval=0.001, max_poll_time=7200.0)
    stage.submit()
    server.answers = [PENDING, DONE]
    assert run(stage).state is State.COMPLETED and server.asked == ["submit", "status"]


def test_runs_that_began_together_are_not_asked_for_together(stage, worker, server, monkeypatch):
    waits: list[float] = []

    async def wait(_: LeaseWatch, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(LeaseWatch, "sleep", wait)
    stage.register(model_type="async", poll_interval=10.0)
    for _ in range(3):
        stage.submit()
        server.answers = [PENDING, PENDING, DONE]
        assert run(stage).state is State.COMPLETED
    firsts, others = waits[::2], waits[1::2]
    assert len(set(firsts)) == 3 and all(0 <= it <= 10 for it in firsts)
    assert others == [10.0] * 3


def test_a_run_that_is_polled_does_not_keep_its_payload(stage, worker, server, monkeypatch):
    class Payload(dict[str, Any]):
        """One that can be referred to weakly."""

    read: list[weakref.ref[Payload]] = []
    kept: list[Payload | None] = []

    def loads(text: str) -> Payload:
        payload = Payload(json_text.loads(text))
        read.append(weakref.ref(payload))
        return payload

    async def status(*_: Any) -> Outcome:
        kept.extend(it() for it in read)
        return DONE

    monkeypatch.setattr(run_calls, "json_text", SimpleNamespace(loads=loads))
    monkeypatch.setattr(run_calls, "orjson", SimpleNamespace(Fragment=loads))
    monkeypatch.setattr(server, "status", status)
    stage.register(model_type="async", poll_interval=0.001)
    stage.submit()
    server.answers = [PENDING]
    run(stage)
    assert kept == [None]


@pytest.mark.parametrize("late_s", [0, 7200], ids=["in its time", "beyond its time"])
def test_a_cancel_that_is_heard_while_the_server_is_asked_does_not_wait_for_the_interval(
    stage, worker, server, monkeypatch, late_s
):
    waits: list[float] = []

    async def wait(_: LeaseWatch, seconds: float) -> None:
        waits.append(seconds)
        await asyncio.sleep(0)

    def canceled_meanwhile(hold: LeaseWatch) -> None:
        server.during = hold.request_cancel
        stage.later(late_s * SECOND)

    monkeypatch.setattr(LeaseWatch, "sleep", wait)
    monkeypatch.setattr(server_call, "_CANCEL_WAIT_S", 0.0)
    server.answers = [PENDING] * 3
    found = _watched(stage, server, canceled_meanwhile, model_type="async", poll_interval=3600.0, max_poll_time=7200.0)
    assert found.kind is OutcomeKind.CANCELED
    assert set(waits) == {server_call._HEALTH_PERIOD_S}


# -- a stale worker --------------------------------------------------------------------------------------------


@contextmanager
def _told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """What Celery's clients are told, as (how, job)."""
    told: list[tuple[str, str]] = []
    for how in ("mark_as_failure", "mark_as_done", "mark_as_revoked", "mark_as_retry"):
        monkeypatch.setattr(infer.backend, how, lambda job, *_, how=how, **__: told.append((how, job)), raising=False)
    yield told


@pytest.mark.parametrize("outcome", [FAULT, DONE, Outcome(OutcomeKind.BUSY), Outcome(OutcomeKind.FAILED, code="bad")])
def test_a_stale_worker_says_nothing_to_anybody(stage, worker, server, monkeypatch, outcome):
    """It stood still under the call: the lease expired, and another worker has the job now."""
    stage.register(2)
    job_id = stage.submit(envelope="{}", source="task")
    taken: list[ActiveRun] = []

    def stand_still() -> None:
        stage.later(LEASE_MS + SECOND)
        assert passes.reap(stage.dispatcher) == 1
        taken.append(stage.start("w2"))

    server.during, server.answers = stand_still, [outcome]
    with _told(monkeypatch) as told:
        run(stage)
    assert told == []
    assert (stage.state(job_id), stage.job(job_id).attempt) == (State.RUNNING, 2)
    assert stage.room.taken() == {taken[0].lease.slot: job_id} and stage.told.ends == []


def test_the_result_that_a_server_pushes_stands_though_its_worker_receives_a_fault(stage, worker, server):
    stage.register()
    job_id = stage.submit()
    server.during = lambda: store_end(stage.store, job_id, 1, Reason.FINISHED, stage.now, result='{"by":"push"}')
    server.answers = [FAULT]
    assert run(stage).result == '{"by":"push"}'


@pytest.mark.parametrize(
    ("outcome", "retries", "state"),
    [
        (FAULT, 1, State.DELAYED),
        (FAULT, 0, State.DEAD),
        (Outcome(OutcomeKind.BUSY), 1, State.QUEUED),
        (Outcome(OutcomeKind.FAILED), 1, State.FAILED),
    ],
)
def test_each_outcome_leads_to_its_state(stage, worker, server, outcome, retries, state):
    stage.register(max_retries=retries)
    stage.submit()
    server.answers = [outcome]
    assert run(stage).state is state


@pytest.mark.parametrize(
    "outcome", [FAULT, Outcome(OutcomeKind.BUSY), Outcome(OutcomeKind.UNREACHABLE), Outcome(OutcomeKind.CANCELED)]
)
def test_a_run_that_shall_be_canceled_and_goes_wrong_is_canceled(stage, worker, server, outcome):
    stage.register()
    job_id = stage.submit()
    server.during = lambda: stage.dispatcher.cancel(job_id)
    server.answers = [outcome]
    if outcome.kind is OutcomeKind.CANCELED:
        server.during = lambda: (stage.dispatcher.cancel(job_id), worker.heartbeat.beat())
    assert run(stage).state is State.CANCELED
    assert [told[:2] for told in stage.told.ends] == [(job_id, State.CANCELED)]


# -- nothing is sent that nobody wants -------------------------------------------------------------------------


def _watched(stage: Stage, server: FakeServer, flag: Callable[[LeaseWatch], None], **config: Any) -> Any:
    """What comes of a run; `flag` may raise one of its lease before its request is sent."""
    stage.register(**config)
    stage.submit()
    active = stage.start("w1")
    watch = LeaseWatch(active.lease)
    flag(watch)

    async def outcome() -> Any:
        config = stage.dispatcher.catalog.resolve("zimg").config
        return await make_server_call(active, watch, config, server).run()

    return asyncio.run(outcome())


@pytest.mark.parametrize(("why", "left"), [("lost", StopReason.UNSENT), ("stop", StopReason.STOPPED)])
def test_a_run_that_is_over_before_its_request_was_sent_does_not_send_it(stage, server, why, left):
    assert _watched(stage, server, lambda hold: hold.end(why)) is left
    assert server.asked == ["cut"]


def test_a_run_that_is_canceled_before_its_request_was_sent_does_not_send_it(stage, server):
    assert _watched(stage, server, lambda hold: hold.request_cancel()).kind is OutcomeKind.CANCELED
    assert "submit" not in server.asked


def test_a_job_whose_deadline_passes_before_it_is_sent_never_reaches_a_server(stage, worker, server) -> None:
    stage.register()
    job_id = stage.submit(ttl_s=1)
    stage.later(SECOND)
    job = run(stage)
    assert (job.state, job.why, job.error_code) == (State.EXPIRED, Reason.DEADLINE_PASSED, "deadline_passed")
    assert server.asked == [] and "before it was sent" in (stage.job(job_id).error_message or "")


def test_a_deadline_is_the_reason_of_its_end_whatever_the_last_exchange_was(stage, worker, server) -> None:
    stage.register()
    stage.submit(ttl_s=1)
    server.answers = [Outcome(OutcomeKind.UNREACHABLE, code="connect_failed", message="no connection")]
    server.during = lambda: stage.later(SECOND)
    job = run(stage)
    assert (job.state, job.error_code) == (State.EXPIRED, "deadline_passed")
    assert "no connection" in (job.error_message or "")


def test_the_server_of_a_job_whose_offer_came_by_a_message_is_told_whether_its_model_changes(
    stage, worker, server, monkeypatch
):
    stage.register()
    server.description = Description.model_validate({"submit": {"path": "/run?swap={{run/swap}}"}})
    told = []

    async def submit(call: Call) -> Outcome:
        told.append(call.swap)
        return DONE

    monkeypatch.setattr(server, "submit", submit)
    for _ in range(2):
        stage.submit()
        offer = stage.told.offers.pop(0)
        message = offer_messages.build_message(offer, 0)
        worker.executor.run_open_offer(offer_messages.read_offer(offer.job_id, [offer.model], message.headers))
        assert worker.worker_loop.wait_until_idle(20)
    assert told == [True, False]
