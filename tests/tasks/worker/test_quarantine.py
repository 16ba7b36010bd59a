"""The end of a run is two facts: its job has ended, and its slot may be used again.

Whatever ends a run here, its slot is withheld until the server's own report no longer shows it, and an emptied Redis,
a dead worker and a dead reaper forget nothing of that (SLOT-1).
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

MOST_MS = SETTINGS.withhold_max_ms


def running(*job_ids: str) -> ServerReport:
    return ServerReport(True, len(job_ids), frozenset(job_ids))


def heed(stage: Stage, report: ServerReport) -> int:
    return passes.apply_reports(stage.dispatcher, {"gpu": report})


def rows(stage: Stage) -> list[tuple[str, str, str]]:
    return [(it.job_id, it.slot, it.reason) for it in quarantine.list_all(stage.database)]


def give_up(
    stage: Stage, task: ActiveRun, kind: OutcomeKind = OutcomeKind.RETRY, server_still_running: str = "timed_out"
) -> State:
    """End a run here that its server may go on with, as its worker would."""
    moved = _end_lingering(stage, task, kind, server_still_running)
    assert moved is not None
    return moved.to


def _end_lingering(stage: Stage, task: ActiveRun, kind: OutcomeKind, server_still_running: str) -> Transition | None:
    config, outcome = (
        stage.dispatcher.catalog.resolve("zimg").config,
        Outcome(kind, code=server_still_running, server_still_running=True),
    )
    decision = decide(task.run, outcome, config, stage.dispatcher.settings, stage.now, canceling=True)
    decision = decision._replace(error=None)
    return end_in_order(stage.dispatcher, task, decision).moved


# -- what ends a run while its server goes on ------------------------------------------------------------------


def _timed_out(stage: Stage) -> tuple[str, State]:
    job_id, task = stage.submit(id="one"), stage.start()
    stage.later(MIN_AGE_MS)
    return job_id, give_up(stage, task)


def _not_confirmed(stage: Stage) -> tuple[str, State]:
    job_id, task = stage.submit(id="one"), stage.start()
    stage.dispatcher.cancel(job_id)
    stage.later(MIN_AGE_MS)
    return job_id, give_up(stage, task, OutcomeKind.CANCELED, "canceled")


def _server_away(stage: Stage) -> tuple[str, State]:
    job_id, task = stage.submit(id="one"), stage.start()
    stage.later(MIN_AGE_MS)
    return job_id, give_up(stage, task, OutcomeKind.LOST, "server_lost")


def _overdue(stage: Stage) -> tuple[str, State]:
    """Its worker has told the server, which goes on, and learns that it is over."""
    job_id, task = stage.submit(id="one", ttl_s=5), stage.start()
    stage.later(MIN_AGE_MS)
    assert deadlines.expire_deadlines(stage.dispatcher) == 1
    assert _end_lingering(stage, task, OutcomeKind.CANCELED, "canceled") is None
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
    job_id, task = stage.submit(id="one"), stage.start()
    stage.remote(task)
    stage.later(MIN_AGE_MS)
    assert hand_back(stage.dispatcher, task)
    stage.dispatcher.cancel(job_id)
    stage.later(LEASE_MS + SECOND)
    passes.reap(stage.dispatcher)
    stage.told.offers.clear()
    return job_id, State.CANCELED


def test_a_run_that_waited_for_an_earlier_request_has_its_longest_time_behind_that(stage: Stage) -> None:
    stage.register(max_poll_time=60)
    stage.submit()
    assert hand_back(stage.dispatcher, stage.start())
    task = stage.start()
    for ended, later_ms in ((0, 149 * SECOND), (1, SECOND)):
        stage.later(later_ms)
        assert stage.renewal(task) is Renewal.RENEWED
        assert deadlines.end_overlong_runs(stage.dispatcher, decide_end) == ended


def _hung(stage: Stage) -> tuple[str, State]:
    """Its worker renews, and has forgotten the run."""
    job_id = stage.submit(id="one")
    task = stage.start()
    stage.later(60 * SECOND + 29 * SECOND)
    assert stage.renewal(task) is Renewal.RENEWED
    assert deadlines.end_overlong_runs(stage.dispatcher, decide_end) == 0
    stage.later(SECOND)
    assert deadlines.end_overlong_runs(stage.dispatcher, decide_end) == 1
    assert deadlines.end_overlong_runs(stage.dispatcher, decide_end) == 0
    assert stage.renewal(task) is Renewal.LOST
    assert deadlines.promote_due_jobs(stage.dispatcher) == 0  # It waits as after any other retry.
    return job_id, State.DELAYED


Ended = Callable[[Stage], tuple[str, State]]
ENDS = [
    _timed_out,
    _not_confirmed,
    _server_away,
    _overdue,
    _overdue_and_dead,
    _canceled_and_dead,
    _canceled_before_it_was_resumed,
    _hung,
]
however = pytest.mark.parametrize("ended", [pytest.param(it, id=it.__name__[1:]) for it in ENDS])


@pytest.fixture
def one_slot(stage: Stage) -> Stage:
    stage.register(1, max_poll_time=60.0)
    return stage


@however
def test_slot_1_a_slot_is_withheld_until_its_servers_report_no_longer_shows_the_run(one_slot, ended):
    stage = one_slot
    job_id, state = ended(stage)
    assert stage.state(job_id) is state
    assert [it[:2] for it in rows(stage)] == [("one", "gpu-slot0")]
    following = stage.submit()
    for _ in range(5):
        stage.later(LEASE_MS)
        passes.reap(stage.dispatcher)
        heed(stage, running("one"))
        quarantined_slots.sync_leases(stage.dispatcher)
        passes.reconcile(stage.dispatcher)
        passes.sweep(stage.dispatcher)
        assert following not in stage.offered(), "its server is at another run"
        assert [it.owner for it, _ in stage.dispatcher.leases.list_all(["zimg"])["zimg"]] == [QUARANTINE_OWNER]
    assert passes.find_violations(stage.dispatcher, {}) == set()
    assert heed(stage, UP_AND_IDLE) == 1
    assert rows(stage) == [] and {following, "one"} & set(stage.offered()), "at once, not at the next sweep"


@however
def test_an_emptied_redis_does_not_forget_what_drains(one_slot, ended):
    stage = one_slot
    ended(stage)
    stage.submit()
    stage.offered()
    stage.lose_redis()
    passes.sweep(stage.dispatcher)
    assert stage.offered() == [] and stage.room.taken() == {"gpu-slot0": f"one~{stage.job('one').attempt}"}
    heed(stage, running("one"))
    assert stage.offered() == []
    assert heed(stage, UP_AND_IDLE) == 1
    assert len(stage.offered()) == 1


@however
def test_a_slot_is_not_withheld_for_longer_than_is_set(one_slot, ended):
    stage = one_slot
    ended(stage)
    stage.submit()
    stage.offered()
    (row,) = quarantine.list_all(stage.database)
    assert row.until_ms - row.since_ms == MOST_MS
    stage.later(row.until_ms - 1 - stage.now)
    heed(stage, running("one"))
    passes.reap(stage.dispatcher)
    assert len(rows(stage)) == 1
    stage.later(LEASE_MS + SECOND)
    passes.reap(stage.dispatcher)
    passes.sweep(stage.dispatcher)
    assert rows(stage) == [] and len(stage.offered()) == 1


@pytest.mark.parametrize("report", [DOWN, ServerReport(True)], ids=["down", "says nothing"])
def test_a_server_that_does_not_say_what_it_runs_lets_go_of_nothing(one_slot, report):
    stage = one_slot
    _timed_out(stage)
    before = stage.room.dump()
    assert heed(stage, report) == 0
    assert stage.room.dump() == before and len(rows(stage)) == 1


_TOOK_MS = 4 * SECOND
_USUAL_MS = 3 * _TOOK_MS


def _timed_out_where_runs_are_short(stage: Stage) -> None:
    stage.submit()
    task = stage.start()
    stage.later(_TOOK_MS)
    stage.settle(task)
    _timed_out(stage)


@pytest.mark.parametrize("report", [DOWN, ServerReport(True)], ids=["down", "says nothing"])
def test_where_nothing_tells_the_end_of_a_run_its_slot_is_withheld_for_three_times_what_runs_take(one_slot, report):
    stage = one_slot
    _timed_out_where_runs_are_short(stage)
    heed(stage, report)
    stage.later(_USUAL_MS - 1)
    quarantined_slots.sync_leases(stage.dispatcher)
    assert len(rows(stage)) == 1
    stage.later(1)
    quarantined_slots.sync_leases(stage.dispatcher)
    assert rows(stage) == []


@pytest.mark.parametrize("tells", ["its id", "a count", "its status"])
def test_a_slot_whose_server_tells_that_the_run_goes_on_is_withheld_for_longer_than_runs_take(one_slot, tells):
    stage = one_slot
    _timed_out_where_runs_are_short(stage)
    stage.later(_USUAL_MS - SECOND)
    if tells == "its status":
        passes.note_running(stage.dispatcher, quarantine.list_all(stage.database)[0])
    heed(stage, {"its id": running("one"), "a count": ServerReport(True, 1)}.get(tells, ServerReport(True)))
    stage.later(2 * SECOND)
    quarantined_slots.sync_leases(stage.dispatcher)
    assert len(rows(stage)) == 1


def test_the_servers_own_end_of_a_run_frees_its_slot_whoever_ended_the_job(one_slot):
    """The deadline passed, and then the result came after all."""
    stage = one_slot
    stage.submit(id="one", ttl_s=5)
    task, following = stage.start(), stage.submit()
    stage.later(5 * SECOND)
    deadlines.expire_deadlines(stage.dispatcher)
    assert stage.renewal(task) is Renewal.CANCEL and len(rows(stage)) == 1
    assert stage.settle(task).moved is None
    assert rows(stage) == [] and stage.offered() == [following]


def test_a_late_answer_to_a_stale_worker_lets_the_slot_go(one_slot):
    stage = one_slot
    stage.submit(id="one", ttl_s=5)
    task, following = stage.start(), stage.submit()
    stage.later(5 * SECOND)
    deadlines.expire_deadlines(stage.dispatcher)
    passes.reap(stage.dispatcher)
    assert stage.room.taken() == {"gpu-slot0": "one~1"}
    assert stage.settle(task).moved is None
    assert stage.offered() == [following]


def test_a_timed_out_job_waits_for_its_retry_and_runs_beside_its_former_run(stage):
    stage.register(2)
    stage.submit(id="one")
    give_up(stage, stage.start())
    stage.later(60 * SECOND)
    assert deadlines.promote_due_jobs(stage.dispatcher) == 1
    again = stage.start()
    assert (again.run.job.id, again.run.attempt, again.lease.slot) == ("one", 2, "gpu-slot1")
    stage.later(MIN_AGE_MS)
    assert heed(stage, running("one.1", "one.2")) == 0 and stage.free() == 0, "nobody is a stranger"
    assert heed(stage, running("one.2")) == 1 and stage.free() == 1
    assert stage.renewal(again) is Renewal.RENEWED


def test_a_run_of_ours_that_drains_takes_no_further_slot(stage):
    stage.register(3)
    stage.submit(id="one")
    task = stage.start()
    stage.later(MIN_AGE_MS)
    give_up(stage, task)
    heed(stage, running("one"))
    assert stage.free() == 2


def test_a_withheld_slot_counts_for_its_tenant(stage):
    stage.register(2, policy="fair", tenant_slots=1)
    stage.submit(id="one")
    give_up(stage, stage.start(), OutcomeKind.CANCELED)
    stage.submit()
    assert stage.offered() == []
    stage.later(MIN_AGE_MS)
    heed(stage, UP_AND_IDLE)
    assert len(stage.offered()) == 1


# -- servers that only count -----------------------------------------------------------------------------------


def _count(stage: Stage, active: int) -> int:
    return heed(stage, ServerReport(True, active))


def test_a_server_that_counts_nothing_has_let_go(one_slot):
    stage = one_slot
    _timed_out(stage)
    assert _count(stage, 1) == 0
    assert _count(stage, 0) == 1


IDLE = ServerReport(True, is_idle=True)


def test_an_idle_server_of_one_slot_runs_nothing(one_slot):
    _timed_out(one_slot)
    assert heed(one_slot, IDLE) == 1


def test_an_idle_server_of_several_slots_may_run_in_the_others(stage):
    stage.register(2)
    _timed_out(stage)
    for _ in range(3):
        assert heed(stage, IDLE) == 0
        stage.later(4 * SECOND)


def test_a_count_frees_when_it_leaves_no_room_for_the_run_for_long_enough(stage):
    """Another run may have ended at the server, and its worker not know of it yet."""
    stage.register(2, model_type="async", poll_interval=3.0)
    stage.submit(id="one")
    first = stage.start()
    stage.submit(id="two")
    second = stage.start()
    stage.later(MIN_AGE_MS)
    give_up(stage, first)
    assert _count(stage, 2) == _count(stage, 1) == 0
    stage.later(4 * SECOND)
    assert _count(stage, 2) == 0, "it was the other that had ended"
    for _ in range(2):
        assert _count(stage, 1) == 0
        stage.later(4 * SECOND)
    assert _count(stage, 1) == 1
    assert stage.renewal(second) is not None and rows(stage) == []


# -- servers that tell their processes apart -------------------------------------------------------------------


def _process(stage: Stage, started: str, asked_ms: int | None = None) -> int:
    return heed(stage, ServerReport(True, asked_ms=asked_ms, process_started=started))


def test_a_run_has_ended_with_the_process_that_was_seen_while_it_went_on(one_slot):
    stage = one_slot
    stage.submit(id="one")
    task = stage.start()
    stage.later(SECOND)
    assert _process(stage, "first") == 0
    give_up(stage, task)
    stage.later(SECOND)
    assert _process(stage, "second") == 1


def test_a_run_that_began_after_an_unseen_restart_keeps_its_slot(one_slot):
    """The process was asked before the restart and long after: the run is in the process that answers now."""
    stage = one_slot
    assert _process(stage, "first") == 0
    stage.later(SECOND)  # Another process begins, and nobody asks.
    stage.submit(id="one")
    task = stage.start()
    stage.later(MIN_AGE_MS)
    give_up(stage, task)
    stage.later(SECOND)
    assert _process(stage, "second") == 0
    assert len(rows(stage)) == 1


def test_a_late_report_of_the_process_before_shows_no_new_process(one_slot):
    stage = one_slot
    asked_ms = now_ms()
    stage.later(SECOND)
    stage.submit(id="one")
    task = stage.start()
    stage.later(MIN_AGE_MS)
    give_up(stage, task)
    assert _process(stage, "second") == 0
    assert _process(stage, "first", asked_ms) == 0
    assert _process(stage, "second") == 0
    assert len(rows(stage)) == 1


# -- deaths between two effects --------------------------------------------------------------------------------


def test_a_worker_that_dies_when_the_end_is_written_leaves_a_slot_that_drains(one_slot, monkeypatch):
    stage = one_slot
    stage.submit(id="one")
    task = stage.start()
    with monkeypatch.context() as dying:
        dying.setattr(RunSteps, "free", _dies)
        with pytest.raises(ZeroDivisionError):
            give_up(stage, task)
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    assert stage.room.taken() == {"gpu-slot0": "one~1"}


def test_who_dies_when_the_record_has_let_go_leaves_a_slot_that_the_next_look_frees(one_slot, monkeypatch):
    stage = one_slot
    _timed_out(stage)
    following = stage.submit()
    with monkeypatch.context() as dying:
        dying.setattr(RunSteps, "free", _dies)
        heed(stage, UP_AND_IDLE)
    assert rows(stage) == [] and stage.room.taken() == {"gpu-slot0": "one~1"}
    assert quarantined_slots.sync_leases(stage.dispatcher) == 1
    assert stage.offered() == [following]


def test_a_lease_that_drains_and_was_lost_alone_is_written_again(one_slot):
    """An older copy of Redis' data has taken over, and its room is open."""
    stage = one_slot
    _timed_out(stage)
    stage.redis.delete(stage.room.key("leases:one~1"), stage.room.key("slots"), stage.room.key("leases"))
    assert quarantined_slots.sync_leases(stage.dispatcher) == 1
    assert quarantined_slots.sync_leases(stage.dispatcher) == 0
    assert stage.room.taken() == {"gpu-slot0": "one~1"}


def test_a_worker_that_is_still_telling_its_server_is_not_disturbed(one_slot):
    stage = one_slot
    stage.submit(id="one", ttl_s=5)
    task = stage.start()
    stage.later(5 * SECOND)
    deadlines.expire_deadlines(stage.dispatcher)
    assert quarantined_slots.sync_leases(stage.dispatcher) == passes.restore_missed(stage.dispatcher) == 0
    assert stage.renewal(task) is Renewal.CANCEL


def test_a_slot_of_a_job_that_goes_back_to_be_resumed_is_not_withheld(one_slot):
    stage = one_slot
    stage.submit(id="one")
    stage.start()
    stage.later(LEASE_MS)
    passes.reap(stage.dispatcher)
    assert rows(stage) == [] and stage.job("one").why is Reason.LEASE_EXPIRED
    stage.settle(stage.start())
    assert rows(stage) == [] and stage.free() == 1


def _dies(*_: object, **__: object) -> None:
    raise ZeroDivisionError


# -- what people are told --------------------------------------------------------------------------------------


def test_a_waiting_job_is_told_of_the_slot_that_is_withheld_and_not_of_another_tenants_job(one_slot):
    stage = one_slot
    _timed_out(stage)
    jobs = {tenant: stage.submit(tenant=tenant) for tenant in ("default", "acme")}
    told = {tenant: stage.explained(job_id) for tenant, job_id in jobs.items()}
    ended = "timed out here at 2027-01-15T08:00:05Z, and its server may still run it"
    assert f"slot gpu-slot0 is withheld: job 'one' {ended}" in told["default"]
    assert f"slot gpu-slot0 is withheld: another tenant's job {ended}" in told["acme"]
