"""Each violation alone is found, and evidence without one is clean."""

from dataclasses import replace

import pytest

from slotkeeper.jobs.states import State
from tools.drill.history_checks import (
    Disturbance,
    Evidence,
    Findings,
    Overtaken,
    Receipt,
    Recorded,
    Run,
    check,
    is_reversed,
    unexplained,
)

MS = 1_000_000
COMPLETED = ("job.enqueued", "job.started", "job.completed")


def receipt(job_id: str, sent_ms: int, priority: int = 5, model: str = "zimg") -> Receipt:
    return Receipt(job_id, model, priority, sent_ms * MS, (sent_ms + 1) * MS)


def run(job_id: str, start_ms: int, end_ms: int, slot: int = 0, server: str = "a", **fields: object) -> Run:
    return replace(Run(job_id, 1, server, slot, start_ms * MS, end_ms * MS), **fields)


def clean() -> Evidence:
    """Return the evidence of three jobs of one lane on a server with two slots, and a more urgent fourth job."""
    return Evidence(
        receipts=[receipt("j1", 0), receipt("j2", 2), receipt("j3", 4), receipt("j4", 6, priority=1)],
        runs=[run("j1", 10, 20), run("j2", 11, 25, slot=1), run("j4", 20, 22), run("j3", 22, 30)],
        record={name: Recorded(State.COMPLETED, COMPLETED) for name in ("j1", "j2", "j3", "j4")},
        slots={"a": 2},
    )


def violations(findings: Findings) -> set[str]:
    kinds = ("lost", "unexpected", "duplicated", "overlaps", "overtaken", "reversals")
    return {kind for kind in kinds if getattr(findings, kind)}


def test_clean_evidence_has_no_finding() -> None:
    findings = check(clean())
    assert violations(findings) == set()
    assert (findings.accepted, findings.completed) == (4, 4)


@pytest.mark.parametrize("state", [State.QUEUED, State.DELAYED, State.RUNNING])
def test_an_accepted_job_that_has_not_ended_is_lost(state: State) -> None:
    evidence = clean()
    findings = check(replace(evidence, record={**evidence.record, "j3": Recorded(state, ("job.enqueued",))}))
    assert violations(findings) == {"lost"}
    assert findings.lost == ["j3"]


def test_an_accepted_job_that_is_not_in_the_database_is_lost() -> None:
    evidence = clean()
    record = {name: job for name, job in evidence.record.items() if name != "j2"}
    assert check(replace(evidence, record=record)).lost == ["j2"]


def test_a_job_that_ended_without_success_is_not_lost() -> None:
    evidence = clean()
    findings = check(
        replace(evidence, record={**evidence.record, "j3": Recorded(State.DEAD, ("job.enqueued", "job.dlq"))})
    )
    assert violations(findings) == set()
    assert findings.ended == {State.COMPLETED: 3, State.DEAD: 1}


def test_a_run_that_no_client_submitted_is_unexpected() -> None:
    evidence = clean()
    findings = check(replace(evidence, runs=[*evidence.runs, run("ghost", 40, 50)]))
    assert violations(findings) == {"unexpected"}
    assert findings.unexpected == ["ghost"]


def test_a_job_that_completed_twice_is_duplicated() -> None:
    evidence = clean()
    findings = check(replace(evidence, runs=[*evidence.runs, run("j1", 40, 50, attempt=2)]))
    assert violations(findings) == {"duplicated"}
    assert findings.duplicated == {"j1": 2}


@pytest.mark.parametrize("outcome", ["error", "canceled", "cut"])
def test_a_second_run_after_one_that_failed_is_no_duplicate(outcome: str) -> None:
    evidence = clean()
    runs = [replace(run, outcome=outcome) if run.job_id == "j1" else run for run in evidence.runs]
    assert violations(check(replace(evidence, runs=[*runs, run("j1", 40, 50, attempt=2)]))) == set()


def test_two_concurrent_runs_in_one_slot_are_reported_as_an_overlap() -> None:
    evidence = clean()
    runs = [replace(run, started_ns=19 * MS) if run.job_id == "j4" else run for run in evidence.runs]
    findings = check(replace(evidence, runs=runs, slots={"a": 3}))
    assert violations(findings) == {"overlaps"}
    assert [(pair.first.job_id, pair.second.job_id) for pair in findings.overlaps] == [("j1", "j4")]


def test_more_runs_at_once_than_slots_overlap_in_any_slot() -> None:
    evidence = clean()
    runs = [replace(run, started_ns=19 * MS, slot=7) if run.job_id == "j4" else run for run in evidence.runs]
    findings = check(replace(evidence, runs=runs))
    assert violations(findings) == {"overlaps"}
    assert "the 2 slots of a" in findings.overlaps[0].what


def test_a_job_that_runs_on_two_servers_at_once_is_reported_as_an_overlap() -> None:
    evidence = clean()
    findings = check(replace(evidence, runs=[*evidence.runs, run("j1", 15, 18, server="b", outcome="cut")]))
    assert violations(findings) == {"overlaps"}
    assert findings.overlaps[0].what == "job j1"


def test_a_run_that_starts_when_another_ends_does_not_overlap() -> None:
    evidence = replace(clean(), runs=[run("j1", 0, 5), run("j2", 5, 9), run("j3", 9, 12), run("j4", 12, 13)])
    assert check(evidence).overlaps == []


def test_a_job_that_starts_after_a_later_job_of_its_lane_is_reported_as_overtaken() -> None:
    evidence = clean()
    starts = {"j1": 10, "j3": 12, "j2": 14, "j4": 16}
    findings = check(replace(evidence, runs=[run(job, at, at + 1) for job, at in starts.items()]))
    assert violations(findings) == {"overtaken"}
    assert findings.overtaken == [Overtaken("j2", "j3", 12 * MS, 14 * MS, 3 * MS, 4 * MS)]


def test_two_jobs_submitted_at_the_same_time_may_start_in_either_order() -> None:
    receipts = [Receipt("j1", "zimg", 5, 0, 10 * MS), Receipt("j2", "zimg", 5, 9 * MS, 12 * MS)]
    record = {name: Recorded(State.COMPLETED, COMPLETED) for name in ("j1", "j2")}
    assert check(Evidence(receipts, [run("j2", 20, 21), run("j1", 22, 23)], record)).overtaken == []


def test_a_requeued_job_is_judged_by_its_first_start() -> None:
    evidence = clean()
    runs = [replace(run, outcome="cut") if run.job_id == "j1" else run for run in evidence.runs]
    assert check(replace(evidence, runs=[*runs, run("j1", 40, 50, attempt=2)])).overtaken == []


def test_turns_decide_instead_of_starts_if_all_are_known() -> None:
    """Of two jobs that leave the queue in order, the second may reach its server first."""
    receipts = [receipt("j1", 0), receipt("j2", 2)]
    runs = [run("j2", 10, 11, slot=1), run("j1", 12, 13)]
    in_turn = {"j1": Recorded(State.COMPLETED, COMPLETED, (0, 1)), "j2": Recorded(State.COMPLETED, COMPLETED, (0, 2))}
    out_of_turn = {
        "j1": Recorded(State.COMPLETED, COMPLETED, (1, 1)),
        "j2": Recorded(State.COMPLETED, COMPLETED, (0, 9)),
    }
    assert check(Evidence(receipts, runs, in_turn)).overtaken == []
    assert [overtaken.job_id for overtaken in check(Evidence(receipts, runs, out_of_turn)).overtaken] == ["j1"]


@pytest.mark.parametrize(
    "events",
    [
        ("job.completed", "job.started"),
        ("job.completed", "job.completed"),
        ("job.dlq", "job.started"),
        ("job.canceled", "job.enqueued"),
    ],
)
def test_an_event_after_a_final_state_is_found(events: tuple[str, ...]) -> None:
    assert is_reversed(("job.enqueued", *events))
    evidence = clean()
    findings = check(replace(evidence, record={**evidence.record, "j1": Recorded(State.COMPLETED, events)}))
    assert violations(findings) == {"reversals"}


def test_an_operator_may_queue_a_dead_job_again() -> None:
    assert not is_reversed(("job.enqueued", "job.started", "job.dlq", "job.enqueued", "job.started", "job.completed"))


def test_a_fault_explains_as_many_overtaken_jobs_as_it_can_have_hit() -> None:
    jobs = [Overtaken(f"j{n}", "later", (100 + n) * MS, (200 + n) * MS, 0, 0) for n in range(3)]
    assert len(unexplained(jobs, [Disturbance(90 * MS, 150 * MS, 2)])) == 1
    assert unexplained(jobs, [Disturbance(90 * MS, 150 * MS, 2), Disturbance(90 * MS, 150 * MS, 1)]) == []


def test_a_fault_explains_nothing_before_it_or_long_after_it() -> None:
    jobs = [Overtaken("j1", "j2", 100 * MS, 200 * MS, 0, 0)]
    assert unexplained(jobs, [Disturbance(201 * MS, 300 * MS, 9), Disturbance(0, 99 * MS, 9)]) == jobs


@pytest.mark.parametrize(
    ("answered_s", "by_sent_s", "is_excused"),
    [
        (10, 12, True),
        (9.9, 12, False),  # It was accepted before the fault.
        (16, 18, True),
        (16.1, 17, False),  # Its process called Redis again.
        (16, 18.1, False),  # A sweep had enqueued it.
    ],
)
def test_order_1_a_job_that_could_not_be_enqueued_may_be_overtaken_until_the_next_sweep(
    answered_s: float, by_sent_s: float, is_excused: bool
) -> None:
    """Redis fails from 10 s to 15 s, and processes call it again at 16 s."""
    second = 1000 * MS
    overtaken = Overtaken("j1", "j2", 20 * second, 21 * second, round(answered_s * second), round(by_sent_s * second))
    fault = Disturbance(10 * second, 35 * second, 0, 16 * second)
    assert unexplained([overtaken], [fault]) == ([] if is_excused else [overtaken])
    assert unexplained([overtaken], [replace(fault, unenqueued_until_ns=None)]) == [overtaken]
