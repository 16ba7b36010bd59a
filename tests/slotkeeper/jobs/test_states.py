"""The table of transitions is closed: every state is reachable, every active state has an exit, no job ends twice."""

import pytest

from slotkeeper.jobs import states
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import (
    ACTIVE_STATES,
    END_SENTENCES,
    FINAL_STATES,
    TRANSITIONS,
    Budget,
    Reason,
    State,
    find_edge,
)
from slotkeeper.jobs.tables import jobs


def test_job_1_no_edge_leads_out_of_a_final_state_but_a_persons_retry_out_of_dead():
    assert [(state, why) for (state, why) in TRANSITIONS if state in FINAL_STATES] == [(State.DEAD, Reason.REVIVED)]


def test_every_state_is_either_final_or_active():
    assert set(State) == FINAL_STATES | ACTIVE_STATES
    assert not FINAL_STATES & ACTIVE_STATES


def test_every_state_can_be_reached():
    reached: set[State | None] = {None}
    for _ in State:
        reached |= {found.to for (state, _), found in TRANSITIONS.items() if state in reached}
    assert reached == set(State) | {None}


def test_every_active_state_leads_directly_to_expired_and_canceled():
    for state in ACTIVE_STATES:
        ends = {TRANSITIONS[key].to for key in TRANSITIONS if key[0] is state}
        assert {State.EXPIRED, State.CANCELED} <= ends


def test_every_reason_is_the_reason_of_something():
    assert {why for _, why in TRANSITIONS} == set(Reason)


def test_one_reason_leads_to_one_state_from_every_state():
    leads: dict[Reason, set[State]] = {}
    for (_, why), found in TRANSITIONS.items():
        leads.setdefault(why, set()).add(found.to)
    assert all(len(to) == 1 for to in leads.values())


def test_only_a_transition_from_running_uses_a_budget():
    assert {state for (state, _), found in TRANSITIONS.items() if found.costs is not Budget.NOTHING} == {State.RUNNING}


@pytest.mark.parametrize(
    ("why", "costs"),
    [
        (Reason.SERVER_BUSY, Budget.WAITS),
        (Reason.SERVER_UNREACHABLE, Budget.WAITS),
        (Reason.HANDED_BACK, Budget.WAITS),
        (Reason.SERVER_ERROR, Budget.FAILURES),
        (Reason.RETRIES_EXHAUSTED, Budget.FAILURES),
        (Reason.LEASE_EXPIRED, Budget.CRASHES),
        (Reason.SERVER_LOST, Budget.CRASHES),
        (Reason.CRASHES_EXHAUSTED, Budget.CRASHES),
        (Reason.FINISHED, Budget.NOTHING),
        (Reason.INVALID_REQUEST, Budget.NOTHING),
        (Reason.CANCEL_REQUESTED, Budget.NOTHING),
        (Reason.DEADLINE_PASSED, Budget.NOTHING),
    ],
)
def test_each_reason_costs_its_budget(why, costs):
    assert find_edge(State.RUNNING, why).costs is costs


def test_every_budget_is_a_counter_of_the_job():
    assert {budget.value for budget in Budget if budget is not Budget.NOTHING} <= set(jobs.c.keys())


def test_a_transition_that_is_not_in_the_table_raises_a_key_error():
    with pytest.raises(KeyError):
        find_edge(State.COMPLETED, Reason.STARTED)
    assert find_edge(State.QUEUED, Reason.STARTED).to is State.RUNNING


def test_the_drawing_names_every_state():
    assert all(state.value in states.__doc__ for state in State)


def test_every_state_has_a_unique_event_type():
    assert set(EVENT_TYPES) == set(State)
    assert len(set(EVENT_TYPES.values())) == len(State)
    assert all(name.startswith("job.") for name in EVENT_TYPES.values())


def test_each_reason_that_ends_a_job_has_a_sentence() -> None:
    reasons = {why for (_, why), edge in TRANSITIONS.items() if edge.to in FINAL_STATES}
    assert END_SENTENCES.keys() == reasons
    assert all(sentence.endswith(".") for sentence in END_SENTENCES.values())
