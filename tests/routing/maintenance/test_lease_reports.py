"""The five cases between our leases and a server's own report, over a real database and a real Valkey.

match · stale lease · unknown run (of our job, of another client) · silence; and servers that only count.
"""

import pytest

from routing.maintenance import deadlines
from routing.maintenance.server_report import MIN_AGE_MS, ServerReport
from routing.queue.leases import Renewal
from slotkeeper.jobs.states import Reason, State
from tests.support import passes
from tests.support.ends import hand_back
from tests.support.stage import DOWN, LEASE_MS, UP_AND_IDLE, Stage

SILENT_MS = MIN_AGE_MS + 1  # also longer than two renewals
WITHHELD_MS = 12_000


def running(*job_ids: str) -> ServerReport:
    return ServerReport(True, len(job_ids), frozenset(job_ids))


def heed(stage: Stage, report: ServerReport) -> int:
    return passes.apply_reports(stage.dispatcher, {"gpu": report})


def look_twice(stage: Stage, first: ServerReport, second: ServerReport) -> int:
    """What sync_locks does."""
    before = passes.find_stale_runs(stage.dispatcher, {"gpu": first})
    return passes.end_stale_runs(stage.dispatcher, before, {"gpu": second})


# -- match -----------------------------------------------------------------------------------------------------


def test_match_a_silent_workers_lease_is_kept_while_its_server_runs_the_job(stage):
    stage.register(2)
    stage.submit(id="one")
    task = stage.start()
    stage.later(SILENT_MS)
    before = stage.room.dump()
    for name in ("one", "one-1", "one.1"):
        assert heed(stage, running(name)) == 0
        assert look_twice(stage, running(name), running(name)) == 0
    assert stage.room.dump() == before
    assert stage.renewal(task) is Renewal.RENEWED and stage.settle(task).moved is not None


# -- stale lease -----------------------------------------------------------------------------------------------


def test_ghost_a_restarted_server_frees_the_slots_of_silent_workers_at_its_first_answer(stage):
    stage.register(2)
    ids = [stage.submit() for _ in range(3)]
    tasks = [stage.start(), stage.start()]
    stage.later(SILENT_MS)
    assert heed(stage, UP_AND_IDLE) == 2
    assert [(stage.job(job_id).why, stage.job(job_id).crashes) for job_id in ids[:2]] == [(Reason.SERVER_LOST, 1)] * 2
    assert [stage.renewal(task) for task in tasks] == [Renewal.LOST] * 2
    assert stage.run_all() == ids, "back at their own places"


def test_ghost_a_living_workers_lease_goes_only_after_a_second_look(stage):
    stage.register()
    stage.submit(id="one")
    task = stage.start()
    stage.later(SILENT_MS)
    assert stage.renewal(task) is Renewal.RENEWED
    assert heed(stage, UP_AND_IDLE) == 0
    assert look_twice(stage, UP_AND_IDLE, running("one")) == 0
    assert stage.renewal(task) is Renewal.RENEWED
    assert look_twice(stage, UP_AND_IDLE, UP_AND_IDLE) == 1
    assert stage.renewal(task) is Renewal.LOST


def test_a_run_that_has_an_id_at_its_server_is_no_ghost_its_result_is_asked_for_by_that_id(stage):
    stage.register(model_type="async")
    job_id = stage.submit()
    task = stage.start()
    stage.remote(task)
    stage.later(SILENT_MS)
    assert heed(stage, UP_AND_IDLE) == look_twice(stage, UP_AND_IDLE, UP_AND_IDLE) == 0
    assert stage.renewal(task) is Renewal.RENEWED, "its worker asks by itself"
    stage.later(LEASE_MS)
    assert passes.reap(stage.dispatcher) == 1
    assert stage.job(job_id).remote_id == stage.start("w2").run.remote_id == "r-1", "or the next one does"


def test_ghost_a_run_that_its_server_does_not_list_for_longer_than_a_poll_takes_is_lost(stage):
    stage.register(model_type="async", poll_interval=10)
    stage.submit(id="one")
    task = stage.start()
    stage.remote(task)

    def look_on(report: ServerReport, ms: int) -> int:
        for _ in range(ms // 1000):
            stage.later(1000)
            assert stage.renewal(task) is Renewal.RENEWED
        return look_twice(stage, report, report)

    assert look_on(UP_AND_IDLE, SILENT_MS) == look_on(UP_AND_IDLE, 40_000) == 0
    assert look_on(running("one"), 1000) == look_on(UP_AND_IDLE, 1000) == look_on(UP_AND_IDLE, 40_000) == 0
    assert look_on(UP_AND_IDLE, 10_000) == 1 and stage.renewal(task) is Renewal.LOST


def test_a_young_lease_may_be_ahead_of_its_servers_count(stage):
    stage.register()
    job_id = stage.submit()
    stage.start()
    stage.later(MIN_AGE_MS - 1)
    assert heed(stage, UP_AND_IDLE) == look_twice(stage, UP_AND_IDLE, UP_AND_IDLE) == 0
    assert stage.state(job_id) is State.RUNNING


def test_ghost_the_result_of_a_run_that_was_given_up_is_not_stored(stage):
    stage.register()
    job_id = stage.submit()
    task = stage.start()
    stage.later(SILENT_MS)
    heed(stage, UP_AND_IDLE)
    again = stage.start("w2")
    assert stage.settle(task).moved is None  # LEASE-3
    assert stage.renewal(again) is Renewal.RENEWED, "and the slot is not freed under the next run"
    assert stage.settle(again).moved is not None and stage.job(job_id).attempt == 2


# -- orphan ----------------------------------------------------------------------------------------------------


def test_orphan_the_slot_of_a_run_whose_lease_is_gone_is_not_offered_while_the_server_runs_it(stage):
    stage.register()
    stage.submit(id="one", ttl_s=1)
    task = stage.start()
    stage.later(1_000)
    deadlines.expire_deadlines(stage.dispatcher)
    stage.settle(task)
    stage.later(LEASE_MS)
    for _ in range(5):
        heed(stage, running("one"))
        stage.submit()
        passes.sweep(stage.dispatcher)
        assert stage.offered() == []
        stage.later(WITHHELD_MS - 2_000)
    heed(stage, UP_AND_IDLE)
    stage.later(WITHHELD_MS)
    passes.sweep(stage.dispatcher)
    assert len(stage.offered()) == 1, "as soon as it has let go"


def test_orphan_a_run_whose_lease_redis_lost_is_adopted_with_its_slot(stage):
    stage.register()
    job_id = stage.submit(id="one")
    task = stage.start()
    stage.lose_redis()
    passes.sweep(stage.dispatcher)
    heed(stage, running("one"))
    assert stage.room.taken() == {task.lease.slot: job_id}
    assert stage.renewal(task) is Renewal.RENEWED and stage.settle(task).moved is not None


def test_orphan_a_run_that_is_offered_again_uses_no_slot_but_its_own(stage):
    """Its worker has handed it back; until another takes it up, its server goes on with it."""
    stage.register(2)
    stage.submit(id="one")
    assert hand_back(stage.dispatcher, stage.start())
    heed(stage, running("one"))
    assert stage.free() == 1


# -- foreign ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("report", "free"), [(running("x"), 2), (running("x", "y"), 1), (ServerReport(True, 3), 0)])
def test_foreign_slots_that_direct_calls_use_are_not_offered_for_a_while(stage, report, free):
    stage.register(3)
    assert heed(stage, report) == 0
    assert stage.free() == free
    stage.later(WITHHELD_MS)
    passes.sweep(stage.dispatcher)
    assert stage.free() == 3


def test_foreign_a_report_that_never_ends_costs_no_more_looks_than_the_server_has_slots(stage, monkeypatch):
    stage.register(2)
    looks, get = [], stage.store.get
    monkeypatch.setattr(stage.store, "get", lambda job_id: looks.append(job_id) or get(job_id))
    heed(stage, running(*(f"stranger-{n}" for n in range(10_000))))
    assert stage.free() == 0 and len(looks) <= 2 * 2


def test_foreign_runs_and_our_runs_are_distinguished_by_name(stage):
    stage.register(3)
    stage.submit(id="one")
    stage.start()
    heed(stage, running("one", "x"))
    assert stage.free() == 1, "one is ours, one is theirs"


# -- unknown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("report", [DOWN, ServerReport(True), ServerReport(False, 0, frozenset())])
def test_unknown_a_server_that_does_not_say_frees_nothing_however_old_the_lease(stage, report):
    stage.register(2)
    stage.submit()
    stage.start()
    stage.later(3_600_000)
    before = stage.room.dump()
    assert heed(stage, report) == look_twice(stage, report, report) == 0
    assert look_twice(stage, UP_AND_IDLE, report) == 0
    assert stage.room.dump() == before


# -- servers that only count -----------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2])
def test_unknown_an_idle_server_may_run_more_jobs_than_it_was_registered_with_so_no_run_is_stale(stage, slots):
    stage.register(slots)
    job_id = stage.submit()
    stage.start()
    stage.later(SILENT_MS)
    idle = ServerReport(True, is_idle=True)
    assert heed(stage, idle) == look_twice(stage, idle, idle) == 0
    assert (stage.job(job_id).state, stage.job(job_id).crashes) == (State.RUNNING, 0)


def test_a_count_frees_only_when_it_is_zero_and_only_leases_old_enough(stage):
    stage.register(3)
    old = stage.submit()
    stage.start()
    stage.later(SILENT_MS)
    young = stage.submit()
    stage.start("w2")
    one, zero = ServerReport(True, 1), ServerReport(True, 0)
    assert heed(stage, one) == look_twice(stage, one, one) == look_twice(stage, zero, one) == 0
    assert heed(stage, zero) == 1
    assert (stage.job(old).crashes, stage.state(young)) == (1, State.RUNNING)
