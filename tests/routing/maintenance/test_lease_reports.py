"""The five cases of comparing the leases with a server's report, over a real database and a real Valkey.

match · stale lease · unknown run (of a known job, of another client) · silence; and servers that only count.
"""

import pytest

from routing.maintenance import deadlines
from routing.maintenance.server_report import MIN_AGE_MS, ServerReport
from routing.queue.leases import Renewal
from slotkeeper.jobs.states import Reason, State
from tests.support import passes
from tests.support.ends import hand_back
from tests.support.harness import DOWN, LEASE_MS, UP_AND_IDLE, Harness

SILENT_MS = MIN_AGE_MS + 1  # also longer than two renewals
WITHHELD_MS = 12_000


def running(*job_ids: str) -> ServerReport:
    return ServerReport(True, len(job_ids), frozenset(job_ids))


def heed(harness: Harness, report: ServerReport) -> int:
    return passes.apply_reports(harness.dispatcher, {"gpu": report})


def look_twice(harness: Harness, first: ServerReport, second: ServerReport) -> int:
    """What sync_locks does."""
    before = passes.find_stale_runs(harness.dispatcher, {"gpu": first})
    return passes.end_stale_runs(harness.dispatcher, before, {"gpu": second})


# -- match -----------------------------------------------------------------------------------------------------


def test_match_a_silent_workers_lease_is_kept_while_its_server_runs_the_job(harness):
    harness.register(2)
    harness.submit(id="one")
    task = harness.start()
    harness.later(SILENT_MS)
    before = harness.queue.dump()
    for name in ("one", "one-1", "one.1"):
        assert heed(harness, running(name)) == 0
        assert look_twice(harness, running(name), running(name)) == 0
    assert harness.queue.dump() == before
    assert harness.renewal(task) is Renewal.RENEWED and harness.settle(task).moved is not None


# -- stale lease -----------------------------------------------------------------------------------------------


def test_ghost_a_restarted_server_frees_the_slots_of_silent_workers_at_its_first_answer(harness):
    harness.register(2)
    ids = [harness.submit() for _ in range(3)]
    tasks = [harness.start(), harness.start()]
    harness.later(SILENT_MS)
    assert heed(harness, UP_AND_IDLE) == 2
    assert [(harness.job(job_id).why, harness.job(job_id).crashes) for job_id in ids[:2]] == [
        (Reason.SERVER_LOST, 1)
    ] * 2
    assert [harness.renewal(task) for task in tasks] == [Renewal.LOST] * 2
    assert harness.run_all() == ids, "back at their own places"


def test_ghost_the_lease_of_a_live_worker_is_released_only_after_a_second_check(harness):
    harness.register()
    harness.submit(id="one")
    task = harness.start()
    harness.later(SILENT_MS)
    assert harness.renewal(task) is Renewal.RENEWED
    assert heed(harness, UP_AND_IDLE) == 0
    assert look_twice(harness, UP_AND_IDLE, running("one")) == 0
    assert harness.renewal(task) is Renewal.RENEWED
    assert look_twice(harness, UP_AND_IDLE, UP_AND_IDLE) == 1
    assert harness.renewal(task) is Renewal.LOST


def test_a_run_with_a_remote_id_is_not_stale_and_its_result_is_requested_by_that_id(harness):
    harness.register(model_type="async")
    job_id = harness.submit()
    task = harness.start()
    harness.remote(task)
    harness.later(SILENT_MS)
    assert heed(harness, UP_AND_IDLE) == look_twice(harness, UP_AND_IDLE, UP_AND_IDLE) == 0
    assert harness.renewal(task) is Renewal.RENEWED, "its worker requests the result itself"
    harness.later(LEASE_MS)
    assert passes.reap(harness.dispatcher) == 1
    assert harness.job(job_id).remote_id == harness.start("w2").run.remote_id == "r-1", (
        "otherwise the next worker requests it"
    )


def test_ghost_a_run_that_its_server_does_not_list_for_longer_than_a_poll_takes_is_lost(harness):
    harness.register(model_type="async", poll_interval=10)
    harness.submit(id="one")
    task = harness.start()
    harness.remote(task)

    def look_on(report: ServerReport, ms: int) -> int:
        for _ in range(ms // 1000):
            harness.later(1000)
            assert harness.renewal(task) is Renewal.RENEWED
        return look_twice(harness, report, report)

    assert look_on(UP_AND_IDLE, SILENT_MS) == look_on(UP_AND_IDLE, 40_000) == 0
    assert look_on(running("one"), 1000) == look_on(UP_AND_IDLE, 1000) == look_on(UP_AND_IDLE, 40_000) == 0
    assert look_on(UP_AND_IDLE, 10_000) == 1 and harness.renewal(task) is Renewal.LOST


def test_a_young_lease_may_be_ahead_of_its_servers_count(harness):
    harness.register()
    job_id = harness.submit()
    harness.start()
    harness.later(MIN_AGE_MS - 1)
    assert heed(harness, UP_AND_IDLE) == look_twice(harness, UP_AND_IDLE, UP_AND_IDLE) == 0
    assert harness.state(job_id) is State.RUNNING


def test_ghost_the_result_of_an_abandoned_run_is_not_stored(harness):
    harness.register()
    job_id = harness.submit()
    task = harness.start()
    harness.later(SILENT_MS)
    heed(harness, UP_AND_IDLE)
    again = harness.start("w2")
    assert harness.settle(task).moved is None  # LEASE-3
    assert harness.renewal(again) is Renewal.RENEWED, "the slot is not released during the next run"
    assert harness.settle(again).moved is not None and harness.job(job_id).attempt == 2


# -- orphan ----------------------------------------------------------------------------------------------------


def test_orphan_the_slot_of_a_run_without_a_lease_is_not_offered_while_the_server_runs_it(harness):
    harness.register()
    harness.submit(id="one", ttl_s=1)
    task = harness.start()
    harness.later(1_000)
    deadlines.expire_deadlines(harness.dispatcher)
    harness.settle(task)
    harness.later(LEASE_MS)
    for _ in range(5):
        heed(harness, running("one"))
        harness.submit()
        passes.sweep(harness.dispatcher)
        assert harness.offered() == []
        harness.later(WITHHELD_MS - 2_000)
    heed(harness, UP_AND_IDLE)
    harness.later(WITHHELD_MS)
    passes.sweep(harness.dispatcher)
    assert len(harness.offered()) == 1, "as soon as the server has ended the run"


def test_orphan_a_run_whose_lease_redis_lost_is_adopted_with_its_slot(harness):
    harness.register()
    job_id = harness.submit(id="one")
    task = harness.start()
    harness.lose_redis()
    passes.sweep(harness.dispatcher)
    heed(harness, running("one"))
    assert harness.queue.taken() == {task.lease.slot: job_id}
    assert harness.renewal(task) is Renewal.RENEWED and harness.settle(task).moved is not None


def test_orphan_a_run_that_is_offered_again_takes_only_its_reserved_slot(harness):
    """The worker has handed the run back, and the server continues it until another worker claims it."""
    harness.register(2)
    harness.submit(id="one")
    assert hand_back(harness.dispatcher, harness.start())
    heed(harness, running("one"))
    assert harness.free() == 1


# -- foreign ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("report", "free"), [(running("x"), 2), (running("x", "y"), 1), (ServerReport(True, 3), 0)])
def test_foreign_slots_that_direct_calls_use_are_not_offered_for_a_while(harness, report, free):
    harness.register(3)
    assert heed(harness, report) == 0
    assert harness.free() == free
    harness.later(WITHHELD_MS)
    passes.sweep(harness.dispatcher)
    assert harness.free() == 3


def test_foreign_an_endless_report_costs_at_most_two_database_reads_for_each_slot(harness, monkeypatch):
    harness.register(2)
    looks, get = [], harness.store.get
    monkeypatch.setattr(harness.store, "get", lambda job_id: looks.append(job_id) or get(job_id))
    heed(harness, running(*(f"stranger-{n}" for n in range(10_000))))
    assert harness.free() == 0 and len(looks) <= 2 * 2


def test_foreign_runs_and_our_runs_are_distinguished_by_name(harness):
    harness.register(3)
    harness.submit(id="one")
    harness.start()
    heed(harness, running("one", "x"))
    assert harness.free() == 1, "one is ours, one is theirs"


# -- unknown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("report", [DOWN, ServerReport(True), ServerReport(False, 0, frozenset())])
def test_unknown_a_server_without_a_usable_report_releases_no_lease_of_any_age(harness, report):
    harness.register(2)
    harness.submit()
    harness.start()
    harness.later(3_600_000)
    before = harness.queue.dump()
    assert heed(harness, report) == look_twice(harness, report, report) == 0
    assert look_twice(harness, UP_AND_IDLE, report) == 0
    assert harness.queue.dump() == before


# -- servers that only count -----------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2])
def test_unknown_an_idle_server_may_run_more_jobs_than_it_was_registered_with_so_no_run_is_stale(harness, slots):
    harness.register(slots)
    job_id = harness.submit()
    harness.start()
    harness.later(SILENT_MS)
    idle = ServerReport(True, is_idle=True)
    assert heed(harness, idle) == look_twice(harness, idle, idle) == 0
    assert (harness.job(job_id).state, harness.job(job_id).crashes) == (State.RUNNING, 0)


def test_a_count_frees_only_when_it_is_zero_and_only_leases_old_enough(harness):
    harness.register(3)
    old = harness.submit()
    harness.start()
    harness.later(SILENT_MS)
    young = harness.submit()
    harness.start("w2")
    one, zero = ServerReport(True, 1), ServerReport(True, 0)
    assert heed(harness, one) == look_twice(harness, one, one) == look_twice(harness, zero, one) == 0
    assert heed(harness, zero) == 1
    assert (harness.job(old).crashes, harness.state(young)) == (1, State.RUNNING)
