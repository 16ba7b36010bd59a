"""Lane names, the reason and signal of each outcome, and the limit of queued jobs."""

import itertools

import pytest

from routing.admission.submit_limits import queue_limit
from routing.dispatch.decision import Decision, crash_reason, decide
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.queue import lanes
from slotkeeper.jobs.states import TRANSITIONS, Budget, Reason, State
from slotkeeper.jobs.values import QueuedJob, Run
from slotkeeper.registry.model_config import ModelConfig
from tests.support.harness import SETTINGS

CONFIG = ModelConfig()
LARGEST_SEQ = (1 << 49) - 1
EXACT = 1 << 53  # integers below it are exact in a Redis score


# -- order: the lanes; the policies are tested where they stand, in tests/lua -------------------------------------


def test_jobs_that_are_alike_for_placement_and_order_share_a_lane_and_others_do_not():
    cases = itertools.product((1, 2), "ab", (1, 2), "tu", ("", "gpu=A100"))
    names = {
        lanes.lane_name(QueuedJob("x", seq, model, priority, tenant, 0, constraints))
        for seq, model, priority, tenant, constraints in cases
    }
    assert len(names) == 16


@pytest.mark.parametrize("tenant", ["acme", "a|b", "50%", "größe", "two words", "x\ny", ""])
@pytest.mark.parametrize("model", ["zimg", "org/model.v2:latest", "a-slot3", "x@y+z"])
def test_a_lane_has_four_parts_whatever_its_tenant_is_called(tenant, model):
    lane = lanes.lane_name(QueuedJob("id", 1, model, 7, tenant))
    priority, digest, name, last = lane.split("|")
    assert (priority, digest, last) == ("7", "", model)
    assert "\n" not in lane and (name == tenant) is (tenant in ("acme", "two words", ""))


# -- decisions -------------------------------------------------------------------------------------------------


def decided(
    outcome: Outcome,
    failures: int = 0,
    crashes: int = 0,
    canceling: bool = False,
    config: ModelConfig = CONFIG,
) -> Decision:
    job = QueuedJob("j", 1, "zimg", 5, "default")
    run = Run(job, "{}", 1, failures, crashes, None, None, None, "gpu", "gpu-slot0", 0, cancel_requested=canceling)
    return decide(run, outcome, config, SETTINGS, 0, canceling=canceling)


def costs(decision: Decision) -> Budget:
    return TRANSITIONS[(State.RUNNING, decision.reason)].costs


@pytest.mark.parametrize(
    ("kind", "signal"),
    [
        (OutcomeKind.DONE, "ok"),
        (OutcomeKind.FAILED, "refused"),
        (OutcomeKind.RETRY, "failed"),
        (OutcomeKind.BUSY, "busy"),
    ],
)
def test_each_outcome_of_a_run_has_its_signal_for_the_server(kind, signal):
    assert decided(Outcome(kind), failures=0, crashes=0, canceling=False, config=CONFIG).signal == signal


@pytest.mark.parametrize(
    ("kind", "why", "budget"),
    [
        (OutcomeKind.DONE, Reason.FINISHED, Budget.NOTHING),
        (OutcomeKind.FAILED, Reason.INVALID_REQUEST, Budget.NOTHING),
        (OutcomeKind.BUSY, Reason.SERVER_BUSY, Budget.WAITS),
        (OutcomeKind.UNREACHABLE, Reason.SERVER_UNREACHABLE, Budget.WAITS),
        (OutcomeKind.RETRY, Reason.SERVER_ERROR, Budget.FAILURES),
        (OutcomeKind.CANCELED, Reason.SERVER_ERROR, Budget.FAILURES),
        (OutcomeKind.LOST, Reason.SERVER_LOST, Budget.CRASHES),
        (OutcomeKind.OVERDUE, Reason.DEADLINE_PASSED, Budget.NOTHING),
    ],
)
def test_each_outcome_costs_one_budget(kind, why, budget):
    decision = decided(Outcome(kind), failures=0, crashes=0, canceling=False, config=CONFIG)
    assert decision.reason is why and costs(decision) is budget


@pytest.mark.parametrize("kind", [OutcomeKind.BUSY, OutcomeKind.UNREACHABLE])
@pytest.mark.parametrize(("failures", "crashes"), [(0, 0), (50, 3), (10**6, 10**6)])
def test_waiting_for_capacity_never_spends_an_attempt(kind, failures, crashes):
    config = ModelConfig(max_retries=0, max_crashes=1)
    decision = decided(Outcome(kind), failures, crashes, canceling=False, config=config)
    assert costs(decision) is Budget.WAITS
    assert TRANSITIONS[(State.RUNNING, decision.reason)].to is State.QUEUED


def test_only_an_unreachable_outcome_puts_the_server_in_cooldown():
    blamed = {kind for kind in _ENDS if decided(Outcome(kind), 0, 0, True, CONFIG).cools_server_down}
    assert blamed == {OutcomeKind.UNREACHABLE}


def test_a_busy_server_names_the_cooldown_of_its_slot_itself():
    asked = decided(Outcome(OutcomeKind.BUSY, retry_after_s=7.5))
    assert (asked.cooldown_ms, asked.signal) == (7500, "retry_after")
    assert decided(Outcome(OutcomeKind.BUSY, retry_after_s=1e6)).cooldown_ms == SETTINGS.busy_cooldown_max_ms
    silent = decided(Outcome(OutcomeKind.BUSY))
    assert (silent.cooldown_ms, silent.signal) == (SETTINGS.busy_cooldown_ms, "busy")


@pytest.mark.parametrize(("max_retries", "runs"), [(50, 51), (1, 2), (0, 1)])
def test_a_job_is_run_once_and_then_retried_as_often_as_allowed(max_retries, runs):
    config = ModelConfig(max_retries=max_retries)
    whys = [decided(Outcome(OutcomeKind.RETRY), failures, 0, False, config).reason for failures in range(runs)]
    assert whys == [Reason.SERVER_ERROR] * (runs - 1) + [Reason.RETRIES_EXHAUSTED]


@pytest.mark.parametrize("max_crashes", [1, 3])
def test_a_job_becomes_dead_when_its_crashes_reach_max_crashes(max_crashes):
    config = ModelConfig(max_crashes=max_crashes)
    whys = [decided(Outcome(OutcomeKind.LOST), 0, crashes, False, config).reason for crashes in range(max_crashes)]
    assert whys == [Reason.SERVER_LOST] * (max_crashes - 1) + [Reason.CRASHES_EXHAUSTED]
    assert crash_reason(0, ModelConfig(max_crashes=2), Reason.LEASE_EXPIRED) is Reason.LEASE_EXPIRED


def test_failures_do_not_count_as_crashes_nor_crashes_as_failures():
    config = ModelConfig(max_retries=5, max_crashes=2)
    assert (
        decided(Outcome(OutcomeKind.LOST), failures=99, crashes=0, canceling=False, config=config).reason
        is Reason.SERVER_LOST
    )
    assert (
        decided(Outcome(OutcomeKind.RETRY), failures=0, crashes=99, canceling=False, config=config).reason
        is Reason.SERVER_ERROR
    )


def test_a_run_that_the_server_aborts_is_canceled_only_if_a_client_requested_it():
    assert decided(Outcome(OutcomeKind.CANCELED), 0, 0, True, CONFIG).reason is Reason.CANCEL_REQUESTED
    assert decided(Outcome(OutcomeKind.CANCELED), 0, 0, False, CONFIG).reason is Reason.SERVER_ERROR
    assert decided(Outcome(OutcomeKind.CANCELED), 50, 0, False, CONFIG).reason is Reason.RETRIES_EXHAUSTED


def test_a_result_that_arrives_before_the_cancel_finishes_the_job():
    assert decided(Outcome(OutcomeKind.DONE), 0, 0, True, CONFIG).reason is Reason.FINISHED


@pytest.mark.parametrize("kind", [OutcomeKind.PENDING, OutcomeKind.UNKNOWN])
def test_an_outcome_that_does_not_end_a_run_gets_no_decision(kind):
    with pytest.raises(ValueError, match=kind.value):
        decided(Outcome(kind), 0, 0, False, CONFIG)


@pytest.mark.parametrize("kind", sorted(set(OutcomeKind) - {OutcomeKind.PENDING, OutcomeKind.UNKNOWN}))
@pytest.mark.parametrize("canceling", [True, False])
@pytest.mark.parametrize(("failures", "crashes"), [(0, 0), (49, 2), (50, 3)])
def test_every_decision_is_a_transition_out_of_running(kind, canceling, failures, crashes):
    decision = decided(Outcome(kind), failures, crashes, canceling, CONFIG)
    assert (State.RUNNING, decision.reason) in TRANSITIONS


_ENDS = set(OutcomeKind) - {OutcomeKind.PENDING, OutcomeKind.UNKNOWN}


# -- admission -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "slots", "bound"),
    [
        ({}, 4, None),
        ({"max_waiting": 7}, 4, 7),
        ({"capacity": 3}, 4, 12),
        ({"capacity_per_slot": 2}, 4, 8),
        ({"capacity": 3, "capacity_per_slot": 5}, 4, 20),
        ({"capacity": 3, "capacity_per_slot": 5, "max_waiting": 15}, 4, 15),
        ({"capacity": 0}, 4, 0),
        ({"capacity": 3}, 0, 3),
    ],
)
def test_capacity_is_the_larger_of_both_for_each_slot_and_clamped(config, slots, bound):
    assert queue_limit(ModelConfig(**config), slots) == bound
