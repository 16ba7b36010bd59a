"""HOOK-1: an ended job's message is owed until it is delivered or given up, and has the same id at every try."""

from typing import Any

import pytest
from sqlalchemy import select

from jobs.db import Database
from jobs.models import webhooks
from jobs.states import FINAL, State, Why
from jobs.webhooks import Webhooks
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

UNTIL = T0 + 30 * SECOND


@pytest.fixture
def webhook_id(store, hooks) -> str:
    """A message that is owed since T0."""
    an_ended_job(store, callback_url=CALLBACK)
    return _due(hooks, T0)[0]


def _due(hooks: Webhooks, now: int, **more: Any) -> list[str]:
    return [due.id for due in hooks.due(now, **more)]


def _row(database: Database, webhook_id: str):
    with database.read() as connection:
        return connection.execute(select(webhooks).where(webhooks.c.id == webhook_id)).one()


@pytest.mark.parametrize("state", sorted(FINAL))
def test_every_end_of_a_job_owes_one_message_that_names_it(store, hooks, state):
    job = an_ended_job(store, state, callback_url=CALLBACK)
    (owed,) = _due(hooks, T0)
    message = hooks.claim(owed, T0, UNTIL)
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
    assert store.settle(run.job.id, run.attempt, Why.FINISHED, T0, result="{}").webhook_id is None
    assert _due(hooks, T0) == []


def test_the_settle_that_owes_a_message_names_it(store, hooks):
    run = a_running_job(store, callback_url=CALLBACK)
    moved = store.settle(run.job.id, run.attempt, Why.FINISHED, T0, result="{}")
    assert _due(hooks, T0) == [moved.webhook_id]


def test_each_end_of_a_revived_job_has_a_message_of_its_own(store, hooks):
    dead = an_ended_job(store, State.DEAD, callback_url=CALLBACK)
    store.revive(dead.id, T0)
    run = a_start(store, dead.id)
    store.settle(dead.id, run.attempt, Why.RETRIES_EXHAUSTED, T0)
    assert len(set(_due(hooks, T0))) == 2


def test_only_one_at_a_time_may_try(hooks, webhook_id):
    assert hooks.claim(webhook_id, T0, UNTIL) is not None
    assert hooks.claim(webhook_id, T0, UNTIL) is None
    assert hooks.claim(webhook_id, UNTIL - 1, UNTIL) is None
    assert _due(hooks, UNTIL - 1) == []


def test_of_many_who_want_to_try_at_once_one_may(database, store):
    sides = [Webhooks(Database(database.url)) for _ in range(3)]
    for _ in range(5):
        an_ended_job(store, callback_url=CALLBACK)
    for webhook_id in _due(sides[0], T0):
        claims = at_once(*[lambda side=side, w=webhook_id: side.claim(w, T0, UNTIL) for side in sides])
        assert [claim.tries for claim in claims if claim is not None] == [1]
    for side in sides:
        side.database.close()


def test_a_message_is_not_tried_before_its_time(hooks, webhook_id):
    assert hooks.claim(webhook_id, T0 - 1, UNTIL) is None
    assert _due(hooks, T0 - 1) == []


def test_a_try_whose_worker_died_is_made_again_under_the_same_id(hooks, webhook_id):
    first = hooks.claim(webhook_id, T0, UNTIL)
    assert _due(hooks, UNTIL) == [webhook_id]
    second = hooks.claim(webhook_id, UNTIL, UNTIL + SECOND)
    assert (second.id, second.tries) == (first.id, 2)


def test_a_delivered_message_is_never_sent_again(database, hooks, webhook_id):
    message = hooks.claim(webhook_id, T0, UNTIL)
    assert hooks.delivered(message, T0 + SECOND, 204)
    row = _row(database, webhook_id)
    assert (row.state, row.delivered_ms, row.last_status, row.last_error) == ("delivered", T0 + SECOND, 204, None)
    assert _due(hooks, UNTIL * 2) == []
    assert hooks.claim(webhook_id, UNTIL * 2, UNTIL * 3) is None


def test_a_failed_try_waits_for_the_next_one(database, hooks, webhook_id):
    message = hooks.claim(webhook_id, T0, UNTIL)
    assert hooks.failed(message, UNTIL + SECOND, 503, "busy")
    row = _row(database, webhook_id)
    assert (row.state, row.tries, row.last_status, row.last_error) == ("pending", 1, 503, "busy")
    assert _due(hooks, UNTIL) == []
    assert _due(hooks, UNTIL + SECOND) == [webhook_id]


def test_a_message_that_is_given_up_is_never_sent_again_and_says_why(database, hooks, webhook_id):
    message = hooks.claim(webhook_id, T0, UNTIL)
    assert hooks.failed(message, None, None, "no such host " * 100)
    row = _row(database, webhook_id)
    assert (row.state, row.last_status, row.delivered_ms) == ("given_up", None, None)
    assert row.last_error.startswith("no such host")
    assert len(row.last_error) == 500
    assert _due(hooks, UNTIL * 2) == []


@pytest.mark.parametrize("error", ["half a \ud83d pair", "a \x00 byte"])
def test_a_failure_is_noted_whatever_the_receiver_wrote(hooks, webhook_id, error):
    assert hooks.failed(hooks.claim(webhook_id, T0, UNTIL), UNTIL, 500, error)


def test_who_took_too_long_cannot_speak_for_the_try_that_came_after(database, hooks, webhook_id):
    slow = hooks.claim(webhook_id, T0, UNTIL)
    quick = hooks.claim(webhook_id, UNTIL, UNTIL * 2)
    assert not hooks.failed(slow, None, 500, "too late")
    assert not hooks.delivered(slow, UNTIL, 200)
    assert _row(database, webhook_id).state == "pending"
    assert hooks.delivered(quick, UNTIL, 200)
    assert not hooks.failed(quick, None, 500, "said twice")
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
    assert hooks.claim("msg_nobody", T0, UNTIL) is None
