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
from tests.support.harness import DOWN, LEASE_MS, SECOND, SETTINGS, UP_AND_IDLE, Harness

MAX_QUARANTINE_MS = SETTINGS.withhold_max_ms


def running_report(*job_ids: str) -> ServerReport:
    return ServerReport(True, len(job_ids), frozenset(job_ids))


def apply_report(harness: Harness, report: ServerReport) -> int:
    return passes.apply_reports(harness.dispatcher, {"gpu": report})


def rows(harness: Harness) -> list[tuple[str, str, str]]:
    return [(row.job_id, row.slot, row.reason) for row in quarantine.list_all(harness.database)]


def give_up(
    harness: Harness, active: ActiveRun, kind: OutcomeKind = OutcomeKind.RETRY, server_still_running: str = "timed_out"
) -> State:
    """End a run that its server may continue, as the worker does, and return the new state of the job."""
    moved = _end_while_server_runs(harness, active, kind, server_still_running)
    assert moved is not None
    return moved.to


def _end_while_server_runs(
    harness: Harness, active: ActiveRun, kind: OutcomeKind, server_still_running: str
) -> Transition | None:
    config, outcome = (
        harness.dispatcher.catalog.resolve("zimg").config,
        Outcome(kind, code=server_still_running, server_still_running=True),
    )
    decision = decide(active.run, outcome, config, harness.dispatcher.settings, harness.now, canceling=True)
    decision = decision._replace(error=None)
    return end_in_order(harness.dispatcher, active, decision).moved


# -- ends of a run that its server continues -------------------------------------------------------------------


def _timed_out(harness: Harness) -> tuple[str, State]:
    job_id, active = harness.submit(id="one"), harness.start()
    harness.later(MIN_AGE_MS)
    return job_id, give_up(harness, active)


def _not_confirmed(harness: Harness) -> tuple[str, State]:
    job_id, active = harness.submit(id="one"), harness.start()
    harness.dispatcher.cancel(job_id)
    harness.later(MIN_AGE_MS)
    return job_id, give_up(harness, active, OutcomeKind.CANCELED, "canceled")


def _server_away(harness: Harness) -> tuple[str, State]:
    job_id, active = harness.submit(id="one"), harness.start()
    harness.later(MIN_AGE_MS)
    return job_id, give_up(harness, active, OutcomeKind.LOST, "server_lost")


def _overdue(harness: Harness) -> tuple[str, State]:
    """The worker has canceled the run at the server, which continues, and finds that the job has ended."""
    job_id, active = harness.submit(id="one", ttl_s=5), harness.start()
    harness.later(MIN_AGE_MS)
    assert deadlines.expire_deadlines(harness.dispatcher) == 1
    assert _end_while_server_runs(harness, active, OutcomeKind.CANCELED, "canceled") is None
    return job_id, State.EXPIRED


def _overdue_and_dead(harness: Harness) -> tuple[str, State]:
    job_id = harness.submit(id="one", ttl_s=5)
    harness.start()
    harness.later(MIN_AGE_MS)
    assert deadlines.expire_deadlines(harness.dispatcher) == 1
    passes.reap(harness.dispatcher)
    return job_id, State.EXPIRED


def _canceled_and_dead(harness: Harness) -> tuple[str, State]:
    job_id = harness.submit(id="one")
    harness.start()
    harness.dispatcher.cancel(job_id)
    harness.later(MIN_AGE_MS)
    passes.reap(harness.dispatcher)
    return job_id, State.CANCELED


def _canceled_before_it_was_resumed(harness: Harness) -> tuple[str, State]:
    job_id, active = harness.submit(id="one"), harness.start()
    harness.remote(active)
    harness.later(MIN_AGE_MS)
    assert hand_back(harness.dispatcher, active)
    harness.dispatcher.cancel(job_id)
    harness.later(LEASE_MS + SECOND)
    passes.reap(harness.dispatcher)
    harness.notifications.offers.clear()
    return job_id, State.CANCELED


def test_the_time_limit_of_a_run_begins_after_the_wait_for_an_earlier_request(harness: Harness) -> None:
    harness.register(max_poll_time=60)
    harness.submit()
    assert hand_back(harness.dispatcher, harness.start())
    active = harness.start()
    for ended, later_ms in ((0, 149 * SECOND), (1, SECOND)):
        harness.later(later_ms)
        assert harness.renewal(active) is Renewal.RENEWED
        assert deadlines.end_overlong_runs(harness.dispatcher, decide_end) == ended


def _hung(harness: Harness) -> tuple[str, State]:
    """The worker renews the lease, but does not end the run."""
    job_id = harness.submit(id="one")
    active = harness.start()
    harness.later(60 * SECOND + 29 * SECOND)
    assert harness.renewal(active) is Renewal.RENEWED
    assert deadlines.end_overlong_runs(harness.dispatcher, decide_end) == 0
    harness.later(SECOND)
    assert deadlines.end_overlong_runs(harness.dispatcher, decide_end) == 1
    assert deadlines.end_overlong_runs(harness.dispatcher, decide_end) == 0
    assert harness.renewal(active) is Renewal.LOST
    assert deadlines.promote_due_jobs(harness.dispatcher) == 0  # The job waits for its retry delay.
    return job_id, State.DELAYED


ENDS: list[Callable[[Harness], tuple[str, State]]] = [
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
def one_slot(harness: Harness) -> Harness:
    harness.register(1, max_poll_time=60.0)
    return harness


@each_end
def test_slot_1_a_slot_is_quarantined_until_its_servers_report_no_longer_shows_the_run(one_slot, end_run):
    harness = one_slot
    job_id, state = end_run(harness)
    assert harness.state(job_id) is state
    assert [row[:2] for row in rows(harness)] == [("one", "gpu-slot0")]
    following = harness.submit()
    for _ in range(5):
        harness.later(LEASE_MS)
        passes.reap(harness.dispatcher)
        apply_report(harness, running_report("one"))
        quarantined_slots.sync_leases(harness.dispatcher)
        passes.reconcile(harness.dispatcher)
        passes.sweep(harness.dispatcher)
        assert following not in harness.offered(), "the server still runs the earlier job"
        assert [lease.owner for lease, _ in harness.dispatcher.leases.list_all(["zimg"])["zimg"]] == [QUARANTINE_OWNER]
    assert passes.find_violations(harness.dispatcher, {}) == set()
    assert apply_report(harness, UP_AND_IDLE) == 1
    assert rows(harness) == [] and {following, "one"} & set(harness.offered()), (
        "the slot is offered at once, not at the next sweep"
    )


@each_end
def test_a_quarantined_slot_stays_quarantined_after_redis_lost_its_data(one_slot, end_run):
    harness = one_slot
    end_run(harness)
    harness.submit()
    harness.offered()
    harness.lose_redis()
    passes.sweep(harness.dispatcher)
    assert harness.offered() == [] and harness.queue.taken() == {"gpu-slot0": f"one~{harness.job('one').attempt}"}
    apply_report(harness, running_report("one"))
    assert harness.offered() == []
    assert apply_report(harness, UP_AND_IDLE) == 1
    assert len(harness.offered()) == 1


@each_end
def test_a_slot_is_not_quarantined_for_longer_than_the_configured_time(one_slot, end_run):
    harness = one_slot
    end_run(harness)
    harness.submit()
    harness.offered()
    (row,) = quarantine.list_all(harness.database)
    assert row.until_ms - row.since_ms == MAX_QUARANTINE_MS
    harness.later(row.until_ms - 1 - harness.now)
    apply_report(harness, running_report("one"))
    passes.reap(harness.dispatcher)
    assert len(rows(harness)) == 1
    harness.later(LEASE_MS + SECOND)
    passes.reap(harness.dispatcher)
    passes.sweep(harness.dispatcher)
    assert rows(harness) == [] and len(harness.offered()) == 1


@pytest.mark.parametrize("report", [DOWN, ServerReport(True)], ids=["down", "says nothing"])
def test_a_report_without_runs_or_counts_releases_no_slot(one_slot, report):
    harness = one_slot
    _timed_out(harness)
    before = harness.queue.dump()
    assert apply_report(harness, report) == 0
    assert harness.queue.dump() == before and len(rows(harness)) == 1


_RUN_MS = 4 * SECOND
_QUARANTINE_MS = 3 * _RUN_MS


def _timed_out_where_runs_are_short(harness: Harness) -> None:
    harness.submit()
    active = harness.start()
    harness.later(_RUN_MS)
    harness.settle(active)
    _timed_out(harness)


@pytest.mark.parametrize("report", [DOWN, ServerReport(True)], ids=["down", "says nothing"])
def test_without_information_a_slot_is_quarantined_for_three_times_the_usual_duration_of_a_run(one_slot, report):
    harness = one_slot
    _timed_out_where_runs_are_short(harness)
    apply_report(harness, report)
    harness.later(_QUARANTINE_MS - 1)
    quarantined_slots.sync_leases(harness.dispatcher)
    assert len(rows(harness)) == 1
    harness.later(1)
    quarantined_slots.sync_leases(harness.dispatcher)
    assert rows(harness) == []


@pytest.mark.parametrize("source", ["id", "count", "status"])
def test_a_slot_stays_quarantined_while_its_server_reports_that_the_run_continues(one_slot, source):
    harness = one_slot
    _timed_out_where_runs_are_short(harness)
    harness.later(_QUARANTINE_MS - SECOND)
    if source == "status":
        passes.note_running(harness.dispatcher, quarantine.list_all(harness.database)[0])
    apply_report(harness, {"id": running_report("one"), "count": ServerReport(True, 1)}.get(source, ServerReport(True)))
    harness.later(2 * SECOND)
    quarantined_slots.sync_leases(harness.dispatcher)
    assert len(rows(harness)) == 1


def test_a_result_from_the_server_frees_the_slot_of_a_job_that_has_already_ended(one_slot):
    """The deadline of the job passed before the result arrived."""
    harness = one_slot
    harness.submit(id="one", ttl_s=5)
    active, following = harness.start(), harness.submit()
    harness.later(5 * SECOND)
    deadlines.expire_deadlines(harness.dispatcher)
    assert harness.renewal(active) is Renewal.CANCEL and len(rows(harness)) == 1
    assert harness.settle(active).moved is None
    assert rows(harness) == [] and harness.offered() == [following]


def test_a_late_response_to_a_stale_worker_releases_the_slot(one_slot):
    harness = one_slot
    harness.submit(id="one", ttl_s=5)
    active, following = harness.start(), harness.submit()
    harness.later(5 * SECOND)
    deadlines.expire_deadlines(harness.dispatcher)
    passes.reap(harness.dispatcher)
    assert harness.queue.taken() == {"gpu-slot0": "one~1"}
    assert harness.settle(active).moved is None
    assert harness.offered() == [following]


def test_the_retry_of_a_timed_out_job_may_run_at_the_same_time_as_its_earlier_run(harness):
    harness.register(2)
    harness.submit(id="one")
    give_up(harness, harness.start())
    harness.later(60 * SECOND)
    assert deadlines.promote_due_jobs(harness.dispatcher) == 1
    again = harness.start()
    assert (again.run.job.id, again.run.attempt, again.lease.slot) == ("one", 2, "gpu-slot1")
    harness.later(MIN_AGE_MS)
    assert apply_report(harness, running_report("one.1", "one.2")) == 0 and harness.free() == 0, (
        "neither run is foreign"
    )
    assert apply_report(harness, running_report("one.2")) == 1 and harness.free() == 1
    assert harness.renewal(again) is Renewal.RENEWED


def test_a_run_in_a_quarantined_slot_does_not_occupy_a_second_slot(harness):
    harness.register(3)
    harness.submit(id="one")
    active = harness.start()
    harness.later(MIN_AGE_MS)
    give_up(harness, active)
    apply_report(harness, running_report("one"))
    assert harness.free() == 2


def test_a_quarantined_slot_counts_for_its_tenant(harness):
    harness.register(2, policy="fair", tenant_slots=1)
    harness.submit(id="one")
    give_up(harness, harness.start(), OutcomeKind.CANCELED)
    harness.submit()
    assert harness.offered() == []
    harness.later(MIN_AGE_MS)
    apply_report(harness, UP_AND_IDLE)
    assert len(harness.offered()) == 1


# -- servers that only count -----------------------------------------------------------------------------------


def _count(harness: Harness, active: int) -> int:
    return apply_report(harness, ServerReport(True, active))


def test_a_count_of_zero_releases_the_slot(one_slot):
    harness = one_slot
    _timed_out(harness)
    assert _count(harness, 1) == 0
    assert _count(harness, 0) == 1


IDLE = ServerReport(True, is_idle=True)


def test_an_idle_server_of_one_slot_runs_nothing(one_slot):
    _timed_out(one_slot)
    assert apply_report(one_slot, IDLE) == 1


def test_an_idle_report_of_a_server_with_several_slots_releases_no_slot(harness):
    harness.register(2)
    _timed_out(harness)
    for _ in range(3):
        assert apply_report(harness, IDLE) == 0
        harness.later(4 * SECOND)


def test_a_slot_is_freed_after_the_reported_count_has_excluded_its_run_for_long_enough(harness):
    """Another run may have ended at the server, and its worker may not have received the result yet."""
    harness.register(2, model_type="async", poll_interval=3.0)
    harness.submit(id="one")
    first = harness.start()
    harness.submit(id="two")
    second = harness.start()
    harness.later(MIN_AGE_MS)
    give_up(harness, first)
    assert _count(harness, 2) == _count(harness, 1) == 0
    harness.later(4 * SECOND)
    assert _count(harness, 2) == 0, "the other run had ended"
    for _ in range(2):
        assert _count(harness, 1) == 0
        harness.later(4 * SECOND)
    assert _count(harness, 1) == 1
    assert harness.renewal(second) is not None and rows(harness) == []


# -- servers that report the start of their process ------------------------------------------------------------


def _report_process(harness: Harness, started: str, asked_ms: int | None = None) -> int:
    return apply_report(harness, ServerReport(True, asked_ms=asked_ms, process_started=started))


def test_a_run_has_ended_if_its_process_was_reported_during_the_run_and_has_been_replaced(one_slot):
    harness = one_slot
    harness.submit(id="one")
    active = harness.start()
    harness.later(SECOND)
    assert _report_process(harness, "first") == 0
    give_up(harness, active)
    harness.later(SECOND)
    assert _report_process(harness, "second") == 1


def test_a_run_that_began_after_an_unseen_restart_keeps_its_slot(one_slot):
    """The last report before the run is of the old process, so the run may belong to the new process."""
    harness = one_slot
    assert _report_process(harness, "first") == 0
    harness.later(SECOND)  # A new process starts, and maintenance reads no report meanwhile.
    harness.submit(id="one")
    active = harness.start()
    harness.later(MIN_AGE_MS)
    give_up(harness, active)
    harness.later(SECOND)
    assert _report_process(harness, "second") == 0
    assert len(rows(harness)) == 1


def test_a_late_report_of_the_earlier_process_does_not_count_as_a_new_process(one_slot):
    harness = one_slot
    asked_ms = now_ms()
    harness.later(SECOND)
    harness.submit(id="one")
    active = harness.start()
    harness.later(MIN_AGE_MS)
    give_up(harness, active)
    assert _report_process(harness, "second") == 0
    assert _report_process(harness, "first", asked_ms) == 0
    assert _report_process(harness, "second") == 0
    assert len(rows(harness)) == 1


# -- crashes between two writes --------------------------------------------------------------------------------


def test_a_worker_that_dies_when_the_end_is_written_leaves_a_slot_that_drains(one_slot, monkeypatch):
    harness = one_slot
    harness.submit(id="one")
    active = harness.start()
    with monkeypatch.context() as crashing:
        crashing.setattr(RunSteps, "free", _crash)
        with pytest.raises(ZeroDivisionError):
            give_up(harness, active)
    harness.later(LEASE_MS)
    passes.reap(harness.dispatcher)
    assert harness.queue.taken() == {"gpu-slot0": "one~1"}


def test_a_slot_whose_release_in_redis_failed_is_freed_by_the_next_check(one_slot, monkeypatch):
    harness = one_slot
    _timed_out(harness)
    following = harness.submit()
    with monkeypatch.context() as crashing:
        crashing.setattr(RunSteps, "free", _crash)
        apply_report(harness, UP_AND_IDLE)
    assert rows(harness) == [] and harness.queue.taken() == {"gpu-slot0": "one~1"}
    assert quarantined_slots.sync_leases(harness.dispatcher) == 1
    assert harness.offered() == [following]


def test_a_lost_lease_of_a_quarantined_slot_is_written_again(one_slot):
    """A failover to an older replica has lost this lease, and the queue is open."""
    harness = one_slot
    _timed_out(harness)
    harness.redis.delete(harness.queue.key("leases:one~1"), harness.queue.key("slots"), harness.queue.key("leases"))
    assert quarantined_slots.sync_leases(harness.dispatcher) == 1
    assert quarantined_slots.sync_leases(harness.dispatcher) == 0
    assert harness.queue.taken() == {"gpu-slot0": "one~1"}


def test_maintenance_leaves_the_lease_of_a_worker_that_is_still_canceling_its_run(one_slot):
    harness = one_slot
    harness.submit(id="one", ttl_s=5)
    active = harness.start()
    harness.later(5 * SECOND)
    deadlines.expire_deadlines(harness.dispatcher)
    assert quarantined_slots.sync_leases(harness.dispatcher) == passes.restore_missed(harness.dispatcher) == 0
    assert harness.renewal(active) is Renewal.CANCEL


def test_the_slot_of_a_job_that_is_requeued_to_be_resumed_is_not_quarantined(one_slot):
    harness = one_slot
    harness.submit(id="one")
    harness.start()
    harness.later(LEASE_MS)
    passes.reap(harness.dispatcher)
    assert rows(harness) == [] and harness.job("one").why is Reason.LEASE_EXPIRED
    harness.settle(harness.start())
    assert rows(harness) == [] and harness.free() == 1


def _crash(*_: object, **__: object) -> None:
    raise ZeroDivisionError


# -- the explanation in the status -----------------------------------------------------------------------------


def test_the_status_of_a_waiting_job_names_the_quarantined_slot_but_no_job_of_another_tenant(one_slot):
    harness = one_slot
    _timed_out(harness)
    jobs = {tenant: harness.submit(tenant=tenant) for tenant in ("default", "acme")}
    statuses = {tenant: harness.explained(job_id) for tenant, job_id in jobs.items()}
    end = "timed out here at 2027-01-15T08:00:05Z, and its server may still run it"
    assert f"slot gpu-slot0 is withheld: job 'one' {end}" in statuses["default"]
    assert f"slot gpu-slot0 is withheld: another tenant's job {end}" in statuses["acme"]
