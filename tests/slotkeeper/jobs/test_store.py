"""The transitions of a job in the database, on both engines.

One test for each rule; its name is the rule.  Idempotency and acceptance are tested in test_acceptance.py, group
commit and failing databases in db/test_commit.py, listing in test_listings.py, deletion in
outbox/test_retention.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

from routing.queries import job_list
from routing.queries.job_timeline import attempts_of
from slotkeeper.db import Database
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import ACTIVE_STATES, FINAL_STATES, TRANSITIONS, Budget, Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.tables import messages
from slotkeeper.jobs.values import JobError
from slotkeeper.outbox import retention
from slotkeeper.outbox.webhook_messages import Message
from tests.support.builders import (
    CALLBACK,
    SECOND,
    T0,
    a_delayed_job,
    a_job_in,
    a_queued_job,
    a_running_job,
    a_start,
    an_ended_job,
    at_once,
    row_of,
    rows_in,
    trail_of,
)
from tests.support.callbacks import claim, due_ids, failed
from tests.support.ends import store_end
from tools.cluster.direct_starts import store_remote_id, store_start

LATER = T0 + 60 * SECOND
RESULT = '{"url":"https://cdn.example/1.png"}'
ERROR = JobError("model_error", "out of memory")
BATCH, TENANT = "01890000-0000-7000-8000-000000000000", "default"

SETTLES = sorted(why for (state, why) in TRANSITIONS if state is State.RUNNING)
EDGES = [pytest.param(state, why, id=f"{state}-{why}") for (state, why) in TRANSITIONS if state is not None]
in_every_state = pytest.mark.parametrize("state", list(State))
in_every_final_state = pytest.mark.parametrize("state", sorted(FINAL_STATES))


def _settle(store: JobStore, job_id: str, attempt: int, why: Reason, now_ms: int = LATER) -> Any:
    """Settle with everything that a worker could hand in."""
    return store_end(store, job_id, attempt, why, now_ms, result=RESULT, error=ERROR, due_ms=now_ms + SECOND)


def _acts(store: JobStore, why: Reason, job_id: str, attempt: int) -> dict[str, Callable[[], Any]]:
    """Every act of the store that could be asked to make a transition for this reason."""
    acts: dict[str, Callable[[], Any]] = {
        "settle_write": lambda: _settle(store, job_id, attempt, why),
        "cancel_waiting": lambda: why is Reason.CANCEL_REQUESTED and store.cancel_waiting(job_id, LATER, ERROR),
    }
    if why is Reason.STARTED:
        acts["start_write"] = lambda: store_start(store, job_id, "gpu9", "gpu9-slot0", "lease9", LATER)
    if why is Reason.DUE:
        acts["promote_due"] = lambda: store.promote_due(LATER)
    if why is Reason.REVIVED:
        acts["revive"] = lambda: store.revive(job_id, LATER)
    if why is Reason.DEADLINE_PASSED:
        acts["expire_overdue"] = lambda: store.expire_overdue(LATER)
    if why is Reason.HELD:
        acts["hold_page_of_batch"] = lambda: store.hold_page_of_batch(BATCH, TENANT, LATER)
    return acts


def _performer(state: State, why: Reason) -> str | None:
    """The method of the store that makes this transition; None: there is no such transition."""
    if (state, why) not in TRANSITIONS:
        return None
    if state is State.RUNNING:
        return "settle_write"
    return {
        Reason.DEADLINE_PASSED: "expire_overdue",
        Reason.CANCEL_REQUESTED: "cancel_waiting",
        Reason.STARTED: "start_write",
        Reason.DUE: "promote_due",
        Reason.REVIVED: "revive",
        Reason.HELD: "hold_page_of_batch",
    }[why]


def _refused(act: Callable[[], Any]) -> bool:
    try:
        return not act()
    except KeyError:  # no such edge
        return True


# -- transitions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "why"), EDGES)
def test_every_edge_of_the_table_has_its_performer_target_state_and_cost(database, store, state, why):
    batch = BATCH if why is Reason.HELD else None
    job = a_job_in(store, state, deadline_ms=LATER if why is Reason.DEADLINE_PASSED else None, batch=batch)
    before = row_of(database, job.id)
    assert _acts(store, why, job.id, job.attempt)[_performer(state, why)]()
    after, edge = row_of(database, job.id), TRANSITIONS[(state, why)]
    assert (after["state"], after["why"]) == (edge.to, why)
    expected = {budget: before[budget] + (budget is edge.costs) for budget in Budget if budget is not Budget.NOTHING}
    if why is Reason.REVIVED:
        expected |= {Budget.FAILURES: 0, Budget.CRASHES: 0}
    assert {budget: after[budget] for budget in expected} == expected
    assert after["attempt"] == before["attempt"] + (why is Reason.STARTED)
    assert trail_of(store, job.id)[-1] == (EVENT_TYPES[edge.to], why, after["attempt"])


@in_every_state
def test_a_transition_that_is_not_in_the_table_is_refused_and_changes_nothing(database, store, state):
    job = a_job_in(store, state)
    before, events_before = row_of(database, job.id), trail_of(store, job.id)
    tried = 0
    for why in Reason:
        for name, act in _acts(store, why, job.id, job.attempt).items():
            if name == _performer(state, why):
                continue
            assert _refused(act), f"{name}({why}) on a {state} job"
            assert row_of(database, job.id) == before, f"{name}({why}) on a {state} job"
            tried += 1
    assert trail_of(store, job.id) == events_before
    assert tried >= 2 * len(Reason) - len(SETTLES)


@in_every_final_state
def test_job_1_a_final_state_is_never_left(database, store, state):
    """Only a dead job has a way back, and only by a person's retry."""
    job = an_ended_job(store, state, callback_url=CALLBACK)
    before, events_before = row_of(database, job.id), trail_of(store, job.id)
    for why in Reason:
        for name, act in _acts(store, why, job.id, job.attempt).items():
            if name != "revive" or state is not State.DEAD:
                assert _refused(act), f"{name}({why})"
    assert store.promote_due(LATER * 2) == []
    assert store.expire_overdue(LATER * 2) == []
    assert not store.request_cancel(job.id, LATER)
    assert not store_remote_id(store, job.id, job.attempt, "r-1", LATER)
    assert row_of(database, job.id) == before
    assert trail_of(store, job.id) == events_before
    assert rows_in(database, messages) == 1


@pytest.mark.parametrize("why", SETTLES)
def test_job_2_a_transition_whose_event_cannot_be_written_did_not_happen(database, store, why, faults):
    run = a_running_job(store, callback_url=CALLBACK)
    before, events_before = row_of(database, run.job.id), trail_of(store, run.job.id)
    with faults("INSERT INTO events"), pytest.raises(ZeroDivisionError):
        _settle(store, run.job.id, run.attempt, why)
    assert row_of(database, run.job.id) == before
    assert trail_of(store, run.job.id) == events_before
    assert rows_in(database, messages) == 0
    assert _settle(store, run.job.id, run.attempt, why)  # and then it can still happen


def test_job_2_an_end_whose_webhook_cannot_be_written_did_not_happen(database, store, faults):
    run = a_running_job(store, callback_url=CALLBACK)
    with faults("INSERT INTO messages"), pytest.raises(ZeroDivisionError):
        _settle(store, run.job.id, run.attempt, Reason.FINISHED)
    assert row_of(database, run.job.id)["state"] == "running"
    assert trail_of(store, run.job.id)[-1][1] == Reason.STARTED


def test_job_2_each_transition_of_a_long_life_has_exactly_one_event(store):
    job = a_delayed_job(store, due_ms=T0 + SECOND)
    assert store.promote_due(LATER)
    for why in (Reason.SERVER_BUSY, Reason.LEASE_EXPIRED, Reason.SERVER_ERROR):
        assert _settle(store, job.id, a_start(store, job.id).attempt, why)
    assert store.promote_due(LATER * 2)
    assert _settle(store, job.id, a_start(store, job.id).attempt, Reason.RETRIES_EXHAUSTED)
    assert store.revive(job.id, LATER)
    assert _settle(store, job.id, a_start(store, job.id).attempt, Reason.FINISHED)
    assert trail_of(store, job.id) == [
        ("job.delayed", "scheduled", 0),
        ("job.enqueued", "due", 0),
        ("job.started", "started", 1),
        ("job.enqueued", "server_busy", 1),
        ("job.started", "started", 2),
        ("job.enqueued", "lease_expired", 2),
        ("job.started", "started", 3),
        ("job.delayed", "server_error", 3),
        ("job.enqueued", "due", 3),
        ("job.started", "started", 4),
        ("job.dlq", "retries_exhausted", 4),
        ("job.enqueued", "revived", 4),
        ("job.started", "started", 5),
        ("job.completed", "finished", 5),
    ]


def test_the_event_of_a_retry_holds_the_error_and_the_time_of_the_retry(store):
    run = a_running_job(store)
    store_end(store, run.job.id, run.attempt, Reason.SERVER_ERROR, T0, error=ERROR, due_ms=T0 + 4 * SECOND)
    event = store.list_events(run.job.id)[-1]
    assert event.data["error"] == {"code": "model_error", "message": "out of memory"}
    assert event.data["retry_in_ms"] == 4 * SECOND
    assert event.at_ms == T0


def test_a_start_returns_every_field_that_the_worker_needs(store):
    job = a_queued_job(
        store, payload='{"steps":4}', deadline_ms=LATER, envelope='{"chord":1}', priority=2, tenant="acme"
    )
    run = store_start(store, job.id, "gpu1", "gpu1-slot3", "lease-7", T0 + SECOND)
    assert (run.payload, run.envelope, run.deadline_ms) == ('{"steps":4}', '{"chord":1}', LATER)
    assert (run.server, run.slot, run.started_ms) == ("gpu1", "gpu1-slot3", T0 + SECOND)
    assert (run.attempt, run.failures, run.crashes, run.remote_id, run.cancel_requested) == (1, 0, 0, None, False)
    assert (run.job.id, run.job.seq, run.job.model, run.job.priority, run.job.tenant) == (
        job.id,
        job.seq,
        "zimg",
        2,
        "acme",
    )


def test_a_running_job_names_its_slot_and_lease_so_that_a_lost_redis_can_be_rebuilt(store):
    job = a_queued_job(store)
    store_start(store, job.id, "gpu1", "gpu1-slot3", "lease-7", T0)
    assert [(j.id, j.server, j.slot, j.lease) for j in store.list_running()] == [
        (job.id, "gpu1", "gpu1-slot3", "lease-7")
    ]


def test_only_one_of_two_concurrent_starts_of_one_job_succeeds(database, store):
    other = JobStore(Database(database.url))
    for _ in range(5):
        job = a_queued_job(store)
        runs = at_once(
            *[lambda s=s, j=job: store_start(s, j.id, "gpu1", "gpu1-slot0", "l", T0) for s in (store, other)]
        )
        assert [run.attempt for run in runs if run is not None] == [1]
    other.database.close()


def test_each_transition_that_queues_a_job_returns_its_age_and_its_constraints(store):
    """Each transition that queues a job returns all that its order and its placement need."""
    job = a_delayed_job(store, constraints="gpu=A100", priority=2, tenant="acme", now_ms=T0)
    known = job.queued
    assert (known.created_ms, known.constraints) == (T0, "gpu=A100")
    assert store.promote_due(LATER) == [known]
    assert store.list_queued(["zimg"]) == [known]
    run = a_start(store, job.id, now_ms=LATER)
    assert run.job == known
    assert [running.queued for running in store.list_running()] == [known]
    assert _settle(store, job.id, run.attempt, Reason.SERVER_BUSY).job == known
    assert _settle(store, job.id, a_start(store, job.id).attempt, Reason.RETRIES_EXHAUSTED).job == known
    assert store.revive(job.id, LATER) == known
    assert store.cancel_waiting(job.id, LATER).job == known
    assert [found.constraints for found in job_list.find_jobs(store.database)] == ["gpu=A100"]


def test_a_job_without_constraints_is_stored_with_an_empty_text(database, store):
    assert row_of(database, a_queued_job(store).id)["constraints"] == ""


def test_an_unknown_job_is_none_everywhere(store):
    assert store.get("nobody") is None
    assert store.get_message_headers("nobody") is None
    assert store_start(store, "nobody", "gpu1", "gpu1-slot0", "l", T0) is None
    assert store_end(store, "nobody", 1, Reason.FINISHED, T0) is None
    assert store.cancel_waiting("nobody", T0) is None
    assert store.revive("nobody", T0) is None
    assert store.list_events("nobody") == []
    assert not store.request_cancel("nobody", T0)
    assert not store_remote_id(store, "nobody", 1, "r-1", T0)
    assert not retention.delete_dead_job(store.database, "nobody")


# -- the token -------------------------------------------------------------------------------------------------


def test_lease_2_the_token_grows_with_every_start(store):
    job = a_queued_job(store)
    tokens = []
    for why in (
        Reason.SERVER_BUSY,
        Reason.SERVER_UNREACHABLE,
        Reason.HANDED_BACK,
        Reason.SERVER_LOST,
        Reason.LEASE_EXPIRED,
    ):
        tokens.append(a_start(store, job.id).attempt)
        _settle(store, job.id, tokens[-1], why)
    assert tokens == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("why", [Reason.RETRIES_EXHAUSTED, Reason.CRASHES_EXHAUSTED])
def test_lease_2_the_token_keeps_growing_after_a_revive(store, why):
    run = a_running_job(store)
    _settle(store, run.job.id, run.attempt, why)
    store.revive(run.job.id, LATER)
    assert a_start(store, run.job.id).attempt == run.attempt + 1


def test_lease_2_the_token_keeps_growing_after_a_delayed_retry(store):
    run = a_running_job(store)
    _settle(store, run.job.id, run.attempt, Reason.SERVER_ERROR)
    store.promote_due(LATER * 2)
    assert a_start(store, run.job.id).attempt == run.attempt + 1


@pytest.mark.parametrize("why", SETTLES)
def test_lease_3_a_settle_under_an_old_token_changes_nothing(database, store, why):
    old = a_running_job(store, callback_url=CALLBACK)
    store_end(store, old.job.id, old.attempt, Reason.LEASE_EXPIRED, T0)
    a_start(store, old.job.id, server="gpu2")
    before, events_before = row_of(database, old.job.id), trail_of(store, old.job.id)
    assert _settle(store, old.job.id, old.attempt, why) is None
    assert row_of(database, old.job.id) == before
    assert trail_of(store, old.job.id) == events_before
    assert rows_in(database, messages) == 0


def test_lease_3_a_token_from_the_future_is_no_better(database, store):
    run = a_running_job(store)
    assert _settle(store, run.job.id, run.attempt + 1, Reason.FINISHED) is None
    assert row_of(database, run.job.id)["state"] == "running"


def test_a_remote_id_can_be_taken_back(database, store):
    run = a_running_job(store)
    assert store_remote_id(store, run.job.id, run.attempt, "r-1", T0)
    assert store_remote_id(store, run.job.id, run.attempt, None, LATER)
    assert store.get(run.job.id).remote_id is None


def test_lease_3_a_remote_id_is_stored_only_under_the_current_token(database, store):
    old = a_running_job(store)
    store_end(store, old.job.id, old.attempt, Reason.SERVER_LOST, T0)
    new = a_start(store, old.job.id)
    assert not store_remote_id(store, old.job.id, old.attempt, "r-old", T0)
    assert store_remote_id(store, new.job.id, new.attempt, "r-new", T0)
    assert row_of(database, old.job.id)["remote_id"] == "r-new"


def test_only_one_of_two_concurrent_settles_of_one_run_succeeds(database, store):
    other = JobStore(Database(database.url))
    for _ in range(5):
        run = a_running_job(store, callback_url=CALLBACK)
        moved = at_once(
            lambda r=run: store_end(store, r.job.id, r.attempt, Reason.FINISHED, T0, result=RESULT),
            lambda r=run: store_end(other, r.job.id, r.attempt, Reason.LEASE_EXPIRED, T0),
        )
        assert sum(m is not None for m in moved) == 1
        assert len(trail_of(store, run.job.id)) == 3
    other.database.close()


# -- what a settle leaves --------------------------------------------------------------------------------------


def test_a_completed_job_keeps_its_result_and_where_it_ran(store):
    run = a_running_job(store, server="gpu1")
    moved = store_end(store, run.job.id, run.attempt, Reason.FINISHED, LATER, result=RESULT)
    job = store.get(run.job.id)
    assert (moved.to, moved.attempt) == (State.COMPLETED, 1)
    assert (job.result, job.error_code, job.error_message) == (RESULT, None, None)
    assert (job.started_ms, job.finished_ms, job.server, job.lease, job.due_ms) == (T0, LATER, "gpu1", None, None)


def test_a_failed_job_keeps_its_error(store):
    run = a_running_job(store)
    store_end(store, run.job.id, run.attempt, Reason.INVALID_REQUEST, LATER, error=ERROR)
    job = store.get(run.job.id)
    assert (job.result, job.error_code, job.error_message) == (None, "model_error", "out of memory")
    assert job.finished_ms == LATER


@pytest.mark.parametrize("message", ["x" * 5000, "half a \ud83d pair", "a \x00 byte"])
def test_an_error_is_stored_whatever_the_server_wrote(store, message):
    run = a_running_job(store)
    assert store_end(
        store, run.job.id, run.attempt, Reason.SERVER_ERROR, T0, error=JobError("bad", message), due_ms=LATER
    )
    assert store.get(run.job.id).error_message.startswith(message[:2])
    assert len(store.get(run.job.id).error_message) <= 2000


def test_a_job_that_waits_again_holds_no_slot(store):
    for why in (
        Reason.SERVER_BUSY,
        Reason.SERVER_UNREACHABLE,
        Reason.HANDED_BACK,
        Reason.SERVER_LOST,
        Reason.LEASE_EXPIRED,
    ):
        run = a_running_job(store)
        _settle(store, run.job.id, run.attempt, why)
        job = store.get(run.job.id)
        assert (job.slot, job.lease, job.finished_ms, job.result) == (None, None, None, None), why


def test_a_retry_waits_until_it_is_due_and_is_not_among_the_queued(store):
    run = a_running_job(store)
    store_end(store, run.job.id, run.attempt, Reason.SERVER_ERROR, T0, error=ERROR, due_ms=LATER)
    job = store.get(run.job.id)
    assert (job.state, job.due_ms, job.failures, job.slot, job.lease) == (State.DELAYED, LATER, 1, None, None)
    assert store.list_queued(["zimg"]) == []


def test_a_retry_without_a_time_is_refused_for_nothing_would_ever_wake_it(database, store):
    run = a_running_job(store)
    with pytest.raises(ValueError, match="due_ms"):
        store_end(store, run.job.id, run.attempt, Reason.SERVER_ERROR, T0, error=ERROR)
    assert row_of(database, run.job.id)["state"] == "running"


@pytest.mark.parametrize("why", [Reason.LEASE_EXPIRED, Reason.HANDED_BACK])
def test_a_run_that_only_its_worker_left_is_resumed_at_the_server(store, why):
    run = a_running_job(store, server="gpu1")
    store_remote_id(store, run.job.id, run.attempt, "r-1", T0 + SECOND)
    _settle(store, run.job.id, run.attempt, why)
    again = a_start(store, run.job.id, server="gpu1")
    assert (again.remote_id, again.sent_ms) == ("r-1", T0 + SECOND)


def test_a_remote_id_means_nothing_to_another_server(store):
    run = a_running_job(store, server="gpu1")
    store_remote_id(store, run.job.id, run.attempt, "r-1", T0)
    store_end(store, run.job.id, run.attempt, Reason.LEASE_EXPIRED, T0)
    again = a_start(store, run.job.id, server="gpu2")
    assert (again.remote_id, again.sent_ms) == (None, None)
    assert store.get(run.job.id).remote_id is None


@pytest.mark.parametrize(
    "why", [Reason.SERVER_LOST, Reason.SERVER_BUSY, Reason.SERVER_UNREACHABLE, Reason.SERVER_ERROR]
)
def test_a_run_that_the_server_left_is_not_resumed(store, why):
    run = a_running_job(store, server="gpu1")
    store_remote_id(store, run.job.id, run.attempt, "r-1", T0)
    _settle(store, run.job.id, run.attempt, why)
    store.promote_due(LATER * 2)
    assert a_start(store, run.job.id, server="gpu1").remote_id is None


def test_time_at_the_server_counts_from_when_it_took_up_this_remote_id(store):
    run = a_running_job(store, server="gpu1")
    store_remote_id(store, run.job.id, run.attempt, "r-1", T0)
    store_end(store, run.job.id, run.attempt, Reason.HANDED_BACK, T0)
    again = a_start(store, run.job.id, server="gpu1")
    store_remote_id(store, run.job.id, again.attempt, "r-1", LATER)
    assert again.sent_ms == T0
    store_remote_id(store, run.job.id, again.attempt, "r-2", LATER)
    store_end(store, run.job.id, again.attempt, Reason.HANDED_BACK, LATER)
    third = a_start(store, run.job.id, server="gpu1")
    assert (third.remote_id, third.sent_ms) == ("r-2", LATER)


def test_starts_that_reached_no_server_do_not_count_as_attempts(store):
    job = a_queued_job(store)
    for why in (Reason.SERVER_BUSY, Reason.SERVER_UNREACHABLE, Reason.HANDED_BACK):
        _settle(store, job.id, a_start(store, job.id).attempt, why)
    _settle(store, job.id, a_start(store, job.id).attempt, Reason.SERVER_ERROR)
    after = store.get(job.id)
    assert (after.attempt, after.waits, after.attempts, after.failures, after.crashes) == (4, 3, 1, 1, 0)


def test_attempts_of_returns_the_start_and_the_outcome_of_each_attempt(store):
    job = a_queued_job(store)
    first = a_start(store, job.id, server="gpu1", now_ms=T0 + 1)
    store_end(store, job.id, first.attempt, Reason.SERVER_ERROR, T0 + 2, error=ERROR, due_ms=T0 + 3)
    store.promote_due(T0 + 3)
    a_start(store, job.id, server="gpu2", now_ms=T0 + 4)
    done, under_way = attempts_of(store.list_events(job.id))
    assert (done.attempt, done.server, done.slot, done.started_ms, done.ended_ms) == (
        1,
        "gpu1",
        "gpu1-slot0",
        T0 + 1,
        T0 + 2,
    )
    assert (done.outcome, done.error) == ("server_error", {"code": "model_error", "message": "out of memory"})
    assert (under_way.attempt, under_way.server, under_way.ended_ms, under_way.outcome) == (2, "gpu2", None, None)


# -- waiting for a time ----------------------------------------------------------------------------------------


def test_delayed_jobs_are_queued_when_due_and_not_before(store):
    job = a_delayed_job(store, due_ms=T0 + SECOND)
    assert store.promote_due(T0 + SECOND - 1) == []
    assert [w.id for w in store.promote_due(T0 + SECOND)] == [job.id]
    after = store.get(job.id)
    assert (after.state, after.due_ms) == (State.QUEUED, None)
    assert store.promote_due(LATER) == []


def test_promote_due_moves_the_earliest_due_jobs_first_up_to_the_limit(store):
    late, soon, later = (a_delayed_job(store, due_ms=T0 + n) for n in (2, 1, 3))
    assert [w.id for w in store.promote_due(LATER, limit=2)] == [soon.id, late.id]
    assert [w.id for w in store.promote_due(LATER, limit=2)] == [later.id]


def test_jobs_due_at_the_same_time_are_queued_in_order_of_acceptance(store):
    ids = [a_delayed_job(store, due_ms=T0 + SECOND).id for _ in range(5)]
    assert [w.id for w in store.promote_due(LATER)] == ids


def test_two_concurrent_promotions_queue_each_job_once(database, store):
    other = JobStore(Database(database.url))
    ids = {a_delayed_job(store).id for _ in range(20)}
    mine, theirs = at_once(lambda: store.promote_due(LATER), lambda: other.promote_due(LATER))
    promoted = [w.id for w in mine + theirs]
    assert sorted(promoted) == sorted(ids)
    assert all(len(trail_of(store, job_id)) == 2 for job_id in ids)
    other.database.close()


@pytest.mark.parametrize("state", sorted(ACTIVE_STATES))
def test_a_job_is_not_overdue_before_its_deadline_nor_after_its_end(store, state):
    job = a_job_in(store, state, deadline_ms=T0 + SECOND)
    a_job_in(store, state)  # has no deadline
    assert store.expire_overdue(T0 + SECOND - 1) == []
    if state is State.RUNNING:
        assert store_end(store, job.id, job.attempt, Reason.DEADLINE_PASSED, LATER)
    else:
        assert store.expire_overdue(LATER)
    assert store.expire_overdue(LATER) == []
    assert store.get(job.id).state is State.EXPIRED


# -- a person's retry, a person's cancel -----------------------------------------------------------------------


def test_a_revived_job_returns_to_its_place_with_fresh_budgets(store):
    dead = an_ended_job(store, State.DEAD, deadline_ms=LATER, callback_url=CALLBACK)
    younger = a_queued_job(store)
    waiting = store.revive(dead.id, LATER)
    job = store.get(dead.id)
    assert (waiting.id, waiting.seq) == (dead.id, dead.seq)
    assert [w.id for w in store.list_queued(["zimg"])] == [dead.id, younger.id]
    assert (job.failures, job.crashes, job.attempt) == (0, 0, 1)
    assert (job.finished_ms, job.error_code, job.error_message, job.deadline_ms) == (None, None, None, None)
    assert (job.server, job.slot, job.lease, job.remote_id) == (None, None, None, None)


def test_a_manual_retry_resets_both_budgets_and_keeps_the_count_of_starts(store):
    job = a_queued_job(store)
    for why in (Reason.SERVER_BUSY, Reason.LEASE_EXPIRED, Reason.SERVER_ERROR, Reason.RETRIES_EXHAUSTED):
        _settle(store, job.id, a_start(store, job.id).attempt, why)
        store.promote_due(LATER * 2)
    dead = store.get(job.id)
    assert (dead.state, dead.failures, dead.crashes, dead.waits, dead.attempt) == (State.DEAD, 2, 1, 1, 4)
    store.revive(job.id, LATER)
    revived = store.get(job.id)
    assert (revived.failures, revived.crashes, revived.waits, revived.attempt) == (0, 0, 1, 4)


def test_concurrent_revives_of_a_job_revive_it_once(database, store):
    other = JobStore(Database(database.url))
    dead = an_ended_job(store, State.DEAD)
    revived = at_once(lambda: store.revive(dead.id, LATER), lambda: other.revive(dead.id, LATER))
    assert sum(w is not None for w in revived) == 1
    assert trail_of(store, dead.id)[-1] == ("job.enqueued", "revived", 1)
    assert len(trail_of(store, dead.id)) == 4
    other.database.close()


def test_a_revived_job_can_end_before_it_has_started_again(database, store):
    """The job ends twice with one attempt number; each end has a separate message."""
    dead = an_ended_job(store, State.DEAD, callback_url=CALLBACK)
    store.revive(dead.id, LATER)
    moved = store.cancel_waiting(dead.id, LATER)
    with database.read() as connection:
        pending = [Message(*row) for row in connection.execute(select(messages).order_by(messages.c.event))]
    assert [message.id for message in pending] == [
        f"msg_{dead.id}_{moved.attempt}_{state}" for state in ("dead", moved.to)
    ]


@pytest.mark.parametrize("state", [State.QUEUED, State.DELAYED])
def test_a_waiting_job_is_canceled_at_once(store, state):
    job = a_job_in(store, state, callback_url=CALLBACK)
    moved = store.cancel_waiting(job.id, LATER)
    after = store.get(job.id)
    assert (after.state, after.finished_ms, after.due_ms) == (State.CANCELED, LATER, None)
    assert moved.to is State.CANCELED
    assert store.promote_due(LATER * 2) == []


def _comes_to_nothing(state: State | None, to: State) -> bool:
    return state is State.RUNNING and to in {State.QUEUED, State.DELAYED, State.DEAD}


def test_a_cancel_of_a_running_job_is_a_fact_beside_its_state(store):
    run = a_running_job(store)
    assert store.cancel_waiting(run.job.id, LATER) is None
    assert store.request_cancel(run.job.id, LATER)
    assert store.request_cancel(run.job.id, LATER + 1)  # the first one counts
    job = store.get(run.job.id)
    assert (job.state, job.cancel_requested_ms) == (State.RUNNING, LATER)
    assert store_end(store, run.job.id, run.attempt, Reason.CANCEL_REQUESTED, LATER)
    assert store.get(run.job.id).state is State.CANCELED


_ENDS_WITHOUT_RESULT = sorted(why for (state, why), edge in TRANSITIONS.items() if _comes_to_nothing(state, edge.to))


@pytest.mark.parametrize("why", _ENDS_WITHOUT_RESULT)
def test_a_job_with_a_cancel_request_is_canceled_when_its_run_ends_without_a_result(store, why):
    run = a_running_job(store)
    store.request_cancel(run.job.id, T0)
    assert store_end(store, run.job.id, run.attempt + 1, why, T0, due_ms=LATER) is None
    moved = store_end(store, run.job.id, run.attempt, why, T0, error=JobError("busy", "come again"), due_ms=LATER)
    job = store.get(run.job.id)
    assert (moved.to, job.state, job.why, job.due_ms) == (*[State.CANCELED] * 2, Reason.CANCEL_REQUESTED, None)
    assert (job.waits, job.failures, job.crashes, job.error_code) == (0, 0, 0, "canceled")
    assert trail_of(store, run.job.id)[1:] == [
        ("job.started", "started", 1),
        ("job.canceled", "cancel_requested", 1),
    ]


@pytest.mark.parametrize("state", sorted(set(State) - {State.RUNNING}))
def test_a_cancel_request_is_stored_only_for_a_running_job(store, state):
    job = a_job_in(store, state)
    assert not store.request_cancel(job.id, LATER)
    assert store.get(job.id).cancel_requested_ms is None


# -- the end, and its messages ---------------------------------------------------------------------------------


def test_hook_1_a_job_whose_message_is_still_pending_is_not_purged(database, store):
    job = an_ended_job(store, callback_url=CALLBACK)
    assert retention.delete_ended_jobs(store.database, LATER) == 0
    (webhook_id,) = due_ids(database, LATER)
    failed(database, claim(database, webhook_id, LATER, LATER + SECOND), LATER, None)
    assert retention.delete_ended_jobs(store.database, LATER) == 1
    assert store.get(job.id) is None
