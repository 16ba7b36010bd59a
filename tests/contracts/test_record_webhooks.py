"""HOOK-1: an ended job's message is owed until it is delivered or given up, and has the same id at every try."""

from typing import Any

import pytest
from sqlalchemy import select

from audit import search
from database.db import Database
from jobs.models import webhooks
from jobs.states import FINAL, State, Why
from outbox import given_up, removal
from outbox.given_up import GivenUpCallbacks
from outbox.webhooks import Webhooks
from tests.support.builders import (
    CALLBACK,
    SECOND,
    T0,
    a_job_in,
    a_queued_job,
    a_running_job,
    a_start,
    an_ended_job,
    at_once,
)
from tests.support.webhooks_claimed import claim_webhook

UNTIL = T0 + 30 * SECOND


@pytest.fixture
def webhook_id(store, hooks) -> str:
    """A message that is owed since T0."""
    an_ended_job(store, callback_url=CALLBACK)
    return _due(hooks, T0)[0]


def _due(hooks: Webhooks, now_ms: int, **more: Any) -> list[str]:
    return [due.id for due in hooks.due(now_ms, **more)]


def _row(database: Database, webhook_id: str):
    with database.read() as connection:
        return connection.execute(select(webhooks).where(webhooks.c.id == webhook_id)).one()


@pytest.mark.parametrize("state", sorted(FINAL))
def test_every_end_of_a_job_owes_one_message_that_names_it(store, hooks, state):
    job = an_ended_job(store, state, callback_url=CALLBACK)
    (owed,) = _due(hooks, T0)
    message = claim_webhook(hooks, owed, T0, UNTIL)
    assert (message.id, message.job_id, message.url, message.status, message.tries) == (
        owed,
        job.id,
        CALLBACK,
        state,
        1,
    )


@pytest.mark.parametrize("state", sorted(set(State) - FINAL))
def test_a_job_that_has_not_ended_owes_nothing(store, hooks, state):
    a_job_in(store, state, callback_url=CALLBACK)
    assert _due(hooks, T0) == []


def test_a_job_without_a_callback_owes_nothing(store, hooks):
    run = a_running_job(store)
    store.settle(run.job.id, run.attempt, Why.FINISHED, T0, result="{}")
    assert _due(hooks, T0) == []


def test_a_settle_owes_one_message_that_is_named_after_the_end(store, hooks):
    run = a_running_job(store, callback_url=CALLBACK)
    store.settle(run.job.id, run.attempt, Why.FINISHED, T0, result="{}")
    assert _due(hooks, T0) == [f"msg_{run.job.id}_1_completed"]


def test_each_end_of_a_revived_job_has_a_message_of_its_own(store, hooks):
    dead = an_ended_job(store, State.DEAD, callback_url=CALLBACK)
    store.revive(dead.id, T0)
    run = a_start(store, dead.id)
    store.settle(dead.id, run.attempt, Why.RETRIES_EXHAUSTED, T0)
    assert len(set(_due(hooks, T0))) == 2


def test_only_one_at_a_time_may_try(hooks, webhook_id):
    assert claim_webhook(hooks, webhook_id, T0, UNTIL) is not None
    assert claim_webhook(hooks, webhook_id, T0, UNTIL) is None
    assert claim_webhook(hooks, webhook_id, UNTIL - 1, UNTIL) is None
    assert _due(hooks, UNTIL - 1) == []


def test_of_many_who_want_to_try_at_once_one_may(database, store):
    sides = [Webhooks(Database(database.url)) for _ in range(3)]
    for _ in range(5):
        an_ended_job(store, callback_url=CALLBACK)
    for webhook_id in _due(sides[0], T0):
        claims = at_once(*[lambda side=side, w=webhook_id: claim_webhook(side, w, T0, UNTIL) for side in sides])
        assert [claim.tries for claim in claims if claim is not None] == [1]
    for side in sides:
        side.database.close()


def test_a_message_is_not_tried_before_its_time(hooks, webhook_id):
    assert claim_webhook(hooks, webhook_id, T0 - 1, UNTIL) is None
    assert _due(hooks, T0 - 1) == []


def test_a_try_whose_worker_died_is_made_again_under_the_same_id(hooks, webhook_id):
    first = claim_webhook(hooks, webhook_id, T0, UNTIL)
    assert _due(hooks, UNTIL) == [webhook_id]
    second = claim_webhook(hooks, webhook_id, UNTIL, UNTIL + SECOND)
    assert (second.id, second.tries) == (first.id, 2)


def test_a_delivered_message_is_never_sent_again(database, hooks, webhook_id):
    message = claim_webhook(hooks, webhook_id, T0, UNTIL)
    assert hooks.delivered(message, T0 + SECOND, 204)
    row = _row(database, webhook_id)
    assert (row.state, row.delivered_ms, row.last_status, row.last_error) == ("delivered", T0 + SECOND, 204, None)
    assert _due(hooks, UNTIL * 2) == []
    assert claim_webhook(hooks, webhook_id, UNTIL * 2, UNTIL * 3) is None


def test_a_failed_try_waits_for_the_next_one(database, hooks, webhook_id):
    message = claim_webhook(hooks, webhook_id, T0, UNTIL)
    assert hooks.failed(message, T0, UNTIL + SECOND, 503, "busy")
    row = _row(database, webhook_id)
    assert (row.state, row.tries, row.last_status, row.last_error) == ("pending", 1, 503, "busy")
    assert _due(hooks, UNTIL) == []
    assert _due(hooks, UNTIL + SECOND) == [webhook_id]


def test_a_message_that_is_given_up_is_never_sent_again_and_says_why(database, hooks, webhook_id):
    message = claim_webhook(hooks, webhook_id, T0, UNTIL)
    assert hooks.failed(message, UNTIL, None, None, "no such host " * 100)
    row = _row(database, webhook_id)
    assert (row.state, row.last_status, row.delivered_ms) == ("given_up", None, None)
    assert row.last_error.startswith("no such host")
    assert len(row.last_error) == 500
    assert _due(hooks, UNTIL * 2) == []


@pytest.mark.parametrize("error", ["half a \ud83d pair", "a \x00 byte"])
def test_a_failure_is_noted_whatever_the_receiver_wrote(hooks, webhook_id, error):
    assert hooks.failed(claim_webhook(hooks, webhook_id, T0, UNTIL), T0, UNTIL, 500, error)


def test_who_took_too_long_cannot_speak_for_the_try_that_came_after(database, hooks, webhook_id):
    slow = claim_webhook(hooks, webhook_id, T0, UNTIL)
    quick = claim_webhook(hooks, webhook_id, UNTIL, UNTIL * 2)
    assert not hooks.failed(slow, T0, None, 500, "too late")
    assert not hooks.delivered(slow, UNTIL, 200)
    assert _row(database, webhook_id).state == "pending"
    assert hooks.delivered(quick, UNTIL, 200)
    assert not hooks.failed(quick, T0, None, 500, "said twice")
    assert _row(database, webhook_id).state == "delivered"


def test_messages_are_due_oldest_first_and_no_more_than_asked_for(store, hooks):
    third, first, second = (T0 + 3, T0 + 1, T0 + 2)
    for now in (third, first, second):
        job = a_queued_job(store, callback_url=CALLBACK)
        store.end_waiting(job.id, Why.CANCEL_REQUESTED, now)
    owed = _due(hooks, T0 + 9)
    assert len(owed) == 3
    assert _due(hooks, T0 + 9, limit=2) == owed[:2]
    assert _due(hooks, T0 + 2) == owed[:2]
    assert _due(hooks, T0 + 1) == owed[:1]


def test_an_unknown_message_is_none(hooks):
    assert claim_webhook(hooks, "msg_nobody", T0, UNTIL) is None


# -- given up, and sent once more ------------------------------------------------------------------------------------


def _give_up(store, hooks, *, now_ms: int = T0, **job: Any) -> str:
    """A callback that was given up; its id."""
    an_ended_job(store, now_ms=now_ms, callback_url=CALLBACK, **job)
    (owed,) = _due(hooks, now_ms)
    hooks.failed(claim_webhook(hooks, owed, now_ms, now_ms + SECOND), now_ms + 5 * SECOND, None, 404, "gone")
    return owed


def test_what_was_given_up_is_listed_by_when_its_job_ended_and_to_its_own_tenant(database, store, hooks):
    found = GivenUpCallbacks(database)
    ids = [_give_up(store, hooks, now_ms=T0 + n * SECOND, tenant=f"t{n % 2}") for n in range(4)]
    an_ended_job(store, callback_url=CALLBACK)  # owed, not given up
    assert [it.id for it in found.page()] == ids[::-1]
    assert [it.id for it in found.page("t1")] == [ids[3], ids[1]]
    first = found.page(limit=2)
    assert [it.id for it in found.page(before=(first[-1].ended_ms, first[-1].id))] == [ids[1], ids[0]]
    newest = first[0]
    assert (newest.tenant, newest.status, newest.tries) == ("t1", "completed", 1)
    assert (newest.last_status, newest.last_error) == (404, "gone")
    assert (newest.ended_ms, newest.given_up_ms) == (T0 + 3 * SECOND, T0 + 8 * SECOND)


def test_one_that_was_given_up_is_sent_once_more_under_its_id_and_only_for_its_own_tenant(database, store, hooks):
    found, owed = GivenUpCallbacks(database), _give_up(store, hooks)
    assert not found.owe(owed, "another", UNTIL)
    assert not found.owe("msg_unknown", None, UNTIL)
    assert _due(hooks, UNTIL) == []
    assert found.owe(owed, "default", UNTIL)
    message = claim_webhook(hooks, owed, UNTIL, UNTIL + SECOND)
    assert (message.id, message.tries) == (owed, 1), "with all its tries before it"
    assert hooks.delivered(message, UNTIL, 200)
    assert found.page() == []
    assert found.owe(owed, None, UNTIL) and _due(hooks, UNTIL) == [owed], "also what was delivered"


def test_a_callback_that_is_being_sent_is_not_sent_beside_that(database, hooks, webhook_id):
    claimed = claim_webhook(hooks, webhook_id, T0, UNTIL)
    assert GivenUpCallbacks(database).owe(webhook_id, None, T0)
    assert claim_webhook(hooks, webhook_id, T0, UNTIL) is None
    assert hooks.delivered(claimed, T0, 200)


def test_all_given_up_since_a_time_are_sent_once_more_each_once(database, store, hooks, monkeypatch):
    monkeypatch.setattr(given_up, "_PAGE", 2)
    found = GivenUpCallbacks(database)
    ids = [_give_up(store, hooks, now_ms=T0 + n * SECOND, tenant="t1" if n == 3 else "default") for n in range(7)]
    assert found.owe_all("default", T0 + 2 * SECOND, UNTIL) == 4
    assert sorted(_due(hooks, UNTIL)) == sorted(set(ids[2:]) - {ids[3]})
    assert found.owe_all(None, 0, UNTIL) == 3
    assert found.owe_all(None, 0, UNTIL) == 0
    assert [it.act for it in search.find(database, search.Wanted())] == ["callback.replay"] * 3


def test_a_job_stays_while_its_callback_is_sent_once_more(database, store, hooks):
    owed = _give_up(store, hooks)
    assert GivenUpCallbacks(database).owe(owed, None, UNTIL)
    assert removal.purge(store.database, UNTIL * 2, 10) == 0
    hooks.delivered(claim_webhook(hooks, owed, UNTIL, UNTIL + SECOND), UNTIL, 200)
    assert removal.purge(store.database, UNTIL * 2, 10) == 1
