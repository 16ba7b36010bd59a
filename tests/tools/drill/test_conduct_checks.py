"""What must not be is planted once, alone, and found; and its innocent neighbour is not."""

from collections.abc import Mapping

import pytest

from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.values import Event
from tools.drill.conduct_checks import (
    ConductReport,
    Limit,
    PendingMessage,
    Snapshot,
    StuckWatch,
    doubled,
    over_limits,
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


def trail(why: Reason, start_s: float = 10, end_s: float = 20) -> Mapping[str, list[Event]]:
    """Of a job j: its first attempt ended in this way."""
    return {
        "j": [
            Event(1, "j", "job.enqueued", 0, 0, {"why": "submitted"}),
            Event(2, "j", "job.started", round(start_s * 1000), 1, {"why": "started"}),
            Event(3, "j", "job.enqueued", round(end_s * 1000), 1, {"why": str(why)}),
        ]
    }


# -- retries and crashes -----------------------------------------------------------------------------------


def test_a_retry_is_due_when_the_server_answered_with_an_error() -> None:
    assert undue_retries(trail(Reason.SERVER_ERROR), [run("j", 10, 20, "error")]) == []


@pytest.mark.parametrize("outcome", ["completed", "cut", "canceled"])
@pytest.mark.parametrize("why", [Reason.SERVER_ERROR, Reason.RETRIES_EXHAUSTED])
def test_a_retry_without_an_error_of_the_server_is_undue(why: Reason, outcome: str) -> None:
    assert len(undue_retries(trail(why), [run("j", 10, 20, outcome)])) == 1
    assert len(undue_retries(trail(why), [])) == 1


def test_what_costs_nothing_is_no_retry() -> None:
    assert undue_retries(trail(Reason.SERVER_BUSY), []) == undue_retries(trail(Reason.HANDED_BACK), []) == []


@pytest.mark.parametrize("why", [Reason.LEASE_EXPIRED, Reason.SERVER_LOST, Reason.CRASHES_EXHAUSTED])
def test_a_crash_is_due_only_if_something_died_under_the_run(why: Reason) -> None:
    runs = [run("j", 10, 20)]
    assert undue_crashes(trail(why), runs, [(15 * S, 16 * S)], 0) == []
    assert len(undue_crashes(trail(why), runs, [(40 * S, 41 * S)], 0)) == 1
    assert len(undue_crashes(trail(why), runs, [], 0)) == 1


def test_a_crash_of_a_run_that_no_server_saw_is_judged_by_the_record_s_times() -> None:
    assert undue_crashes(trail(Reason.LEASE_EXPIRED), [], [(115 * S, 116 * S)], -100 * S) == []
    assert len(undue_crashes(trail(Reason.LEASE_EXPIRED), [], [(15 * S, 16 * S)], -100 * S)) == 1


def test_a_run_whose_answer_is_on_its_way_dies_with_its_worker() -> None:
    runs = [run("j", 10, 10.1)]
    assert undue_crashes(trail(Reason.LEASE_EXPIRED, 10, 30), runs, [(24 * S, 25 * S)], 0) == []
    assert len(undue_crashes(trail(Reason.LEASE_EXPIRED, 10, 30), runs, [(36 * S, 37 * S)], 0)) == 1


def test_under_a_wrong_clock_a_run_ends_at_the_latest_where_the_next_one_begins() -> None:
    runs = [run("j", 10, 10.1), run("j", 30, 31, attempt=2)]
    assert undue_crashes(trail(Reason.LEASE_EXPIRED), runs, [(24 * S, 25 * S)], None) == []
    assert len(undue_crashes(trail(Reason.LEASE_EXPIRED), runs, [(36 * S, 37 * S)], None)) == 1


def test_times_of_a_wrong_clock_prove_nothing() -> None:
    assert undue_crashes(trail(Reason.LEASE_EXPIRED), [], [], None) == []


def test_an_end_that_is_no_crash_needs_no_death() -> None:
    assert undue_crashes(trail(Reason.SERVER_UNREACHABLE), [run("j", 10, 20)], [], 0) == []


# -- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.FAILED, State.DEAD])
def test_no_job_of_the_drill_deserves_to_fail(state: State) -> None:
    assert unexpected_ends({"j": state}, {"j"}, {"j"}) == [f"j is {state}"]


def test_only_a_revoked_job_is_canceled_and_only_a_mortal_one_expires() -> None:
    states = {"canceled": State.CANCELED, "expired": State.EXPIRED, "completed": State.COMPLETED, "on": State.RUNNING}
    assert unexpected_ends(states, {"canceled"}, {"expired"}) == []
    assert unexpected_ends(states, {"expired"}, {"canceled"}) == ["canceled is canceled", "expired is expired"]


def test_an_order_that_became_two_jobs_is_doubled() -> None:
    assert doubled({"j1": 1, "j2": 2}) == []
    assert doubled({"j1": 1, "j2": 2, "j3": 1}) == ["order 1: j1, j3"]


# -- limits ------------------------------------------------------------------------------------------------

HALF = Limit("slots of a", frozenset({"a"}), 1, 100 * S, 200 * S)


def test_a_run_beside_more_than_the_limit_is_over_it() -> None:
    assert over_limits([run("1", 110, 130), run("2", 131, 140)], [HALF]) == []
    assert over_limits([run("1", 110, 130), run("2", 120, 140)], [HALF]) == ["2 on a beside 1 others: slots of a"]


def test_a_limit_binds_only_what_starts_while_it_holds_and_where_it_does() -> None:
    before, as_it_comes, after = run("1", 90, 190), run("2", 101, 150), run("3", 201, 210)
    elsewhere = run("4", 120, 130, server="b")
    assert over_limits([before, as_it_comes, after, elsewhere], [HALF]) == []


def test_where_nothing_may_start_a_single_run_is_over_the_limit() -> None:
    assert over_limits([run("1", 110, 130)], [Limit("drain of a", frozenset({"a"}), 0, 100 * S, 200 * S)])


# -- webhooks ----------------------------------------------------------------------------------------------


def told(job_id: str = "j", id_: str = "w", status: str = "completed") -> Delivery:
    return Delivery(id_, job_id, status, 0)


DELIVERED = PendingMessage("w", "j", "delivered")


def wrong(deliveries: list[Delivery], *rows: PendingMessage, state: State | None = State.COMPLETED) -> set[str]:
    return {name for name, those in webhook_faults({"j": state}, deliveries, rows).items() if those}


def test_a_webhook_may_come_twice_under_one_id() -> None:
    assert wrong([told(), told()], DELIVERED) == set()


def test_a_webhook_under_two_ids_is_two() -> None:
    assert wrong([told(), told(id_="other")], DELIVERED) == {"webhooks with two ids"}


def test_an_ended_job_is_told_whatever_the_record_says() -> None:
    assert wrong([], DELIVERED) == wrong([]) == {"webhooks not told"}


def test_a_webhook_that_is_still_to_be_tried_again_is_not_missing_unless_it_is_overdue() -> None:
    assert wrong([], PendingMessage("w", "j", "pending")) == set()
    assert wrong([], PendingMessage("w", "j", "pending", overdue=True)) == {"webhooks not told"}


def test_a_webhook_that_waits_for_longer_than_it_may_is_put_off() -> None:
    assert wrong([], PendingMessage("w", "j", "pending", put_off=True)) == {"webhooks put off"}


def test_a_webhook_that_was_given_up_is_a_fault_of_ours() -> None:
    assert wrong([told()], PendingMessage("w", "j", "given_up")) == {"webhooks given up"}


def test_a_webhook_tells_the_state_in_which_the_job_ended() -> None:
    assert wrong([told(status="failed")], DELIVERED) == {"webhooks that are wrong"}


def test_nothing_is_told_of_a_job_that_goes_on() -> None:
    assert wrong([], state=State.RUNNING) == set()
    assert wrong([told()], state=State.RUNNING) == {"webhooks that are wrong"}


# -- stuck -------------------------------------------------------------------------------------------------


def watched(*sights: Snapshot) -> dict[str, str]:
    watch = StuckWatch(patience_s=5)
    for n, sight in enumerate(sights):
        watch.see(sight, n * 2.5)
    return watch.stuck


WAITS = Snapshot({"j": "m"}, {}, {"m": {"other"}}, {"m": 2})
GOES_ON = Snapshot({}, {"j": "m"}, {"m": {"j"}}, {"m": 2})


def test_a_job_that_waits_beside_a_free_slot_for_long_is_stuck() -> None:
    assert watched(WAITS, WAITS) == {}
    assert watched(WAITS, WAITS, WAITS) == {"j": "waits beside a free slot"}


def test_a_job_that_moves_in_between_is_not_stuck() -> None:
    assert watched(WAITS, WAITS, GOES_ON, WAITS, WAITS) == {}


def test_a_job_that_waits_while_others_of_its_model_are_started_is_not_stuck() -> None:
    """Far behind them, and a slot is free whenever one of them has just ended."""
    looks = [Snapshot({"j": "m"}, {}, {"m": {f"other{n}"}}, {"m": 2}) for n in range(5)]
    assert watched(*looks) == {}
    assert watched(*looks, looks[-1], looks[-1], looks[-1]) == {"j": "waits beside a free slot"}


def test_a_job_is_not_stuck_while_runs_are_too_short_to_be_seen_at_their_server() -> None:
    looks = [Snapshot({"j": "m"} | {f"k{n}": "m" for n in range(left)}, {}, {}, {"m": 2}) for left in (4, 3, 2, 1)]
    assert watched(*looks) == {}
    assert watched(*looks, looks[-1], looks[-1], looks[-1]) == {
        "j": "waits beside a free slot",
        "k0": "waits beside a free slot",
    }
    elsewhere = [Snapshot({"j": "m"} | {f"k{n}": "o" for n in range(left)}, {}, {}, {"m": 2}) for left in (3, 2, 1)]
    assert watched(*elsewhere) == {"j": "waits beside a free slot"}


def test_a_job_that_waits_for_a_taken_slot_is_not_stuck() -> None:
    full = Snapshot({"j": "m"}, {}, {"m": {"one", "other"}}, {"m": 2})
    assert watched(full, full, full) == {}


def test_a_job_that_is_said_to_run_where_no_server_knows_it_is_stuck() -> None:
    ghost = Snapshot({}, {"j": "m"}, {"m": set()}, {"m": 2})
    assert watched(ghost, ghost, ghost) == {"j": "is said to run, and no server knows it"}
    assert watched(GOES_ON, GOES_ON, GOES_ON) == {}


def test_conduct_is_clean_only_without_any_finding() -> None:
    assert ConductReport({"lies": [], "stuck": []}).clean
    assert not ConductReport({"lies": [], "stuck": ["j"]}).clean
