"""Server reports decide about cooldowns, released leases and quarantined slots."""

from typing import Any
from unittest import mock

import pytest

from routing.dispatch.outcome import OutcomeKind
from routing.maintenance import deadlines
from routing.maintenance.server_report import ServerReport
from routing.queries.explain import explain_job
from routing.queries.server_status import read_servers
from routing.queue.leases import Renewal
from slotkeeper.jobs.states import Reason, State
from tests.support import passes
from tests.support.ends import hand_back
from tests.support.harness import DOWN, OFFER_MS, SECOND, SETTINGS, UP_AND_IDLE, Harness

# -- what the servers say of themselves ------------------------------------------------------------------------


def test_a_server_that_is_down_has_a_longer_cooldown_each_time_and_none_when_it_is_up(harness):
    harness.register(2)
    for cooldown_ms in (1_000, 2_000, 4_000):
        passes.apply_health(harness.dispatcher, {"gpu": DOWN})
        assert harness.free() == 0
        harness.later(cooldown_ms - 1)
        passes.sweep(harness.dispatcher)
        assert harness.free() == 0
        harness.later(1)
        passes.sweep(harness.dispatcher)
        assert harness.free() == 2
    passes.apply_health(harness.dispatcher, {"gpu": DOWN})
    passes.apply_health(harness.dispatcher, {"gpu": UP_AND_IDLE})
    assert harness.free() == 2
    passes.apply_health(harness.dispatcher, {"gpu": DOWN})
    harness.later(1_000)
    passes.sweep(harness.dispatcher)
    assert harness.free() == 2


SILENT = ServerReport(up=True, is_silent=True)


def test_a_server_that_does_not_answer_its_health_check_in_time_gets_jobs_last(harness):
    harness.register(2, server="hung")
    harness.register(1, server="other")
    passes.apply_health(harness.dispatcher, {"hung": SILENT, "other": UP_AND_IDLE})
    jobs = [harness.submit() for _ in range(3)]
    assert [harness.start().lease.server for _ in jobs] == ["other", "hung", "hung"]


def test_a_server_that_answers_again_is_chosen_as_before(harness):
    harness.register(1, server="hung")
    harness.register(1, server="other")
    passes.apply_health(harness.dispatcher, {"hung": SILENT})
    assert "hung" in passes.servers_to_check_now(harness.dispatcher)
    passes.apply_health(harness.dispatcher, {"hung": UP_AND_IDLE})
    status = read_servers(harness.dispatcher.slots, "zimg")["hung"]
    assert (status.silent_since_ms, status.scores["zimg"].silence) == (0, 0)
    assert "hung" not in passes.servers_to_check_now(harness.dispatcher)


def test_explain_says_since_when_the_server_of_a_run_is_silent(harness):
    harness.register(1)
    job_id = harness.submit()
    harness.start()
    passes.apply_health(harness.dispatcher, {"gpu": SILENT})
    harness.later(30_000)
    passes.apply_health(harness.dispatcher, {"gpu": SILENT})
    found = explain_job(harness.dispatcher, harness.living_worker(), harness.job(job_id))
    assert [one.code for one in found.waits_for] == ["server_silent"]
    assert "server 'gpu' has not answered its health check in time since" in found.sentence
    assert read_servers(harness.dispatcher.slots, "zimg")["gpu"].silent_since_ms == harness.now - 30_000


def test_explain_quotes_the_servers_error_until_the_server_is_healthy(harness):
    harness.register(1)
    broken = ServerReport(up=False, why_down="/status is SETUP_FAILED: no weights")
    passes.apply_health(harness.dispatcher, {"gpu": broken})
    job_id = harness.submit()
    assert "says since" in harness.explained(job_id) and "(/status is SETUP_FAILED: no weights)" in harness.explained(
        job_id
    )
    passes.apply_health(harness.dispatcher, {"gpu": DOWN})
    assert "could not be reached since" in harness.explained(job_id)
    passes.apply_health(harness.dispatcher, {"gpu": UP_AND_IDLE})
    assert "SETUP_FAILED" not in harness.explained(job_id)


def test_a_report_without_a_health_check_keeps_the_cooldown_and_its_start_time(harness):
    harness.register(1)
    passes.apply_health(harness.dispatcher, {"gpu": ServerReport(up=None)})
    assert read_servers(harness.dispatcher.slots, "zimg")["gpu"].away_since_ms == 0, (
        "the report starts no cooldown, either"
    )
    passes.apply_health(harness.dispatcher, {"gpu": DOWN})
    harness.submit()
    since = read_servers(harness.dispatcher.slots, "zimg")["gpu"].away_since_ms
    harness.later(100)
    passes.apply_health(harness.dispatcher, {"gpu": ServerReport(up=None)})
    harness.later(100)
    passes.apply_health(harness.dispatcher, {"gpu": DOWN})
    assert read_servers(harness.dispatcher.slots, "zimg")["gpu"].away_since_ms == since == harness.now - 200


def test_a_report_of_a_server_that_is_not_registered_changes_nothing(harness):
    harness.register()
    before = harness.queue.dump()
    passes.apply_health(harness.dispatcher, {"stranger": DOWN, "gpu": UP_AND_IDLE})
    assert harness.queue.dump() == before


def _stale_leases(harness: Harness, report: ServerReport | None, second: ServerReport | None = None) -> int:
    first = {} if report is None else {"gpu": report}
    again = first if second is None else {"gpu": second}
    return passes.end_stale_runs(harness.dispatcher, passes.find_stale_runs(harness.dispatcher, first), again)


def test_a_run_that_its_server_does_not_know_is_ended_and_its_slot_is_released(harness):
    harness.register()
    job_id, following = harness.submit(), harness.submit()
    task = harness.start()
    harness.later(5_000)
    assert _stale_leases(harness, UP_AND_IDLE) == 1
    job = harness.job(job_id)
    assert (job.state, job.why, job.crashes) == (State.QUEUED, Reason.SERVER_LOST, 1)
    assert (job.server, job.remote_id) == ("gpu", None), "the server may have the result of a run that has ended"
    assert harness.renewal(task) is Renewal.LOST and harness.settle(task).moved is None
    assert harness.run_all() == [job_id, following]


def test_a_run_younger_than_five_seconds_is_never_suspected(harness):
    harness.register()
    harness.submit()
    harness.start()
    harness.later(4_999)
    assert passes.find_stale_runs(harness.dispatcher, {"gpu": UP_AND_IDLE}) == []
    harness.later(1)
    assert len(passes.find_stale_runs(harness.dispatcher, {"gpu": UP_AND_IDLE})) == 1


def _resumed_run(harness: Harness) -> str:
    """A run of a second worker, which waits until the request of the first has left the server."""
    harness.register()
    job_id = harness.submit()
    hand_back(harness.dispatcher, harness.start())
    harness.later(SECOND)
    harness.start("w2")
    assert harness.job(job_id).awaits_earlier_request
    return job_id


def test_a_run_that_waits_for_an_earlier_request_is_never_suspected(harness):
    _resumed_run(harness)
    harness.later(60 * SECOND)
    assert passes.find_stale_runs(harness.dispatcher, {"gpu": UP_AND_IDLE}) == []


def test_a_run_that_was_sent_after_a_wait_is_not_suspected_before_five_seconds(harness):
    job = harness.job(_resumed_run(harness))
    harness.later(60 * SECOND)
    assert harness.database.commit(harness.store.sent_write(job.id, job.attempt, harness.now))
    harness.later(4_999)
    assert passes.find_stale_runs(harness.dispatcher, {"gpu": UP_AND_IDLE}) == []
    harness.later(1)
    assert len(passes.find_stale_runs(harness.dispatcher, {"gpu": UP_AND_IDLE})) == 1


def test_a_run_that_is_sent_again_while_it_is_suspected_is_not_ended(harness):
    """Its server did not have it at either look; the worker, which has found out the same, sends it once more."""
    harness.register()
    job_id = harness.submit()
    harness.start()
    harness.later(5_000)
    before = passes.find_stale_runs(harness.dispatcher, {"gpu": UP_AND_IDLE})
    seize = harness.dispatcher.leases.seize

    def sent_again_meanwhile(*args: Any, **named: Any) -> Any:
        assert harness.database.commit(harness.store.sent_write(job_id, 1, harness.now))
        return seize(*args, **named)

    with mock.patch.object(harness.dispatcher.leases, "seize", sent_again_meanwhile):
        assert passes.end_stale_runs(harness.dispatcher, before, {"gpu": UP_AND_IDLE}) == 0
    assert harness.state(job_id) is State.RUNNING


@pytest.mark.parametrize(
    ("report", "suspected"),
    [
        pytest.param(ServerReport(True, 0, None), ["one", "two"], id="a count of zero"),
        pytest.param(ServerReport(True, 1, None), [], id="a count that is not zero says nothing of whom"),
        pytest.param(ServerReport(True, None, None), [], id="no number at all"),
        pytest.param(ServerReport(True, 0, frozenset({"one"})), ["two"], id="ids beat the count"),
        pytest.param(ServerReport(True, 2, frozenset()), ["one", "two"], id="ids beat the count, again"),
        pytest.param(ServerReport(True, 2, frozenset({"one", "two"})), [], id="it knows both"),
        pytest.param(ServerReport(True, 2, frozenset({"one-1", "two-1"})), [], id="by the attempt's id"),
        pytest.param(ServerReport(True, 2, frozenset({"one-2"})), ["one", "two"], id="by another attempt's id"),
        pytest.param(DOWN, [], id="it is down"),
        pytest.param(ServerReport(False, 0, frozenset()), [], id="down, whatever it says"),
        pytest.param(None, [], id="no report"),
    ],
)
def test_only_a_report_that_excludes_a_run_makes_it_stale(harness, report, suspected):
    harness.register(2)
    harness.submit(id="one")
    harness.submit(id="two")
    harness.start()
    harness.start()
    harness.later(60_000)
    reports = {} if report is None else {"gpu": report}
    assert [job.id for job in passes.find_stale_runs(harness.dispatcher, reports)] == suspected


@pytest.mark.parametrize("second", [None, DOWN, ServerReport(True, 1, None)])
def test_a_stale_run_that_the_second_report_does_not_confirm_keeps_its_lease(harness, second):
    harness.register()
    job_id = harness.submit()
    task = harness.start()
    harness.later(5_000)
    suspects = passes.find_stale_runs(harness.dispatcher, {"gpu": UP_AND_IDLE})
    assert passes.end_stale_runs(harness.dispatcher, suspects, {"gpu": second} if second else {}) == 0
    assert harness.state(job_id) is State.RUNNING and harness.renewal(task) is Renewal.RENEWED


def test_a_later_run_of_a_suspect_is_no_suspect(harness):
    harness.register()
    harness.submit()
    task = harness.start()
    harness.later(5_000)
    before = passes.find_stale_runs(harness.dispatcher, {"gpu": UP_AND_IDLE})
    harness.settle(task, OutcomeKind.BUSY, retry_after_s=0.0)
    again = harness.start()
    harness.later(5_000)
    assert passes.end_stale_runs(harness.dispatcher, before, {"gpu": UP_AND_IDLE}) == 0
    assert harness.renewal(again) is Renewal.RENEWED


def test_a_suspected_run_that_has_ended_in_the_meantime_is_not_ended_again(harness):
    harness.register()
    job_id = harness.submit()
    task = harness.start()
    harness.later(5_000)
    before = passes.find_stale_runs(harness.dispatcher, {"gpu": UP_AND_IDLE})
    harness.settle(task)
    assert passes.end_stale_runs(harness.dispatcher, before, {"gpu": UP_AND_IDLE}) == 0
    assert harness.state(job_id) is State.COMPLETED


def test_a_job_whose_server_keeps_dying_becomes_dead(harness):
    harness.register(1, max_crashes=2)
    job_id = harness.submit()
    for _ in range(2):
        harness.start()
        harness.later(5_000)
        assert _stale_leases(harness, UP_AND_IDLE) == 1
    assert harness.state(job_id) is State.DEAD and harness.free() == 1
    assert harness.notifications.ends == [(job_id, State.DEAD)]


@pytest.mark.parametrize("silent", [True, False])
def test_a_stale_lease_is_released_at_the_first_check_only_if_its_worker_is_silent_too(harness, silent):
    harness.register()
    job_id = harness.submit()
    task = harness.start()
    harness.later(5_000)
    if not silent:
        assert harness.renewal(task) is Renewal.RENEWED
    assert passes.apply_reports(harness.dispatcher, {"gpu": UP_AND_IDLE}) == silent
    assert harness.state(job_id) is (State.QUEUED if silent else State.RUNNING)


@pytest.mark.parametrize(
    "report", [DOWN, ServerReport(True), ServerReport(True, 1), ServerReport(True, 1, frozenset({"one"}))]
)
def test_a_silent_worker_alone_frees_nothing(harness, report):
    harness.register()
    harness.submit(id="one")
    harness.start()
    harness.later(5_500)
    before = harness.queue.dump()
    assert passes.apply_reports(harness.dispatcher, {"gpu": report}) == 0
    assert harness.queue.dump() == before


def test_servers_that_were_down_and_servers_of_silent_workers_are_checked_first(harness):
    for name in ("calm", "down", "silent"):
        harness.register(1, server=name)
    for _ in range(3):
        harness.submit()
    tasks = {task.run.server: task for task in (harness.start(f"w{n}") for n in range(3))}
    assert passes.servers_to_check_now(harness.dispatcher) == set()
    passes.apply_health(harness.dispatcher, {"down": DOWN})
    harness.later(2 * SETTINGS.renew_every_ms + 1)
    for name in ("calm", "down"):
        harness.renewal(tasks[name])
    assert passes.servers_to_check_now(harness.dispatcher) == {"down", "silent"}


def test_an_open_offer_does_not_cause_an_immediate_check_of_its_server(harness):
    harness.register()
    harness.submit()
    harness.later(OFFER_MS - 1)
    assert passes.servers_to_check_now(harness.dispatcher) == set()


@pytest.mark.parametrize(
    ("report", "free"),
    [
        pytest.param(ServerReport(True, 3), 1, id="three run, one is ours"),
        pytest.param(ServerReport(True, 1), 3, id="the one that runs is ours"),
        pytest.param(ServerReport(True, 3, frozenset({"one", "x", "y"})), 1, id="two strangers by name"),
        pytest.param(ServerReport(True, 3, frozenset({"one"})), 3, id="ids beat the count"),
        pytest.param(ServerReport(True, 99), 0, id="more than it has slots"),
        pytest.param(ServerReport(True), 3, id="it does not say"),
        pytest.param(DOWN, 3, id="it is down"),
    ],
)
def test_slot_1_slots_that_others_use_are_not_offered_for_a_while(harness, report, free):
    harness.register(4)
    harness.submit(id="one")
    harness.start()
    passes.apply_reports(harness.dispatcher, {"gpu": report})
    assert harness.free() == free
    harness.later(12_000)
    passes.sweep(harness.dispatcher)
    assert harness.free() == 3


def test_a_job_that_ended_within_two_seconds_is_not_counted_as_an_unknown_run(harness):
    harness.register(2)
    harness.submit(id="one")
    harness.settle(harness.start())
    report = {"gpu": ServerReport(True, 1, frozenset({"one"}))}
    passes.apply_reports(harness.dispatcher, report)
    assert harness.free() == 2
    harness.later(2_001)
    passes.apply_reports(harness.dispatcher, report)
    assert harness.free() == 1, "two seconds later it counts as an unknown run"


def test_an_expired_job_that_its_server_still_runs_keeps_its_slot_quarantined(harness):
    harness.register()
    harness.submit(id="one", ttl_s=1)
    task = harness.start()
    harness.later(1_000)
    deadlines.expire_deadlines(harness.dispatcher)
    harness.settle(task)
    harness.later(60_000)
    passes.apply_reports(harness.dispatcher, {"gpu": ServerReport(True, 1, frozenset({"one"}))})
    harness.submit()
    assert harness.offered() == []


# -- direct traffic --------------------------------------------------------------------------------------------


def test_a_busy_server_is_checked_at_once_and_used_when_it_reports_a_free_slot(harness):
    harness.register(2)
    job_id = harness.submit()
    for _ in range(2):  # the other slot is tried at once
        harness.settle(harness.start(), OutcomeKind.BUSY)
    assert harness.offered() == [] and harness.job(job_id).failures == 0
    assert passes.servers_to_check_now(harness.dispatcher) == {"gpu"}
    passes.apply_reports(harness.dispatcher, {"gpu": ServerReport(True, 2, frozenset({"x", "y"}))})
    assert harness.offered() == [], "other clients still use the server"
    passes.apply_reports(harness.dispatcher, {"gpu": UP_AND_IDLE})
    assert harness.offered() != []
    assert passes.servers_to_check_now(harness.dispatcher) == set()


def test_a_run_that_has_just_ended_and_is_reported_by_its_attempt_id_is_not_direct_traffic(harness):
    harness.register(2)
    job_id = harness.submit()
    harness.settle(harness.start())
    passes.apply_reports(harness.dispatcher, {"gpu": ServerReport(True, 1, frozenset({f"{job_id}-1"}))})
    assert harness.free() == 2


def test_a_health_check_does_not_end_a_cooldown_that_the_server_requested(harness):
    harness.register()
    job_id = harness.submit()
    harness.settle(harness.start(), OutcomeKind.BUSY, retry_after_s=5)
    for _ in range(3):
        passes.apply_reports(harness.dispatcher, {"gpu": UP_AND_IDLE})
        harness.later(SECOND)
    assert harness.offered() == [], "the server requested the length of the cooldown"
    harness.later(2 * SECOND)
    harness.dispatcher.queues.offer("zimg", 1)
    assert harness.job(job_id).state is State.QUEUED and harness.free() == 0, (
        "the cooldown is over, so the job is offered"
    )
