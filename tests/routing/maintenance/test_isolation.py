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
from tests.support.stage import LEASE_MS, OFFER_MS, Stage

# -- one fleet's error is no other's ---------------------------------------------------------------------------


@pytest.fixture
def broken(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The keys of the fleet "flux", the first of two, make a script fail."""
    stage.register(model="flux", server="spoiled")
    stage.register()

    def spoil(key: str) -> None:
        stage.redis.delete(Keys("test").fleet_key("flux", key))
        stage.redis.set(Keys("test").fleet_key("flux", key), "of another kind")

    return spoil


@pytest.mark.parametrize("key", ["meta", "leases", "cooling", "free", "slots"])
def test_a_fleet_with_a_broken_queue_blocks_no_other_fleet(stage, broken, key) -> None:
    broken(key)
    stage.set_state("paused")
    job_id = stage.submit()
    stage.catalog.set_server_state("gpu", "online")
    passes.sweep(stage.dispatcher)
    assert [offer.job_id for offer in stage.told.offers] == [job_id]
    stage.start()
    stage.later(LEASE_MS)
    assert passes.reap(stage.dispatcher) == 1
    passes.apply_reports(stage.dispatcher, {"spoiled": ServerReport(True), "gpu": ServerReport(True, 0)})
    lost = stage.submit()
    stage.dispatcher.queues.withdraw("zimg", [stage.job(lost).queued])
    assert passes.reconcile(stage.dispatcher) == 1


def test_a_job_that_cannot_be_reaped_holds_up_no_other(stage, monkeypatch) -> None:
    stage.register(3)
    ids = [stage.submit() for _ in range(3)]
    for _ in ids:
        stage.start()
    stage.later(LEASE_MS)
    get = stage.store.get

    def refuse(job_id: str) -> Any:
        if job_id == ids[0]:
            raise ValueError("nobody can read this one")
        return get(job_id)

    monkeypatch.setattr(stage.store, "get", refuse)
    assert passes.reap(stage.dispatcher) == 2


def test_a_room_at_fault_is_its_own_and_a_redis_that_does_not_answer_is_everybodys(stage) -> None:
    queues_ = stage.dispatcher.queues
    queues_.mark_unavailable("flux", ResponseError("WRONGTYPE"))
    assert queues_.is_unavailable("flux") and not queues_.is_unavailable("zimg") and not queues_.is_unavailable()
    queues_.mark_unavailable("flux", TimeoutError("Timeout reading from socket"))
    assert queues_.is_unavailable("zimg") and queues_.is_unavailable()


# -- the sweep -------------------------------------------------------------------------------------------------


def _statements(stage: Stage, act: Callable[[], object]) -> list[str]:
    statements: list[str] = []

    def listen(_: object, __: object, statement: str, *___: object) -> None:
        statements.append(statement)

    event.listen(stage.database.engine, "before_cursor_execute", listen)
    try:
        act()
    finally:
        event.remove(stage.database.engine, "before_cursor_execute", listen)
    return statements


def test_a_sweep_reads_nothing_for_an_idle_fleet_alone(stage, monkeypatch) -> None:
    monkeypatch.setattr("tests.support.stage.FLEETS", [f"idle{n}" for n in range(20)])
    stage.later(0)
    for n in range(20):
        stage.register(model=f"idle{n}", server=f"s{n}")
    for _ in range(5):
        stage.submit("idle0")
    passes.sweep(stage.dispatcher)
    alone: list[str] = []
    run = Scripts.run
    monkeypatch.setattr(Scripts, "run", lambda self, command: alone.append(command.target.script) or run(self, command))
    statements = _statements(stage, lambda: passes.sweep(stage.dispatcher))
    assert len([statement for statement in statements if "FROM jobs" in statement]) <= 3, "not one for each fleet"
    assert set(alone) <= {"offer"} and len(alone) <= 1, "only the fleet with waiting jobs gets a separate call"


@pytest.fixture
def register_idle_fleets(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Register this number of models, each with its own server and its own fleet."""

    def register(count: int) -> None:
        names = [f"idle{n}" for n in range(count)]
        monkeypatch.setattr("tests.support.stage.FLEETS", names)
        stage.later(0)
        for name in names:
            stage.catalog.register(name, f"s-{name}", "http://s:1/run", 1, stage.now)
        stage.dispatcher.catalog.refresh()

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


def _reports(stage: Stage) -> dict[str, ServerReport]:
    return {name: ServerReport(True, 0, frozenset()) for name in stage.dispatcher.catalog.get().servers}


_UPKEEPS: dict[str, Callable[[Stage], object]] = {
    "sweep": lambda stage: passes.sweep(stage.dispatcher),
    "reap": lambda stage: passes.reap(stage.dispatcher),
    "keep": lambda stage: quarantined_slots.sync_leases(stage.dispatcher),
    "restore missed": lambda stage: passes.restore_missed(stage.dispatcher),
    "urgent": lambda stage: passes.servers_to_check_now(stage.dispatcher),
    "health": lambda stage: passes.apply_health(stage.dispatcher, _reports(stage)),
    "reports": lambda stage: passes.apply_reports(stage.dispatcher, _reports(stage)),
    "check_invariants": lambda stage: passes.find_violations(stage.dispatcher, _reports(stage)),
    "reconcile": lambda stage: passes.reconcile(stage.dispatcher),
}


@pytest.mark.parametrize("act", _UPKEEPS)
def test_idle_fleets_cost_no_additional_round_trip(stage, register_idle_fleets, monkeypatch, act) -> None:
    for name in ("_COUNTING_SHARE", "_READ_S", "_SYNC_EVERY_S"):  # What depends on how fast this machine is.
        monkeypatch.setattr(f"routing.maintenance.sweep.{name}", 1e9)
    needed = []
    for count in (2, 40):
        register_idle_fleets(count)
        _UPKEEPS[act](stage)  # Redis gets what is new.
        needed.append(_round_trips(lambda: _UPKEEPS[act](stage), monkeypatch))
    assert needed[0] == needed[1] > 0


def test_many_new_queues_are_opened_in_a_few_round_trips(stage, register_idle_fleets, monkeypatch) -> None:
    register_idle_fleets(60)
    stage.submit("idle7")
    stage.lose_redis()
    stage.told.offers.clear()
    assert _round_trips(lambda: passes.sweep(stage.dispatcher), monkeypatch) < 30
    rooms = stage.dispatcher.fleets.counts([f"idle{n}" for n in range(60)])
    assert all(room.is_open for room in rooms.values())
    assert len(stage.offered()) == 1


def test_the_leases_of_idle_fleets_are_not_read(stage, register_idle_fleets, monkeypatch) -> None:
    register_idle_fleets(20)
    passes.sweep(stage.dispatcher)
    stage.submit("idle3")
    asked: list[Command[Any]] = []
    run_each = Scripts.run_each

    def noted(self: Scripts, commands: Mapping[str, Command[Any]]) -> Any:
        asked.extend(commands.values())
        return run_each(self, commands)

    monkeypatch.setattr(Scripts, "run_each", noted)
    leases = stage.dispatcher.leases.list_all([f"idle{n}" for n in range(20)])
    assert [re.findall("{(.*)}", command.target.keys[0]) for command in asked] == [["idle3"]]
    assert {fleet: len(held) for fleet, held in leases.items() if held} == {"idle3": 1} and len(leases) == 20


def test_what_another_process_queued_while_it_did_not_reach_redis_is_swept(stage) -> None:
    stage.register()
    passes.sweep(stage.dispatcher)
    receipt = stage.cut_off().submit([stage.a()], LOCAL_IDENTITY)[0]
    passes.sweep(stage.dispatcher)
    assert stage.offered() == [receipt.accepted.id]


def test_a_job_revived_by_a_process_without_redis_is_swept(stage) -> None:
    stage.register(max_retries=0)
    job_id = stage.submit()
    stage.settle(stage.start(), OutcomeKind.RETRY)
    assert stage.state(job_id) is State.DEAD
    passes.sweep(stage.dispatcher)
    stage.cut_off().revive(job_id)
    passes.sweep(stage.dispatcher)
    assert stage.offered() == [job_id]


def test_a_job_whose_promoter_died_is_swept(stage) -> None:
    stage.register()
    job_id = stage.submit(delay_s=1)
    passes.sweep(stage.dispatcher)
    stage.later(1_000)
    stage.store.promote_due(stage.now)
    passes.sweep(stage.dispatcher)
    assert stage.offered() == [job_id]


def test_what_becomes_visible_late_is_swept_all_the_same(stage, monkeypatch) -> None:
    """On PostgreSQL a transaction may commit after one that began later."""
    monkeypatch.setattr("routing.maintenance.sweep._VISIBLE_WITHIN_S", {"sqlite": 10.0, "postgresql": 10.0})
    stage.register()
    stage.submit()
    passes.sweep(stage.dispatcher)
    _renumber(stage, "id = id + 1000000 WHERE actor IS NULL")
    passes.sweep(stage.dispatcher)
    late = stage.cut_off().submit([stage.a()], LOCAL_IDENTITY)[0].accepted.id
    _renumber(stage, f"id = (SELECT max(id) - 500000 FROM events) WHERE job_id = '{late}'")
    passes.sweep(stage.dispatcher)
    assert stage.room.waiting() == [late]


def _renumber(stage: Stage, change: str) -> None:
    with stage.database.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE events SET {change}")


def test_a_job_that_only_its_room_has_lost_is_found_by_counting(stage, monkeypatch) -> None:
    monkeypatch.setattr("routing.maintenance.sweep._COUNTING_SHARE", 1e9)
    stage.register()
    first, lost, last = (stage.submit() for _ in range(3))
    passes.sweep(stage.dispatcher)
    stage.dispatcher.queues.withdraw("zimg", [stage.job(lost).queued])
    for _ in range(2):
        passes.sweep(stage.dispatcher)
    assert stage.run_all() == [first, lost, last]


def test_a_room_that_only_looked_short_is_not_read_again_and_again(stage, monkeypatch) -> None:
    monkeypatch.setattr("routing.maintenance.sweep._COUNTING_SHARE", 1e9)
    monkeypatch.setattr("routing.maintenance.sweep.short_queues", lambda *_: {"zimg"})
    stage.register()
    stage.submit()
    passes.sweep(stage.dispatcher)
    read: list[object] = []
    queued = stage.store.list_queued
    monkeypatch.setattr(stage.store, "list_queued", lambda models, *a: read.append(models) or queued(models, *a))
    for _ in range(10):
        passes.sweep(stage.dispatcher)
    assert read.count(["zimg"]) == 2, "one page, and that there are no more"


def test_slot_2_a_thousand_slots_fill_in_one_sweep(stage) -> None:
    stage.register(1_000)
    stage.set_state("paused")
    for _ in range(4):  # A submit of all at once may take longer than a request does on a busy machine.
        stage.submit_all([stage.a() for _ in range(300)])
    stage.catalog.set_server_state("gpu", "online")
    passes.sweep(stage.dispatcher)
    assert len(stage.offered()) == 1_000


def test_slot_2_a_batch_fills_all_slots_at_once(stage) -> None:
    stage.register(300)
    stage.submit_all([stage.a() for _ in range(400)])
    assert len(stage.offered()) == 300


def test_the_rebuild_of_a_large_queue_does_not_delay_the_sweeps_of_other_fleets(stage, monkeypatch) -> None:
    monkeypatch.setattr("routing.maintenance.sweep._READ_S", 0.0)
    monkeypatch.setattr("routing.maintenance.rebuild.JOBS_AT_ONCE", 10)
    stage.register(model="flux", server="other")
    stage.register()
    ids = stage.submit_all([stage.a("flux") for _ in range(25)])
    stage.lose_redis()
    stage.told.offers.clear()
    other = stage.cut_off().submit([stage.a()], LOCAL_IDENTITY)[0].accepted.id
    for _ in range(20):
        passes.sweep(stage.dispatcher)
        if other in stage.offered():
            break
    else:
        pytest.fail("the small fleet waits for the large one")
    for _ in range(20):
        passes.sweep(stage.dispatcher)
    assert stage.dispatcher.fleets.counts(["flux"])["flux"].is_open
    assert stage.dispatcher.fleets.counts(["flux"])["flux"].waiting == {"flux": len(ids) - 1}


def test_a_rebuild_that_fails_at_its_end_is_made_again_by_the_next_sweep(stage, monkeypatch) -> None:
    stage.register()
    job_id = stage.submit()
    stage.lose_redis()
    stage.told.offers.clear()
    with monkeypatch.context() as away, pytest.raises(ConnectionError):
        away.setattr(stage.dispatcher.fleets, "open", _redis_is_away)
        passes.sweep(stage.dispatcher)
    passes.sweep(stage.dispatcher)
    assert stage.dispatcher.fleets.counts(["zimg"])["zimg"].is_open and stage.offered() == [job_id]


def _redis_is_away(*_: Any) -> NoReturn:
    raise ConnectionError("away")


# -- what is gone ----------------------------------------------------------------------------------------------


def _keys_of(stage: Stage, fleet: str) -> list[bytes]:
    return stage.redis.keys(Keys("test").fleet_pattern(fleet))


def _forget(stage: Stage, model: str) -> None:
    with stage.database.engine.begin() as connection:
        for table, column in (("endpoints", "model"), ("servers", "fleet"), ("models", "name")):
            connection.exec_driver_sql(f"DELETE FROM {table} WHERE {column} = '{model}'")
        connection.exec_driver_sql("UPDATE counters SET value = value + 1 WHERE name = 'catalog_version'")


def test_the_keys_of_a_fleet_that_is_gone_are_removed(stage) -> None:
    stage.register(model="flux", server="other")
    stage.register()
    stage.submit("flux")
    stage.settle(stage.start(), OutcomeKind.DONE)
    job_id = stage.submit()
    passes.sweep(stage.dispatcher)
    assert _keys_of(stage, "flux")
    _forget(stage, "flux")
    passes.reconcile(stage.dispatcher)
    assert _keys_of(stage, "flux") == [] and stage.run_all() == [job_id]
    stage.register(model="flux", server="other")
    assert stage.submit("flux") in stage.offered(), "it may come again"


def test_the_keys_of_a_fleet_that_is_gone_stay_while_it_holds_a_lease(stage) -> None:
    stage.register(model="flux", server="other")
    stage.submit("flux")
    stage.start()
    passes.sweep(stage.dispatcher)
    _forget(stage, "flux")
    passes.reconcile(stage.dispatcher)
    assert _keys_of(stage, "flux")


# -- leases ------------------------------------------------------------------------------------------------------


def test_the_leases_of_a_worker_that_died_are_reaped_some_at_a_time(stage, monkeypatch) -> None:
    stage.register(3)
    for _ in range(3):
        stage.submit()
        stage.start()
    stage.later(LEASE_MS)
    together, settle = threading.Barrier(3, timeout=20), stage.store.settle_write

    def settled(*args: Any, **more: Any) -> Any:
        together.wait()  # One after another would wait in vain.
        return settle(*args, **more)

    monkeypatch.setattr(stage.store, "settle_write", settled)
    assert passes.reap(stage.dispatcher) == 3


# -- runs ------------------------------------------------------------------------------------------------------


def test_a_reaper_held_up_at_the_database_leaves_no_job_in_no_room(stage, monkeypatch) -> None:
    stage.register()
    job_id = stage.submit()
    stage.start()
    stage.later(LEASE_MS)
    other, settle = stage.a_dispatcher(stage.redis), stage.store.settle_write

    def slow(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(stage.store, "settle_write", settle)
        write = settle(*args, **more)
        assert stage.database.commit(write)  # by one whose answer comes late
        stage.later(OFFER_MS)
        assert passes.reap(other) == 1
        return write

    monkeypatch.setattr(stage.store, "settle_write", slow)
    passes.reap(stage.dispatcher)
    stage.later(OFFER_MS)
    passes.reap(stage.dispatcher)
    assert job_id in stage.offered()
    assert stage.job(job_id).crashes == 1


def test_a_job_that_is_queued_again_before_its_slot_is_released_is_offered_after_the_release(stage) -> None:
    stage.register()
    job_id = stage.submit()
    task = stage.start()
    moved = store_end(stage.store, job_id, task.run.attempt, Reason.SERVER_BUSY, stage.now)
    stage.dispatcher.enqueue([moved.job])  # its lease is not released yet
    assert stage.offered() == []
    free(stage.dispatcher, task.lease, return_to_lane=False)
    assert stage.offered() == [job_id]


# -- time ------------------------------------------------------------------------------------------------------


def test_many_deadlines_leave_the_others_their_turn(stage, monkeypatch) -> None:
    monkeypatch.setattr("routing.maintenance.deadlines._CHUNK", 10)
    stage.register()
    ids = stage.submit_all([stage.a(ttl_s=1) for _ in range(35)])
    stage.later(1_000)
    turns = []
    while done := deadlines.expire_deadlines(stage.dispatcher, within_s=0):
        turns.append(done)
    assert turns == [10, 10, 10, 5]
    assert {stage.state(job_id) for job_id in ids} == {State.EXPIRED}
    assert not stage.room.waiting()


def test_however_many_deadlines_pass_a_due_job_waits_for_one_batch_of_them(stage, monkeypatch) -> None:
    monkeypatch.setattr("routing.maintenance.deadlines._CHUNK", 10)
    monkeypatch.setattr(maintenance, "_KEEP_TIME_LIMIT_S", 60.0)
    passes.run_tasks_with(monkeypatch, stage.dispatcher)
    stage.register()
    stage.submit_all([stage.a(ttl_s=1) for _ in range(35)])
    stage.later(1_000)
    turns: list[tuple[str, int]] = []
    for name in ("promote_due_jobs", "expire_deadlines"):
        act = getattr(deadlines, name)
        monkeypatch.setattr(deadlines, name, lambda *a, name=name, act=act: turns.append((name, n := act(*a))) or n)
    maintenance.keep_time()
    assert turns[:4] == [("promote_due_jobs", 0), ("expire_deadlines", 10)] * 2


def test_a_batch_of_deadlines_is_one_statement_and_one_call_of_redis(stage, monkeypatch) -> None:
    stage.register()
    stage.submit_all([stage.a(ttl_s=1) for _ in range(50)])
    stage.later(1_000)
    single: list[str] = []
    run = Scripts.run
    monkeypatch.setattr(Scripts, "run", lambda self, name, *args: single.append(name) or run(self, name, *args))
    statements = _statements(stage, lambda: deadlines.expire_deadlines(stage.dispatcher))
    assert ledger.read(stage.store.database).by_state[State.EXPIRED] == 50
    assert (
        "withdraw" not in single
        and len([statement for statement in statements if statement.startswith("UPDATE jobs")]) == 1
    )


# -- the servers -----------------------------------------------------------------------------------------------


def test_a_delayed_report_occupies_no_slot_for_a_job_that_has_ended_since(stage) -> None:
    stage.register()
    job_id = stage.submit()
    task = stage.start()
    report = ServerReport(True, 1, frozenset({job_id}), asked_ms=stage.now)
    stage.settle(task)
    stage.later(7_000)
    passes.apply_reports(stage.dispatcher, {"gpu": report})
    assert stage.free() == 1


def test_a_report_that_waited_makes_no_ghost_of_a_job_that_began_since(stage) -> None:
    stage.register()
    report = ServerReport(True, 0, frozenset(), asked_ms=stage.now)
    stage.submit()
    stage.start()
    stage.later(6_000)
    assert passes.find_stale_runs(stage.dispatcher, {"gpu": report}) == []


def test_while_workers_could_not_renew_silence_proves_nothing(stage) -> None:
    stage.register()
    job_id = stage.submit()
    stage.start()
    stage.later(6_000)
    report = {"gpu": ServerReport(True, 0, frozenset())}
    assert passes.apply_reports(stage.dispatcher, report, may_reap=False) == 0
    assert stage.state(job_id) is State.RUNNING
    assert passes.apply_reports(stage.dispatcher, report) == 1


def test_many_servers_of_a_fleet_are_looked_at_together(stage, monkeypatch) -> None:
    for n in range(30):
        stage.catalog.register("zimg", f"s{n}", f"http://s{n}:1/run", 1, stage.now)
    stage.register()
    calls: list[str] = []
    run = Scripts.run
    monkeypatch.setattr(Scripts, "run", lambda self, name, *args: calls.append(name) or run(self, name, *args))
    reports = {f"s{n}": ServerReport(True, 0, frozenset()) for n in range(30)}
    passes.apply_health(stage.dispatcher, reports)
    passes.apply_reports(stage.dispatcher, reports)
    passes.servers_to_check_now(stage.dispatcher)
    assert len(calls) <= 3


def test_two_processes_that_sweep_at_once_lose_no_job_and_run_none_twice(stage) -> None:
    stage.register(2)
    ids = [stage.submit() for _ in range(6)]
    others = [stage.dispatcher, stage.a_dispatcher(stage.redis)]
    at_once(*[lambda dispatcher=dispatcher: passes.sweep(dispatcher) for dispatcher in others * 2])
    assert sorted(stage.run_all()) == sorted(ids)
    assert queues.Queues is type(stage.dispatcher.queues)
