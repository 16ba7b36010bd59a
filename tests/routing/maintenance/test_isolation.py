"""Maintenance isolates its objects: a failure or a delay of one fleet, server or job blocks no other."""

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import pytest
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ConnectionError, ResponseError, TimeoutError
from sqlalchemy import event

from routing.dispatch.outcome import OutcomeKind
from routing.maintenance import deadlines, quarantined_slots
from routing.maintenance.server_report import ServerReport
from routing.queue import queues
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import Reason, State
from slotkeeper.redis.keys import Keys
from slotkeeper.redis.scripts import Scripts
from slotkeeper.redis.signatures import Command
from slotkeeper.registry.identity import LOCAL_IDENTITY
from tasks import maintenance
from tests.support import passes
from tests.support.builders import at_once
from tests.support.ends import free, store_end
from tests.support.harness import LEASE_MS, OFFER_MS, Harness

# -- one fleet's error is no other's ---------------------------------------------------------------------------


@pytest.fixture
def broken(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The keys of the fleet "flux", the first of two, make a script fail."""
    harness.register(model="flux", server="spoiled")
    harness.register()

    def spoil(key: str) -> None:
        harness.redis.delete(Keys("test").fleet_key("flux", key))
        harness.redis.set(Keys("test").fleet_key("flux", key), "of another kind")

    return spoil


@pytest.mark.parametrize("key", ["meta", "leases", "cooling", "free", "slots"])
def test_a_fleet_with_a_broken_queue_blocks_no_other_fleet(harness, broken, key) -> None:
    broken(key)
    harness.set_state("paused")
    job_id = harness.submit()
    harness.catalog.set_server_state("gpu", "online")
    passes.sweep(harness.dispatcher)
    assert [offer.job_id for offer in harness.notifications.offers] == [job_id]
    harness.start()
    harness.later(LEASE_MS)
    assert passes.reap(harness.dispatcher) == 1
    passes.apply_reports(harness.dispatcher, {"spoiled": ServerReport(True), "gpu": ServerReport(True, 0)})
    lost = harness.submit()
    harness.dispatcher.queues.withdraw("zimg", [harness.job(lost).queued])
    assert passes.reconcile(harness.dispatcher) == 1


def test_a_job_that_cannot_be_reaped_does_not_block_other_jobs(harness, monkeypatch) -> None:
    harness.register(3)
    ids = [harness.submit() for _ in range(3)]
    for _ in ids:
        harness.start()
    harness.later(LEASE_MS)
    get = harness.store.get

    def refuse(job_id: str) -> Any:
        if job_id == ids[0]:
            raise ValueError("nobody can read this one")
        return get(job_id)

    monkeypatch.setattr(harness.store, "get", refuse)
    assert passes.reap(harness.dispatcher) == 2


def test_a_broken_queue_affects_one_fleet_and_a_silent_redis_affects_every_fleet(harness) -> None:
    queues_ = harness.dispatcher.queues
    queues_.mark_unavailable("flux", ResponseError("WRONGTYPE"))
    assert queues_.is_unavailable("flux") and not queues_.is_unavailable("zimg") and not queues_.is_unavailable()
    queues_.mark_unavailable("flux", TimeoutError("Timeout reading from socket"))
    assert queues_.is_unavailable("zimg") and queues_.is_unavailable()


# -- the sweep -------------------------------------------------------------------------------------------------


def _statements(harness: Harness, act: Callable[[], object]) -> list[str]:
    statements: list[str] = []

    def listen(_: object, __: object, statement: str, *___: object) -> None:
        statements.append(statement)

    event.listen(harness.database.engine, "before_cursor_execute", listen)
    try:
        act()
    finally:
        event.remove(harness.database.engine, "before_cursor_execute", listen)
    return statements


def test_a_sweep_reads_nothing_for_an_idle_fleet_alone(harness, monkeypatch) -> None:
    monkeypatch.setattr("tests.support.harness.FLEETS", [f"idle{n}" for n in range(20)])
    harness.later(0)
    for n in range(20):
        harness.register(model=f"idle{n}", server=f"s{n}")
    for _ in range(5):
        harness.submit("idle0")
    passes.sweep(harness.dispatcher)
    alone: list[str] = []
    run = Scripts.run
    monkeypatch.setattr(Scripts, "run", lambda self, command: alone.append(command.target.script) or run(self, command))
    statements = _statements(harness, lambda: passes.sweep(harness.dispatcher))
    assert len([statement for statement in statements if "FROM jobs" in statement]) <= 3, "not one for each fleet"
    assert set(alone) <= {"offer"} and len(alone) <= 1, "only the fleet with waiting jobs gets a separate call"


@pytest.fixture
def register_idle_fleets(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Register this number of models, each with its own server and its own fleet."""

    def register(count: int) -> None:
        names = [f"idle{n}" for n in range(count)]
        monkeypatch.setattr("tests.support.harness.FLEETS", names)
        harness.later(0)
        for name in names:
            harness.catalog.register(name, f"s-{name}", "http://s:1/run", 1, harness.now)
        harness.dispatcher.catalog.refresh()

    return register


def _round_trips(act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often Redis is asked and waited for."""
    made: list[str] = []
    with monkeypatch.context() as patch:
        for kind, name in ((Redis, "execute_command"), (Pipeline, "execute")):
            method = getattr(kind, name)
            patch.setattr(kind, name, lambda *a, _m=method, **more: made.append("") or _m(*a, **more))
        act()
    return len(made)


def _reports(harness: Harness) -> dict[str, ServerReport]:
    return {name: ServerReport(True, 0, frozenset()) for name in harness.dispatcher.catalog.get().servers}


_UPKEEPS: dict[str, Callable[[Harness], object]] = {
    "sweep": lambda harness: passes.sweep(harness.dispatcher),
    "reap": lambda harness: passes.reap(harness.dispatcher),
    "keep": lambda harness: quarantined_slots.sync_leases(harness.dispatcher),
    "restore missed": lambda harness: passes.restore_missed(harness.dispatcher),
    "urgent": lambda harness: passes.servers_to_check_now(harness.dispatcher),
    "health": lambda harness: passes.apply_health(harness.dispatcher, _reports(harness)),
    "reports": lambda harness: passes.apply_reports(harness.dispatcher, _reports(harness)),
    "check_invariants": lambda harness: passes.find_violations(harness.dispatcher, _reports(harness)),
    "reconcile": lambda harness: passes.reconcile(harness.dispatcher),
}


@pytest.mark.parametrize("act", _UPKEEPS)
def test_idle_fleets_cost_no_additional_round_trip(harness, register_idle_fleets, monkeypatch, act) -> None:
    for name in ("_COUNTING_SHARE", "_READ_S", "_SYNC_EVERY_S"):  # What depends on how fast this machine is.
        monkeypatch.setattr(f"routing.maintenance.sweep.{name}", 1e9)
    needed = []
    for count in (2, 40):
        register_idle_fleets(count)
        _UPKEEPS[act](harness)  # Redis gets what is new.
        needed.append(_round_trips(lambda: _UPKEEPS[act](harness), monkeypatch))
    assert needed[0] == needed[1] > 0


def test_many_new_queues_are_opened_in_a_few_round_trips(harness, register_idle_fleets, monkeypatch) -> None:
    register_idle_fleets(60)
    harness.submit("idle7")
    harness.lose_redis()
    harness.notifications.offers.clear()
    assert _round_trips(lambda: passes.sweep(harness.dispatcher), monkeypatch) < 30
    counts = harness.dispatcher.fleets.counts([f"idle{n}" for n in range(60)])
    assert all(queue.is_open for queue in counts.values())
    assert len(harness.offered()) == 1


def test_the_leases_of_idle_fleets_are_not_read(harness, register_idle_fleets, monkeypatch) -> None:
    register_idle_fleets(20)
    passes.sweep(harness.dispatcher)
    harness.submit("idle3")
    asked: list[Command[Any]] = []
    run_each = Scripts.run_each

    def noted(self: Scripts, commands: Mapping[str, Command[Any]]) -> Any:
        asked.extend(commands.values())
        return run_each(self, commands)

    monkeypatch.setattr(Scripts, "run_each", noted)
    leases = harness.dispatcher.leases.list_all([f"idle{n}" for n in range(20)])
    assert [re.findall("{(.*)}", command.target.keys[0]) for command in asked] == [["idle3"]]
    assert {fleet: len(held) for fleet, held in leases.items() if held} == {"idle3": 1} and len(leases) == 20


def test_a_job_that_another_process_accepted_without_redis_is_swept(harness) -> None:
    harness.register()
    passes.sweep(harness.dispatcher)
    receipt = harness.cut_off().submit([harness.a()], LOCAL_IDENTITY)[0]
    passes.sweep(harness.dispatcher)
    assert harness.offered() == [receipt.accepted.id]


def test_a_job_revived_by_a_process_without_redis_is_swept(harness) -> None:
    harness.register(max_retries=0)
    job_id = harness.submit()
    harness.settle(harness.start(), OutcomeKind.RETRY)
    assert harness.state(job_id) is State.DEAD
    passes.sweep(harness.dispatcher)
    harness.cut_off().revive(job_id)
    passes.sweep(harness.dispatcher)
    assert harness.offered() == [job_id]


def test_a_job_whose_promoter_died_is_swept(harness) -> None:
    harness.register()
    job_id = harness.submit(delay_s=1)
    passes.sweep(harness.dispatcher)
    harness.later(1_000)
    harness.store.promote_due(harness.now)
    passes.sweep(harness.dispatcher)
    assert harness.offered() == [job_id]


def test_a_job_whose_event_becomes_visible_late_is_still_swept(harness, monkeypatch) -> None:
    """On PostgreSQL a transaction may commit after one that began later."""
    monkeypatch.setattr("routing.maintenance.sweep._VISIBLE_WITHIN_S", {"sqlite": 10.0, "postgresql": 10.0})
    harness.register()
    harness.submit()
    passes.sweep(harness.dispatcher)
    _renumber(harness, "id = id + 1000000 WHERE actor IS NULL")
    passes.sweep(harness.dispatcher)
    late = harness.cut_off().submit([harness.a()], LOCAL_IDENTITY)[0].accepted.id
    _renumber(harness, f"id = (SELECT max(id) - 500000 FROM events) WHERE job_id = '{late}'")
    passes.sweep(harness.dispatcher)
    assert harness.queue.waiting() == [late]


def _renumber(harness: Harness, change: str) -> None:
    with harness.database.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE events SET {change}")


def test_the_sweep_finds_a_job_that_is_missing_from_its_queue_by_counting(harness, monkeypatch) -> None:
    monkeypatch.setattr("routing.maintenance.sweep._COUNTING_SHARE", 1e9)
    harness.register()
    first, lost, last = (harness.submit() for _ in range(3))
    passes.sweep(harness.dispatcher)
    harness.dispatcher.queues.withdraw("zimg", [harness.job(lost).queued])
    for _ in range(2):
        passes.sweep(harness.dispatcher)
    assert harness.run_all() == [first, lost, last]


def test_a_queue_that_only_seemed_to_miss_jobs_is_not_read_again(harness, monkeypatch) -> None:
    monkeypatch.setattr("routing.maintenance.sweep._COUNTING_SHARE", 1e9)
    monkeypatch.setattr("routing.maintenance.sweep.short_queues", lambda *_: {"zimg"})
    harness.register()
    harness.submit()
    passes.sweep(harness.dispatcher)
    read: list[object] = []
    queued = harness.store.list_queued
    monkeypatch.setattr(harness.store, "list_queued", lambda models, *a: read.append(models) or queued(models, *a))
    for _ in range(10):
        passes.sweep(harness.dispatcher)
    assert read.count(["zimg"]) == 2, "one page of jobs, and one empty page"


def test_slot_2_a_thousand_slots_fill_in_one_sweep(harness) -> None:
    harness.register(1_000)
    harness.set_state("paused")
    for _ in range(4):  # A submit of all at once may take longer than a request does on a busy machine.
        harness.submit_all([harness.a() for _ in range(300)])
    harness.catalog.set_server_state("gpu", "online")
    passes.sweep(harness.dispatcher)
    assert len(harness.offered()) == 1_000


def test_slot_2_a_batch_fills_all_slots_at_once(harness) -> None:
    harness.register(300)
    harness.submit_all([harness.a() for _ in range(400)])
    assert len(harness.offered()) == 300


def test_the_rebuild_of_a_large_queue_does_not_delay_the_sweeps_of_other_fleets(harness, monkeypatch) -> None:
    monkeypatch.setattr("routing.maintenance.sweep._READ_S", 0.0)
    monkeypatch.setattr("routing.maintenance.rebuild.JOBS_AT_ONCE", 10)
    harness.register(model="flux", server="other")
    harness.register()
    ids = harness.submit_all([harness.a("flux") for _ in range(25)])
    harness.lose_redis()
    harness.notifications.offers.clear()
    other = harness.cut_off().submit([harness.a()], LOCAL_IDENTITY)[0].accepted.id
    for _ in range(20):
        passes.sweep(harness.dispatcher)
        if other in harness.offered():
            break
    else:
        pytest.fail("the small fleet waits for the large one")
    for _ in range(20):
        passes.sweep(harness.dispatcher)
    assert harness.dispatcher.fleets.counts(["flux"])["flux"].is_open
    assert harness.dispatcher.fleets.counts(["flux"])["flux"].waiting == {"flux": len(ids) - 1}


def test_a_rebuild_that_fails_at_its_end_is_made_again_by_the_next_sweep(harness, monkeypatch) -> None:
    harness.register()
    job_id = harness.submit()
    harness.lose_redis()
    harness.notifications.offers.clear()
    with monkeypatch.context() as away, pytest.raises(ConnectionError):
        away.setattr(harness.dispatcher.fleets, "open", _redis_is_away)
        passes.sweep(harness.dispatcher)
    passes.sweep(harness.dispatcher)
    assert harness.dispatcher.fleets.counts(["zimg"])["zimg"].is_open and harness.offered() == [job_id]


def _redis_is_away(*_: Any) -> NoReturn:
    raise ConnectionError("away")


# -- what is gone ----------------------------------------------------------------------------------------------


def _keys_of(harness: Harness, fleet: str) -> list[bytes]:
    return harness.redis.keys(Keys("test").fleet_pattern(fleet))


def _forget(harness: Harness, model: str) -> None:
    with harness.database.engine.begin() as connection:
        for table, column in (("endpoints", "model"), ("servers", "fleet"), ("models", "name")):
            connection.exec_driver_sql(f"DELETE FROM {table} WHERE {column} = '{model}'")
        connection.exec_driver_sql("UPDATE counters SET value = value + 1 WHERE name = 'catalog_version'")


def test_the_keys_of_a_removed_fleet_are_deleted(harness) -> None:
    harness.register(model="flux", server="other")
    harness.register()
    harness.submit("flux")
    harness.settle(harness.start(), OutcomeKind.DONE)
    job_id = harness.submit()
    passes.sweep(harness.dispatcher)
    assert _keys_of(harness, "flux")
    _forget(harness, "flux")
    passes.reconcile(harness.dispatcher)
    assert _keys_of(harness, "flux") == [] and harness.run_all() == [job_id]
    harness.register(model="flux", server="other")
    assert harness.submit("flux") in harness.offered(), "the fleet may be added again"


def test_the_keys_of_a_removed_fleet_are_kept_while_it_holds_a_lease(harness) -> None:
    harness.register(model="flux", server="other")
    harness.submit("flux")
    harness.start()
    passes.sweep(harness.dispatcher)
    _forget(harness, "flux")
    passes.reconcile(harness.dispatcher)
    assert _keys_of(harness, "flux")


# -- leases ------------------------------------------------------------------------------------------------------


def test_the_leases_of_a_worker_that_died_are_reaped_some_at_a_time(harness, monkeypatch) -> None:
    harness.register(3)
    for _ in range(3):
        harness.submit()
        harness.start()
    harness.later(LEASE_MS)
    together, settle = threading.Barrier(3, timeout=20), harness.store.settle_write

    def settled(*args: Any, **more: Any) -> Any:
        together.wait()  # One after another would wait in vain.
        return settle(*args, **more)

    monkeypatch.setattr(harness.store, "settle_write", settled)
    assert passes.reap(harness.dispatcher) == 3


# -- runs ------------------------------------------------------------------------------------------------------


def test_a_reaper_that_the_database_delays_leaves_no_job_outside_the_queue(harness, monkeypatch) -> None:
    harness.register()
    job_id = harness.submit()
    harness.start()
    harness.later(LEASE_MS)
    other, settle = harness.a_dispatcher(harness.redis), harness.store.settle_write

    def slow(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(harness.store, "settle_write", settle)
        write = settle(*args, **more)
        assert harness.database.commit(write)  # the commit succeeds, its response is late
        harness.later(OFFER_MS)
        assert passes.reap(other) == 1
        return write

    monkeypatch.setattr(harness.store, "settle_write", slow)
    passes.reap(harness.dispatcher)
    harness.later(OFFER_MS)
    passes.reap(harness.dispatcher)
    assert job_id in harness.offered()
    assert harness.job(job_id).crashes == 1


def test_a_job_that_is_queued_again_before_its_slot_is_released_is_offered_after_the_release(harness) -> None:
    harness.register()
    job_id = harness.submit()
    task = harness.start()
    moved = store_end(harness.store, job_id, task.run.attempt, Reason.SERVER_BUSY, harness.now)
    harness.dispatcher.enqueue([moved.job])  # its lease is not released yet
    assert harness.offered() == []
    free(harness.dispatcher, task.lease, return_to_lane=False)
    assert harness.offered() == [job_id]


# -- time ------------------------------------------------------------------------------------------------------


def test_many_expired_deadlines_are_processed_in_chunks(harness, monkeypatch) -> None:
    monkeypatch.setattr("routing.maintenance.deadlines._CHUNK", 10)
    harness.register()
    ids = harness.submit_all([harness.a(ttl_s=1) for _ in range(35)])
    harness.later(1_000)
    turns = []
    while done := deadlines.expire_deadlines(harness.dispatcher, within_s=0):
        turns.append(done)
    assert turns == [10, 10, 10, 5]
    assert {harness.state(job_id) for job_id in ids} == {State.EXPIRED}
    assert not harness.queue.waiting()


def test_a_due_job_waits_for_at_most_one_batch_of_expired_deadlines(harness, monkeypatch) -> None:
    monkeypatch.setattr("routing.maintenance.deadlines._CHUNK", 10)
    monkeypatch.setattr(maintenance, "_KEEP_TIME_LIMIT_S", 60.0)
    passes.run_tasks_with(monkeypatch, harness.dispatcher)
    harness.register()
    harness.submit_all([harness.a(ttl_s=1) for _ in range(35)])
    harness.later(1_000)
    turns: list[tuple[str, int]] = []
    for name in ("promote_due_jobs", "expire_deadlines"):
        act = getattr(deadlines, name)
        monkeypatch.setattr(deadlines, name, lambda *a, name=name, act=act: turns.append((name, n := act(*a))) or n)
    maintenance.keep_time()
    assert turns[:4] == [("promote_due_jobs", 0), ("expire_deadlines", 10)] * 2


def test_a_batch_of_deadlines_is_one_statement_and_one_call_of_redis(harness, monkeypatch) -> None:
    harness.register()
    harness.submit_all([harness.a(ttl_s=1) for _ in range(50)])
    harness.later(1_000)
    single: list[str] = []
    run = Scripts.run
    monkeypatch.setattr(Scripts, "run", lambda self, name, *args: single.append(name) or run(self, name, *args))
    statements = _statements(harness, lambda: deadlines.expire_deadlines(harness.dispatcher))
    assert ledger.read(harness.store.database).by_state[State.EXPIRED] == 50
    assert (
        "withdraw" not in single
        and len([statement for statement in statements if statement.startswith("UPDATE jobs")]) == 1
    )


# -- the servers -----------------------------------------------------------------------------------------------


def test_a_delayed_report_occupies_no_slot_for_a_job_that_has_ended_since(harness) -> None:
    harness.register()
    job_id = harness.submit()
    task = harness.start()
    report = ServerReport(True, 1, frozenset({job_id}), asked_ms=harness.now)
    harness.settle(task)
    harness.later(7_000)
    passes.apply_reports(harness.dispatcher, {"gpu": report})
    assert harness.free() == 1


def test_a_report_requested_before_a_run_started_does_not_make_the_run_stale(harness) -> None:
    harness.register()
    report = ServerReport(True, 0, frozenset(), asked_ms=harness.now)
    harness.submit()
    harness.start()
    harness.later(6_000)
    assert passes.find_stale_runs(harness.dispatcher, {"gpu": report}) == []


def test_while_workers_could_not_renew_silence_proves_nothing(harness) -> None:
    harness.register()
    job_id = harness.submit()
    harness.start()
    harness.later(6_000)
    report = {"gpu": ServerReport(True, 0, frozenset())}
    assert passes.apply_reports(harness.dispatcher, report, may_reap=False) == 0
    assert harness.state(job_id) is State.RUNNING
    assert passes.apply_reports(harness.dispatcher, report) == 1


def test_the_servers_of_a_fleet_are_checked_with_few_redis_calls(harness, monkeypatch) -> None:
    for n in range(30):
        harness.catalog.register("zimg", f"s{n}", f"http://s{n}:1/run", 1, harness.now)
    harness.register()
    calls: list[str] = []
    run = Scripts.run
    monkeypatch.setattr(Scripts, "run", lambda self, name, *args: calls.append(name) or run(self, name, *args))
    reports = {f"s{n}": ServerReport(True, 0, frozenset()) for n in range(30)}
    passes.apply_health(harness.dispatcher, reports)
    passes.apply_reports(harness.dispatcher, reports)
    passes.servers_to_check_now(harness.dispatcher)
    assert len(calls) <= 3


def test_two_processes_that_sweep_at_once_lose_no_job_and_run_none_twice(harness) -> None:
    harness.register(2)
    ids = [harness.submit() for _ in range(6)]
    others = [harness.dispatcher, harness.a_dispatcher(harness.redis)]
    at_once(*[lambda dispatcher=dispatcher: passes.sweep(dispatcher) for dispatcher in others * 2])
    assert sorted(harness.run_all()) == sorted(ids)
    assert queues.Queues is type(harness.dispatcher.queues)
