"""A run ends in two steps: its job ends, and its slot becomes free.

However a run ends, its slot is quarantined until the server's report no longer shows the run (SLOT-1).  The quarantine
survives the loss of Redis' data, of the worker and of the reaper.
"""

from collections.abc import Callable

import pytest

from routing.dispatch.decision import decide
from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.dispatch.run_steps import RunSteps
from routing.maintenance import deadlines, quarantined_slots
from routing.maintenance.server_report import MIN_AGE_MS, ServerReport
from routing.queue.leases import QUARANTINE_OWNER, Renewal
from slotkeeper.clock import now_ms
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import Transition
from tasks.retries import decide_end
from tests.support import passes
from tests.support.ends import end_in_order, hand_back
from tests.support.stage import DOWN, LEASE_MS, SECOND, SETTINGS, UP_AND_IDLE, Stage

MAX_QUARANTINE_MS = SETTINGS.withhold_max_ms


def running_report(*job_ids: str) -> ServerReport:
    return ServerReport(True, len(job_ids), frozenset(job_ids))


def apply_report(stage: Stage, report: ServerReport) -> int:
    return passes.apply_reports(stage.dispatcher, {"gpu": report})


def rows(stage: Stage) -> list[tuple[str, str, str]]:
    return [(row.job_id, row.slot, row.reason) for row in quarantine.list_all(stage.database)]


def give_up(
    stage: Stage, active: ActiveRun, kind: OutcomeKind = OutcomeKind.RETRY, server_still_running: str = "timed_out"
) -> State:
    """End a run that its server may continue, as the worker does, and return the new state of the job."""
    moved = _end_while_server_runs(stage, active, kind, server_still_running)
    assert moved is not None
    return moved.to


def _end_while_server_runs(
    stage: Stage, active: ActiveRun, kind: OutcomeKind, server_still_running: str
) -> Transition | None:
    config, outcome = (
        stage.dispatcher.catalog.resolve("zimg").config,
        Outcome(kind, code=server_still_running, server_still_running=True),
    )
    decision = decide(active.run, outcome, config, stage.dispatcher.settings, stage.now, canceling=True)
    decision = decision._replace(error=None)
    return end_in_order(stage.dispatcher, active, decision).moved


# -- ends of a run that its server continues -------------------------------------------------------------------


def _timed_out(stage: Stage) -> tuple[str, State]:
    job_id, active = stage.submit(id="one"), stage.start()
    stage.later(MIN_AGE_MS)
    return job_id, give_up(stage, active)


def _not_confirmed(stage: Stage) -> tuple[str, State]:
    job_id, active = stage.submit(id="one"), stage.start()
    stage.dispatcher.cancel(job_id)
    stage.later(MIN_AGE_MS)
    return job_id, give_up(stage, active, OutcomeKind.CANCELED, "canceled")


def _server_away(stage: Stage) -> tuple[str, State]:
    job_id, active = stage.submit(id="one"), stage.start()
    stage.later(MIN_AGE_MS)
    return job_id, give_up(stage, active, OutcomeKind.LOST, "server_lost")


def _overdue(stage: Stage) -> tuple[str, State]:
    """The worker has canceled the run at the server, which continues, and finds that the job has ended."""
    job_id, active = stage.submit(id="one", ttl_s=5), stage.start()
    stage.later(MIN_AGE_MS)
    assert deadlines.expire_deadlines(stage.dispatcher) == 1
    assert _end_while_server_runs(stage, active, OutcomeKind.CANCELED, "canceled") is None
    return job_id, State.EXPIRED


def _overdue_and_dead(stage: Stage) -> tuple[str, State]:
    job_id = stage.submit(id="one", ttl_s=5)
    stage.start()
    stage.later(MIN_AGE_MS)
    assert deadlines.expire_deadlines(stage.dispatcher) == 1
    passes.reap(stage.dispatcher)
    return job_id, State.EXPIRED


def _canceled_and_dead(stage: Stage) -> tuple[str, State]:
    job_id = stage.submit(id="one")
    stage.start()
    stage.dispatcher.cancel(job_id)
    stage.later(MIN_AGE_MS)
    passes.reap(stage.dispatcher)
    return job_id, State.CANCELED


def _canceled_before_it_was_resumed(stage: Stage) -> tuple[str, State]:
    job_id, active = stage.submit(id="one"), stage.start()
    stage.remote(active)
    stage.later(MIN_AGE_MS)
    assert hand_back(stage.dispatcher, active)
    stage.dispatcher.cancel(job_id)
    stage.later(LEASE_MS + SECOND)
    passes.reap(stage.dispatcher)
    stage.told.offers.clear()
    return job_id, State.CANCELED


def test_the_time_limit_of_a_run_begins_after_the_wait_for_an_earlier_request(stage: Stage) -> None:
    stage.register(max_poll_time=60)
    stage.submit()
    assert hand_back(stage.dispatcher, stage.start())
    active = stage.start()
    for ended, later_ms in ((0, 149 * SECOND), (1, SECOND)):
        stage.later(later_ms)
        assert stage.renewal(active) is Renewal.RENEWED
        assert deadlines.end_overlong_runs(stage.dispatcher, decide_end) == ended


def _hung(stage: Stage) -> tuple[str, State]:
    """The worker renews the lease, but does not end the run."""
    job_id = stage.submit(id="one")
    active = stage.start()
    stage.later(60 * SECOND + 29 * SECOND)
    assert stage.renewal(active) is Renewal.RENEWED
    assert deadlines.end_overlong_runs(stage.dispatcher, decide_end) == 0
    stage.later(SECOND)
    assert deadlines.end_overlong_runs(stage.dispatcher, decide_end) == 1
    assert deadlines.end_overlong_runs(stage.dispatcher, decide_end) == 0
    assert stage.renewal(active) is Renewal.LOST
    assert deadlines.promote_due_jobs(stage.dispatcher) == 0  # The job waits for its retry delay.
    return job_id, State.DELAYED


ENDS: list[Callable[[Stage], tuple[str, State]]] = [
    _timed_out,
    _not_confirmed,
    _server_away,
    _overdue,
    _overdue_and_dead,
    _canceled_and_dead,
    _canceled_before_it_was_resumed,
    _hung,
]
each_end = pytest.mark.parametrize("end_run", [pytest.param(end, id=end.__name__[1:]) for end in ENDS])


@pytest.fixture
def one_slot(stage: Stage) -> Stage:
    stage.register(1, max_poll_time=60.0)
    return stage


@each_end
def test_slot_1_a_slot_is_quarantined_until_its_servers_report_no_longer_shows_the_run(one_slot, end_run):
    stage = one_slot
    job_id, state = end_run(stage)
    assert stage.state(job_id) is state
    assert [row[:2] for row in rows(stage)] == [("one", "gpu-slot0")]
    following = stage.submit()
    for _ in range(5):
        stage.later(LEASE_MS)
        passes.reap(stage.dispatcher)
        apply_report(stage, running_report("one"))
        quarantined_slots.sync_leases(stage.dispatcher)
        passes.reconcile(stage.dispatcher)
        passes.sweep(stage.dispatcher)
        assert following not in stage.offered(), "the server still runs the earlier job"
        assert [lease.owner for lease, _ in stage.dispatcher.leases.list_all(["zimg"])["zimg"]] == [QUARANTINE_OWNER]
    assert passes.find_violations(stage.dispatcher, {}) == set()
    assert apply_report(stage, UP_AND_IDLE) == 1
    assert rows(stage) == [] and {following, "one"} & set(stage.offered()), (
        "the slot is offered at once, not at the next sweep"
    )


@each_end
def test_an_emptied_redis_does_not_forget_what_drains(one_slot, end_run):
    stage = one_slot
    end_run(stage)
    stage.submit()
    stage.offered()
    stage.lose_redis()
    passes.sweep(stage.dispatcher)
    assert stage.offered() == [] and stage.room.taken() == {"gpu-slot0": f"one~{stage.job('one').attempt}"}
    apply_report(stage, running_report("one"))
    assert stage.offered() == []
    assert apply_report(stage, UP_AND_IDLE) == 1
    assert len(stage.offered()) == 1


@each_end
def test_a_slot_is_not_quarantined_for_longer_than_the_configured_time(one_slot, end_run):
    stage = one_slot
    end_run(stage)
    stage.submit()
    stage.offered()
    (row,) = quarantine.list_all(stage.database)
    assert row.until_ms - row.since_ms == MAX_QUARANTINE_MS
    stage.later(row.until_ms - 1 - stage.now)
    apply_report(stage, running_report("one"))
    passes.reap(stage.dispatcher)
    assert len(rows(stage)) == 1
    stage.later(LEASE_MS + SECOND)
    passes.reap(stage.dispatcher)
    passes.sweep(stage.dispatcher)
    assert rows(stage) == [] and len(stage.offered()) == 1


@pytest.mark.parametrize("report", [DOWN, ServerReport(True)], ids=["down", "says nothing"])
def test_a_report_without_runs_or_counts_releases_no_slot(one_slot, report):
    stage = one_slot
    _timed_out(stage)
    before = stage.room.dump()
    assert apply_report(stage, report) == 0
    assert stage.room.dump() == before and len(rows(stage)) == 1


_RUN_MS = 4 * SECOND
_QUARANTINE_MS = 3 * _RUN_MS


def _timed_out_where_runs_are_short(stage: Stage) -> None:
    stage.submit()
    active = stage.start()
    stage.later(_RUN_MS)
    stage.settle(active)
    _timed_out(stage)


@pytest.mark.parametrize("report", [DOWN, ServerReport(True)], ids=["down", "says nothing"])
def test_without_information_a_slot_is_quarantined_for_three_times_the_usual_duration_of_a_run(one_slot, report):
    stage = one_slot
    _timed_out_where_runs_are_short(stage)
    apply_report(stage, report)
    stage.later(_QUARANTINE_MS - 1)
    quarantined_slots.sync_leases(stage.dispatcher)
    assert len(rows(stage)) == 1
    stage.later(1)
    quarantined_slots.sync_leases(stage.dispatcher)
    assert rows(stage) == []


@pytest.mark.parametrize("source", ["id", "count", "status"])
def test_a_slot_stays_quarantined_while_its_server_reports_that_the_run_continues(one_slot, source):
    stage = one_slot
    _timed_out_where_runs_are_short(stage)
    stage.later(_QUARANTINE_MS - SECOND)
    if source == "status":
        passes.note_running(stage.dispatcher, quarantine.list_all(stage.database)[0])
    apply_report(stage, {"id": running_report("one"), "count": ServerReport(True, 1)}.get(source, ServerReport(True)))
    stage.later(2 * SECOND)
    quarantined_slots.sync_leases(stage.dispatcher)
    assert len(rows(stage)) == 1


def test_a_result_from_the_server_frees_the_slot_of_a_job_that_has_already_ended(one_slot):
    """The deadline of the job passed before the result arrived."""
    stage = one_slot
    stage.submit(id="one", ttl_s=5)
    active, following = stage.start(), stage.submit()
    stage.later(5 * SECOND)
    deadlines.expire_deadlines(stage.dispatcher)
    assert stage.renewal(active) is Renewal.CANCEL and len(rows(stage)) == 1
    assert stage.settle(active).moved is None
    assert rows(stage) == [] and stage.offered() == [following]


def test_a_late_response_to_a_stale_worker_releases_the_slot(one_slot):
    stage = one_slot
    stage.submit(id="one", ttl_s=5)
    active, following = stage.start(), stage.submit()
    stage.later(5 * SECOND)
    deadlines.expire_deadlines(stage.dispatcher)
    passes.reap(stage.dispatcher)
    assert stage.room.taken() == {"gpu-slot0": "one~1"}
    assert stage.settle(active).moved is None
    assert stage.offered() == [following]


def test_the_retry_of_a_timed_out_job_may_run_at_the_same_time_as_its_earlier_run(stage):
    stage.register(2)
    stage.submit(id="one")
    give_up(stage, stage.start())
    stage.later(60 * SECOND)
    assert deadlines.promote_due_jobs(stage.dispatcher) == 1
    again = stage.start()
    assert (again.run.job.id, again.run.attempt, again.lease.slot) == ("one", 2, "gpu-slot1")
    stage.later(MIN_AGE_MS)
    assert apply_report(stage, running_report("one.1", "one.2")) == 0 and stage.free() == 0, "neither run is foreign"
    assert apply_report(stage, running_report("one.2")) == 1 and stage.free() == 1
    assert stage.renewal(again) is Renewal.RENEWED


def test_a_run_in_a_quarantined_slot_does_not_occupy_a_second_slot(stage):
    stage.register(3)
    stage.submit(id="one")
    active = stage.start()
    stage.later(MIN_AGE_MS)
    give_up(stage, active)
    apply_report(stage, running_report("one"))
    assert stage.free() == 2


def test_a_quarantined_slot_counts_for_its_tenant(stage):
    stage.register(2, policy="fair", tenant_slots=1)
    stage.submit(id="one")
    give_up(stage, stage.start(), OutcomeKind.CANCELED)
    stage.submit()
    assert stage.offered() == []
    stage.later(MIN_AGE_MS)
    apply_report(stage, UP_AND_IDLE)
    assert len(stage.offered()) == 1


# -- servers that only count -----------------------------------------------------------------------------------


def _count(stage: Stage, active: int) -> int:
    return apply_report(stage, ServerReport(True, active))


def test_a_count_of_zero_releases_the_slot(one_slot):
    stage = one_slot
    _timed_out(stage)
    assert _count(stage, 1) == 0
    assert _count(stage, 0) == 1


IDLE = ServerReport(True, is_idle=True)


def test_an_idle_server_of_one_slot_runs_nothing(one_slot):
    _timed_out(one_slot)
    assert apply_report(one_slot, IDLE) == 1


def test_an_idle_report_of_a_server_with_several_slots_releases_no_slot(stage):
    stage.register(2)
    _timed_out(stage)
    for _ in range(3):
        assert apply_report(stage, IDLE) == 0
        stage.later(4 * SECOND)


def test_a_count_frees_when_it_leaves_no_room_for_the_run_for_long_enough(stage):
    """Another run may have ended at the server, and its worker may not have received the result yet."""
    stage.register(2, model_type="async", poll_interval=3.0)
    stage.submit(id="one")
    first = stage.start()
    stage.submit(id="two")
    second = stage.start()
    stage.later(MIN_AGE_MS)
    give_up(stage, first)
    assert _count(stage, 2) == _count(stage, 1) == 0
    stage.later(4 * SECOND)
    assert _count(stage, 2) == 0, "the other run had ended"
    for _ in range(2):
        assert _count(stage, 1) == 0
        stage.later(4 * SECOND)
    assert _count(stage, 1) == 1
    assert stage.renewal(second) is not None and rows(stage) == []


# -- servers that report the start of their process ------------------------------------------------------------


def _report_process(stage: Stage, started: str, asked_ms: int | None = None) -> int:
    return apply_report(stage, ServerReport(True, asked_ms=asked_ms, process_started=started))


def test_a_run_has_ended_if_its_process_was_reported_during_the_run_and_has_been_replaced(one_slot):
    stage = one_slot
    stage.submit(id="one")
    active = stage.start()
    stage.later(SECOND)
    assert _report_process(stage, "first") == 0
    give_up(stage, active)
    stage.later(SECOND)
    assert _report_process(stage, "second") == 1


def test_a_run_that_began_after_an_unseen_restart_keeps_its_slot(one_slot):
    """The last report before the run is of the old process, so the run may belong to the new process."""
    stage = one_slot
    assert _report_process(stage, "first") == 0
    stage.later(SECOND)  # A new process starts, and maintenance reads no report meanwhile.
    stage.submit(id="one")
    active = stage.start()
    stage.later(MIN_AGE_MS)
    give_up(stage, active)
    stage.later(SECOND)
    assert _report_process(stage, "second") == 0
    assert len(rows(stage)) == 1


def test_a_late_report_of_the_earlier_process_does_not_count_as_a_new_process(one_slot):
    stage = one_slot
    asked_ms = now_ms()
    stage.later(SECOND)
    stage.submit(id="one")
    active = stage.start()
    stage.later(MIN_AGE_MS)
    give_up(stage, active)
    assert _report_process(stage, "second") == 0
    assert _report_process(stage, "first", asked_ms) == 0
    assert _report_process(stage, "second") == 0
    assert len(rows(stage)) == 1


# -- crashes between two writes --------------------------------------------------------------------------------


def test_a_worker_that_dies_when_the_end_is_written_leaves_a_slot_that_drains(one_slot, monkeypatch):
    stage = one_slot
    stage.submit(id="one")
    active = stage.start()
    with monkeypatch.context() as crashing:
        crashing.setattr(RunSteps, "free", _crash)
        with pytest.raises(ZeroDivisionError):
            give_up(stage, active)
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    assert stage.room.taken() == {"gpu-slot0": "one~1"}


def test_a_slot_whose_release_in_redis_failed_is_freed_by_the_next_check(one_slot, monkeypatch):
    stage = one_slot
    _timed_out(stage)
    following = stage.submit()
    with monkeypatch.context() as crashing:
        crashing.setattr(RunSteps, "free", _crash)
        apply_report(stage, UP_AND_IDLE)
    assert rows(stage) == [] and stage.room.taken() == {"gpu-slot0": "one~1"}
    assert quarantined_slots.sync_leases(stage.dispatcher) == 1
    assert stage.offered() == [following]


def test_a_lost_lease_of_a_quarantined_slot_is_written_again(one_slot):
    """A failover to an older replica has lost this lease, and the queue is open."""
    stage = one_slot
    _timed_out(stage)
    stage.redis.delete(stage.room.key("leases:one~1"), stage.room.key("slots"), stage.room.key("leases"))
    assert quarantined_slots.sync_leases(stage.dispatcher) == 1
    assert quarantined_slots.sync_leases(stage.dispatcher) == 0
    assert stage.room.taken() == {"gpu-slot0": "one~1"}


def test_maintenance_leaves_the_lease_of_a_worker_that_is_still_canceling_its_run(one_slot):
    stage = one_slot
    stage.submit(id="one", ttl_s=5)
    active = stage.start()
    stage.later(5 * SECOND)
    deadlines.expire_deadlines(stage.dispatcher)
    assert quarantined_slots.sync_leases(stage.dispatcher) == passes.restore_missed(stage.dispatcher) == 0
    assert stage.renewal(active) is Renewal.CANCEL


def test_the_slot_of_a_job_that_is_requeued_to_be_resumed_is_not_quarantined(one_slot):
    stage = one_slot
    stage.submit(id="one")
    stage.start()
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    assert rows(stage) == [] and stage.job("one").why is Reason.LEASE_EXPIRED
    stage.settle(stage.start())
    assert rows(stage) == [] and stage.free() == 1


def _crash(*_: object, **__: object) -> None:
    raise ZeroDivisionError


# -- the explanation in the status -----------------------------------------------------------------------------


def test_the_status_of_a_waiting_job_names_the_quarantined_slot_but_no_job_of_another_tenant(one_slot):
    stage = one_slot
    _timed_out(stage)
    jobs = {tenant: stage.submit(tenant=tenant) for tenant in ("default", "acme")}
    statuses = {tenant: stage.explained(job_id) for tenant, job_id in jobs.items()}
    end = "timed out here at 2027-01-15T08:00:05Z, and its server may still run it"
    assert f"slot gpu-slot0 is withheld: job 'one' {end}" in statuses["default"]
    assert f"slot gpu-slot0 is withheld: another tenant's job {end}" in statuses["acme"]
