"""The table of transitions is closed: nothing is out of reach, nothing leads nowhere, nothing ends twice."""

import pytest

from slotkeeper.jobs import states
from slotkeeper.jobs.events import TYPES
from slotkeeper.jobs.models import jobs
from slotkeeper.jobs.states import ACTIVE, FINAL, TRANSITIONS, Budget, State, Why, edge


def test_job_1_no_edge_leads_out_of_a_final_state_but_a_persons_retry_out_of_dead():
    assert [(state, why) for (state, why) in TRANSITIONS if state in FINAL] == [(State.DEAD, Why.REVIVED)]


def test_every_state_is_either_final_or_active():
    assert set(State) == FINAL | ACTIVE
    assert not FINAL & ACTIVE


def test_every_state_can_be_reached():
    reached: set[State | None] = {None}
    for _ in State:
        reached |= {found.to for (state, _), found in TRANSITIONS.items() if state in reached}
    assert reached == set(State) | {None}


def test_every_state_that_is_not_final_can_come_to_each_end_without_a_new_one_in_between():
    for state in ACTIVE:
        ends = {TRANSITIONS[key].to for key in TRANSITIONS if key[0] is state}
        assert {State.EXPIRED, State.CANCELED} <= ends


def test_every_reason_is_the_reason_of_something():
    assert {why for _, why in TRANSITIONS} == set(Why)


def test_one_reason_leads_to_one_state_wherever_it_comes_from():
    leads: dict[Why, set[State]] = {}
    for (_, why), found in TRANSITIONS.items():
        leads.setdefault(why, set()).add(found.to)
    assert all(len(to) == 1 for to in leads.values())


def test_only_a_run_costs_anything():
    assert {state for (state, _), found in TRANSITIONS.items() if found.costs is not Budget.NOTHING} == {State.RUNNING}


@pytest.mark.parametrize(
    ("why", "costs"),
    [
        (Why.SERVER_BUSY, Budget.WAITS),
        (Why.SERVER_UNREACHABLE, Budget.WAITS),
        (Why.HANDED_BACK, Budget.WAITS),
        (Why.SERVER_ERROR, Budget.FAILURES),
        (Why.RETRIES_EXHAUSTED, Budget.FAILURES),
        (Why.LEASE_EXPIRED, Budget.CRASHES),
        (Why.SERVER_LOST, Budget.CRASHES),
        (Why.CRASHES_EXHAUSTED, Budget.CRASHES),
        (Why.FINISHED, Budget.NOTHING),
        (Why.INVALID_REQUEST, Budget.NOTHING),
        (Why.CANCEL_REQUESTED, Budget.NOTHING),
        (Why.DEADLINE_PASSED, Budget.NOTHING),
    ],
)
def test_what_happened_is_paid_from_its_own_budget(why, costs):
    assert edge(State.RUNNING, why).costs is costs


def test_every_budget_is_a_counter_of_the_job():
    assert {budget.value for budget in Budget if budget is not Budget.NOTHING} <= set(jobs.c.keys())


def test_what_is_not_in_the_table_is_a_key_error():
    with pytest.raises(KeyError):
        edge(State.COMPLETED, Why.STARTED)
    assert edge(State.QUEUED, Why.STARTED).to is State.RUNNING


def test_the_drawing_names_every_state():
    assert all(state.value in states.__doc__ for state in State)


def test_every_state_has_an_event_of_its_own():
    assert set(TYPES) == set(State)
    assert len(set(TYPES.values())) == len(State)
    assert all(name.startswith("job.") for name in TYPES.values())
