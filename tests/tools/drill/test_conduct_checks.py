"""Each violation alone is found, and the allowed case next to it is not."""

from collections.abc import Mapping

import pytest

from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.values import Event
from tools.drill.conduct_checks import (
    Charge,
    ConductReport,
    Limit,
    PendingMessage,
    Snapshot,
    StuckWatch,
    duplicate_accepts,
    over_limits,
    undue_charges,
    undue_crashes,
    undue_retries,
    unexpected_ends,
    webhook_faults,
)
from tools.drill.history_checks import Run
from tools.drill.webhook_receiver import Delivery

S = 1_000_000_000


def run(
    job_id: str, start_s: float, end_s: float, outcome: str = "completed", server: str = "a", attempt: int = 1
) -> Run:
    return Run(job_id, attempt, server, 0, round(start_s * S), round(end_s * S), outcome)


def failed_attempt(why: Reason, start_s: float = 10, end_s: float = 20) -> Mapping[str, list[Event]]:
    """Return the events of a job j whose first attempt ended for this reason."""
    return {
        "j": [
            Event(1, "j", "job.enqueued", 0, 0, {"why": "submitted"}),
            Event(2, "j", "job.started", round(start_s * 1000), 1, {"why": "started"}),
            Event(3, "j", "job.enqueued", round(end_s * 1000), 1, {"why": str(why)}),
        ]
    }


# -- retries and crashes -----------------------------------------------------------------------------------


def test_a_retry_is_due_when_the_server_answered_with_an_error() -> None:
    assert undue_retries(failed_attempt(Reason.SERVER_ERROR), [run("j", 10, 20, "error")]) == []


@pytest.mark.parametrize("outcome", ["completed", "cut", "canceled"])
@pytest.mark.parametrize("why", [Reason.SERVER_ERROR, Reason.RETRIES_EXHAUSTED])
def test_a_retry_without_an_error_of_the_server_is_undue(why: Reason, outcome: str) -> None:
    assert len(undue_retries(failed_attempt(why), [run("j", 10, 20, outcome)])) == 1
    assert len(undue_retries(failed_attempt(why), [])) == 1


def test_an_attempt_that_costs_nothing_is_not_counted_as_a_retry() -> None:
    assert (
        undue_retries(failed_attempt(Reason.SERVER_BUSY), [])
        == undue_retries(failed_attempt(Reason.HANDED_BACK), [])
        == []
    )


@pytest.mark.parametrize("why", [Reason.LEASE_EXPIRED, Reason.SERVER_LOST, Reason.CRASHES_EXHAUSTED])
def test_a_crash_is_due_only_if_a_process_died_during_the_run(why: Reason) -> None:
    runs = [run("j", 10, 20)]
    assert undue_crashes(failed_attempt(why), runs, [(15 * S, 16 * S)], 0) == []
    assert len(undue_crashes(failed_attempt(why), runs, [(40 * S, 41 * S)], 0)) == 1
    assert len(undue_crashes(failed_attempt(why), runs, [], 0)) == 1


def test_a_crash_of_a_run_that_no_server_saw_is_judged_by_the_times_of_the_database() -> None:
    assert undue_crashes(failed_attempt(Reason.LEASE_EXPIRED), [], [(115 * S, 116 * S)], -100 * S) == []
    assert len(undue_crashes(failed_attempt(Reason.LEASE_EXPIRED), [], [(15 * S, 16 * S)], -100 * S)) == 1


def test_a_run_lasts_until_its_end_is_stored() -> None:
    runs = [run("j", 10, 10.1)]
    assert undue_crashes(failed_attempt(Reason.LEASE_EXPIRED, 10, 30), runs, [(24 * S, 25 * S)], 0) == []
    assert len(undue_crashes(failed_attempt(Reason.LEASE_EXPIRED, 10, 30), runs, [(36 * S, 37 * S)], 0)) == 1


def test_with_a_wrong_clock_a_run_ends_at_the_latest_when_the_next_one_begins() -> None:
    runs = [run("j", 10, 10.1), run("j", 30, 31, attempt=2)]
    assert undue_crashes(failed_attempt(Reason.LEASE_EXPIRED), runs, [(24 * S, 25 * S)], None) == []
    assert len(undue_crashes(failed_attempt(Reason.LEASE_EXPIRED), runs, [(36 * S, 37 * S)], None)) == 1


def test_without_a_trusted_clock_a_run_that_no_server_saw_is_skipped() -> None:
    assert undue_crashes(failed_attempt(Reason.LEASE_EXPIRED), [], [], None) == []


def test_an_end_without_a_crash_requires_no_killed_process() -> None:
    assert undue_crashes(failed_attempt(Reason.SERVER_UNREACHABLE), [run("j", 10, 20)], [], 0) == []


# -- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.FAILED, State.DEAD])
def test_a_job_of_the_drill_must_not_fail(state: State) -> None:
    assert unexpected_ends({"j": state}, {"j"}, {"j"}) == [f"j is {state}"]


def test_only_revoked_jobs_are_canceled_and_only_jobs_with_a_deadline_expire() -> None:
    states = {"canceled": State.CANCELED, "expired": State.EXPIRED, "completed": State.COMPLETED, "on": State.RUNNING}
    assert unexpected_ends(states, {"canceled"}, {"expired"}) == []
    assert unexpected_ends(states, {"expired"}, {"canceled"}) == ["canceled is canceled", "expired is expired"]


def test_a_planned_job_that_became_two_jobs_is_a_duplicate() -> None:
    assert duplicate_accepts({"j1": 1, "j2": 2}) == []
    assert duplicate_accepts({"j1": 1, "j2": 2, "j3": 1}) == ["planned job 1: j1, j3"]


# -- credits -----------------------------------------------------------------------------------------------

HELD, PAID = Charge("reserve", 5, None), Charge("settle", 3, "finished")
FREE = Charge("settle", 0, "retries_exhausted")


def test_each_ended_job_is_charged_once_for_each_of_its_ends() -> None:
    states = {"j": State.COMPLETED, "waits": State.QUEUED}
    assert undue_charges(states, {"j": [HELD, PAID], "waits": [HELD]}, {}) == []
    assert undue_charges(states, {"j": [HELD, FREE, HELD, PAID]}, {}) == []
    for made in ([], [HELD], [HELD, PAID, PAID]):
        kinds = [charge.kind for charge in made]
        assert undue_charges(states, {"j": made}, {}) == [f"j is completed, with the transfers {kinds}"]


def test_a_job_pays_for_no_failure_and_balances_agree() -> None:
    charged = {"j": [HELD, Charge("settle", 3, "retries_exhausted")]}
    assert undue_charges({"j": State.DEAD}, charged, {"acme": ["held 5, and its jobs hold 0"]}) == [
        "acme: held 5, and its jobs hold 0",
        "j cost 3 for retries_exhausted",
    ]


# -- limits ------------------------------------------------------------------------------------------------

HALF = Limit("slots of a", frozenset({"a"}), 1, 100 * S, 200 * S)


def test_a_run_that_exceeds_a_limit_of_concurrent_runs_is_found() -> None:
    assert over_limits([run("1", 110, 130), run("2", 131, 140)], [HALF]) == []
    assert over_limits([run("1", 110, 130), run("2", 120, 140)], [HALF]) == ["2 on a beside 1 others: slots of a"]


def test_a_limit_binds_only_what_starts_while_it_holds_and_where_it_does() -> None:
    before, at_first, after = run("1", 90, 190), run("2", 101, 150), run("3", 201, 210)
    elsewhere = run("4", 120, 130, server="b")
    assert over_limits([before, at_first, after, elsewhere], [HALF]) == []


def test_a_single_run_during_a_drain_exceeds_the_limit() -> None:
    assert over_limits([run("1", 110, 130)], [Limit("drain of a", frozenset({"a"}), 0, 100 * S, 200 * S)])


# -- webhooks ----------------------------------------------------------------------------------------------


def delivery(job_id: str = "j", id_: str = "w", status: str = "completed") -> Delivery:
    return Delivery(id_, job_id, status, 0)


DELIVERED = PendingMessage("w", "j", "delivered")


def wrong_webhooks(
    deliveries: list[Delivery], *messages: PendingMessage, state: State | None = State.COMPLETED
) -> set[str]:
    return {name for name, findings in webhook_faults({"j": state}, deliveries, messages).items() if findings}


def test_a_webhook_may_be_delivered_twice_under_one_id() -> None:
    assert wrong_webhooks([delivery(), delivery()], DELIVERED) == set()


def test_a_webhook_under_two_ids_is_wrong() -> None:
    assert wrong_webhooks([delivery(), delivery(id_="other")], DELIVERED) == {"webhooks with two ids"}


def test_the_webhook_of_an_ended_job_is_missing_whatever_the_database_has() -> None:
    assert wrong_webhooks([], DELIVERED) == wrong_webhooks([]) == {"webhooks not told"}


def test_a_pending_webhook_is_missing_only_if_it_is_overdue() -> None:
    assert wrong_webhooks([], PendingMessage("w", "j", "pending")) == set()
    assert wrong_webhooks([], PendingMessage("w", "j", "pending", overdue=True)) == {"webhooks not told"}


def test_a_webhook_that_waits_too_long_is_reported_as_put_off() -> None:
    assert wrong_webhooks([], PendingMessage("w", "j", "pending", put_off=True)) == {"webhooks put off"}


def test_a_webhook_that_was_given_up_is_reported() -> None:
    assert wrong_webhooks([delivery()], PendingMessage("w", "j", "given_up")) == {"webhooks given up"}


def test_a_webhook_has_the_final_state_of_the_job() -> None:
    assert wrong_webhooks([delivery(status="failed")], DELIVERED) == {"webhooks that are wrong"}


def test_a_job_that_has_not_ended_has_no_webhook() -> None:
    assert wrong_webhooks([], state=State.RUNNING) == set()
    assert wrong_webhooks([delivery()], state=State.RUNNING) == {"webhooks that are wrong"}


# -- stuck -------------------------------------------------------------------------------------------------


def find_stuck(*snapshots: Snapshot) -> dict[str, str]:
    watch = StuckWatch(patience_s=5)
    for n, snapshot in enumerate(snapshots):
        watch.observe(snapshot, n * 2.5)
    return watch.stuck


WAITS = Snapshot({"j": "m"}, {}, {"m": {"other"}}, {"m": 2})
RUNS = Snapshot({}, {"j": "m"}, {"m": {"j"}}, {"m": 2})


def test_a_job_that_waits_beside_a_free_slot_for_long_is_stuck() -> None:
    assert find_stuck(WAITS, WAITS) == {}
    assert find_stuck(WAITS, WAITS, WAITS) == {"j": "waits beside a free slot"}


def test_a_job_that_runs_between_two_snapshots_is_not_stuck() -> None:
    assert find_stuck(WAITS, WAITS, RUNS, WAITS, WAITS) == {}


def test_a_job_that_waits_while_others_of_its_model_are_started_is_not_stuck() -> None:
    """It is far behind them in the queue, and a slot is free for a moment whenever one of them ends."""
    snapshots = [Snapshot({"j": "m"}, {}, {"m": {f"other{n}"}}, {"m": 2}) for n in range(5)]
    assert find_stuck(*snapshots) == {}
    assert find_stuck(*snapshots, snapshots[-1], snapshots[-1], snapshots[-1]) == {"j": "waits beside a free slot"}


def test_a_job_is_not_stuck_while_runs_are_too_short_to_be_seen_at_their_server() -> None:
    snapshots = [Snapshot({"j": "m"} | {f"k{n}": "m" for n in range(left)}, {}, {}, {"m": 2}) for left in (4, 3, 2, 1)]
    assert find_stuck(*snapshots) == {}
    assert find_stuck(*snapshots, snapshots[-1], snapshots[-1], snapshots[-1]) == {
        "j": "waits beside a free slot",
        "k0": "waits beside a free slot",
    }
    elsewhere = [Snapshot({"j": "m"} | {f"k{n}": "o" for n in range(left)}, {}, {}, {"m": 2}) for left in (3, 2, 1)]
    assert find_stuck(*elsewhere) == {"j": "waits beside a free slot"}


def test_a_job_that_waits_for_a_taken_slot_is_not_stuck() -> None:
    full = Snapshot({"j": "m"}, {}, {"m": {"one", "other"}}, {"m": 2})
    assert find_stuck(full, full, full) == {}


def test_a_running_job_that_no_server_runs_is_stuck() -> None:
    ghost = Snapshot({}, {"j": "m"}, {"m": set()}, {"m": 2})
    assert find_stuck(ghost, ghost, ghost) == {"j": "is running in the database, and no server runs it"}
    assert find_stuck(RUNS, RUNS, RUNS) == {}


def test_conduct_is_clean_only_without_any_finding() -> None:
    assert ConductReport({"lies": [], "stuck": []}).clean
    assert not ConductReport({"lies": [], "stuck": ["j"]}).clean
