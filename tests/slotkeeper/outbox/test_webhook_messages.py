"""HOOK-1: an ended job's message is owed until it is delivered or given up, and has the same id at every try."""

from typing import Any

import pytest

from slotkeeper import audit
from slotkeeper.db import Database
from slotkeeper.jobs.states import FINAL_STATES, Reason, State
from slotkeeper.outbox import redelivery as module
from slotkeeper.outbox import retention
from slotkeeper.outbox.redelivery import Redelivery
from slotkeeper.outbox.webhook_messages import MOST_LOGGED_OF_JOB, Message, MessageQueue
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
from tests.support.callbacks import claim, delivered, due_ids, failed
from tests.support.ends import store_end

UNTIL = T0 + 30 * SECOND


@pytest.fixture
def owed(database, store) -> str:
    """A message that is owed since T0."""
    an_ended_job(store, callback_url=CALLBACK)
    return due_ids(database, T0)[0]


def begun(database: Database, webhook_id: str, now_ms: int = T0, until: int = UNTIL) -> Message:
    message = claim(database, webhook_id, now_ms, until)
    assert message is not None
    return message


def log_of(database: Database, message: Message) -> list[tuple[int, str, int | None, str | None]]:
    return [(it.number, it.outcome, it.status, it.error) for it in Redelivery(database).list_attempts(message.job_id)]


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_every_end_of_a_job_owes_one_message_that_names_it(database, store, state):
    job = an_ended_job(store, state, callback_url=CALLBACK)
    (due,) = MessageQueue(database).list_due_callbacks(T0, 10)
    assert (due.job_id, due.url, due.tenant) == (job.id, CALLBACK, "default")
    message = begun(database, f"msg_{job.id}_{job.attempt}_{state}")
    assert (message.job_id, message.at_ms, message.tries) == (job.id, T0, 1)


@pytest.mark.parametrize("state", sorted(set(State) - FINAL_STATES))
def test_a_job_that_has_not_ended_owes_nothing(database, store, state):
    a_job_in(store, state, callback_url=CALLBACK)
    assert due_ids(database, T0) == []


def test_a_job_without_a_callback_owes_nothing(database, store):
    run = a_running_job(store)
    store_end(store, run.job.id, run.attempt, Reason.FINISHED, T0, result="{}")
    assert due_ids(database, T0) == []


def test_a_settle_owes_one_message_that_is_named_after_the_end(database, store):
    run = a_running_job(store, callback_url=CALLBACK)
    store_end(store, run.job.id, run.attempt, Reason.FINISHED, T0, result="{}")
    assert due_ids(database, T0) == [f"msg_{run.job.id}_1_completed"]


def test_each_end_of_a_revived_job_has_a_message_of_its_own_and_they_are_sent_in_order(database, store):
    dead = an_ended_job(store, State.DEAD, callback_url=CALLBACK)
    store.revive(dead.id, T0)
    run = a_start(store, dead.id)
    store_end(store, dead.id, run.attempt, Reason.RETRIES_EXHAUSTED, T0)
    first, second = due_ids(database, T0)
    assert claim(database, second, T0, UNTIL) is None
    delivered(database, begun(database, first), T0)
    assert begun(database, second).tries == 1


def test_only_one_at_a_time_may_try(database, owed):
    assert claim(database, owed, T0, UNTIL) is not None
    assert claim(database, owed, T0, UNTIL) is None
    assert claim(database, owed, UNTIL - 1, UNTIL) is None
    assert due_ids(database, UNTIL - 1) == []


def test_of_many_who_want_to_try_at_once_one_may(database, store):
    sides = [Database(database.url) for _ in range(3)]
    for _ in range(5):
        an_ended_job(store, callback_url=CALLBACK)
    for webhook_id in due_ids(database, T0):
        claims = at_once(*[lambda side=side, it=webhook_id: claim(side, it, T0, UNTIL) for side in sides])
        assert [it.tries for it in claims if it is not None] == [1]
    for side in sides:
        side.close()


def test_a_message_is_not_tried_before_its_time(database, owed):
    assert claim(database, owed, T0 - 1, UNTIL) is None
    assert due_ids(database, T0 - 1) == []


def test_a_try_whose_worker_died_is_made_again_under_the_same_id(database, owed):
    first = begun(database, owed)
    assert due_ids(database, UNTIL) == [owed]
    second = begun(database, owed, UNTIL, UNTIL + SECOND)
    assert (first.id, second.id, second.tries) == (owed, owed, 2)


def test_a_delivered_message_is_never_sent_again_and_stands_in_the_log_and_the_jobs_events(database, owed):
    message = begun(database, owed)
    delivered(database, message, T0 + SECOND, 204)
    assert log_of(database, message) == [(1, "delivered", 204, None)]
    with database.read() as connection:
        told = connection.exec_driver_sql("SELECT job_id, at_ms, data FROM events WHERE type = 'webhook.delivered'")
        assert told.all() == [(message.job_id, T0 + SECOND, '{"tries":1,"status":204}')]
    assert due_ids(database, UNTIL * 2) == []
    assert claim(database, owed, UNTIL * 2, UNTIL * 3) is None


def test_a_failed_try_waits_for_the_next_one(database, owed):
    message = begun(database, owed)
    failed(database, message, T0, UNTIL + SECOND, 503, "busy")
    assert log_of(database, message) == [(1, "failed", 503, "busy")]
    assert due_ids(database, UNTIL) == []
    assert due_ids(database, UNTIL + SECOND) == [owed]


def test_a_message_that_is_given_up_is_never_sent_again_and_says_why(database, owed):
    failed(database, begun(database, owed), UNTIL, None, None, "no such host " * 100)
    (given_up,) = Redelivery(database).list_given_up_callbacks()
    message = given_up.message
    assert (message.id, message.last_status, message.ended_ms) == (owed, None, UNTIL)
    assert message.last_error is not None
    assert message.last_error.startswith("no such host") and len(message.last_error) == 500
    assert due_ids(database, UNTIL * 2) == []


@pytest.mark.parametrize("error", ["half a \ud83d pair", "a \x00 byte"])
def test_a_failure_is_noted_whatever_the_receiver_wrote(database, owed, error):
    failed(database, begun(database, owed), T0, UNTIL, 500, error)
    assert due_ids(database, UNTIL) == [owed]


def test_who_took_too_long_cannot_speak_for_the_try_that_came_after(database, owed):
    slow = begun(database, owed)
    quick = begun(database, owed, UNTIL, UNTIL * 2)
    failed(database, slow, T0, None, 500, "too late")
    delivered(database, slow, UNTIL)
    assert log_of(database, slow) == [] and Redelivery(database).list_given_up_callbacks() == []
    delivered(database, quick, UNTIL)
    failed(database, quick, T0, None, 500, "said twice")
    assert log_of(database, quick) == [(2, "delivered", 200, None)]


def test_of_a_job_the_log_keeps_the_last_tries(database, owed):
    for n in range(MOST_LOGGED_OF_JOB + 3):
        message = begun(database, owed, T0 + n * SECOND, T0 + n * SECOND + 1)
        failed(database, message, T0 + n * SECOND, T0 + (n + 1) * SECOND, 500)
    numbers = [number for number, *_ in log_of(database, message)]
    assert numbers == [*range(MOST_LOGGED_OF_JOB + 3, 3, -1)]


def test_messages_are_due_oldest_first_and_no_more_than_asked_for(database, store):
    third, first, second = (T0 + 3, T0 + 1, T0 + 2)
    for now in (third, first, second):
        job = a_queued_job(store, callback_url=CALLBACK)
        store.cancel_waiting(job.id, now)
    owed = due_ids(database, T0 + 9)
    assert len(owed) == 3
    assert due_ids(database, T0 + 9, limit=2) == owed[:2]
    assert due_ids(database, T0 + 2) == owed[:2]
    assert due_ids(database, T0 + 1) == owed[:1]
    messages = MessageQueue(database)
    page = messages.list_due_callbacks(T0 + 9, 2)
    assert (
        page + messages.list_due_callbacks(T0 + 9, 2, page[-1]) == messages.list_newest_due_callbacks(T0 + 9, 9)[::-1]
    )


# -- given up, and sent once more ------------------------------------------------------------------------------------


def _give_up(database, store, *, now_ms: int = T0, **job: Any) -> str:
    """A message that was given up; its id."""
    an_ended_job(store, now_ms=now_ms, callback_url=CALLBACK, **job)
    (owed,) = due_ids(database, now_ms)
    failed(database, begun(database, owed, now_ms, now_ms + SECOND), now_ms + 5 * SECOND, None, 404, "gone")
    return owed


def test_what_was_given_up_is_listed_by_when_its_job_ended_and_to_its_own_tenant(database, store):
    redelivery = Redelivery(database)
    ids = [_give_up(database, store, now_ms=T0 + n * SECOND, tenant=f"t{n % 2}") for n in range(4)]
    an_ended_job(store, callback_url=CALLBACK)  # owed, not given up
    assert [it.message.id for it in redelivery.list_given_up_callbacks()] == ids[::-1]
    assert [it.message.id for it in redelivery.list_given_up_callbacks("t1")] == [ids[3], ids[1]]
    first = redelivery.list_given_up_callbacks(limit=2)
    last = first[-1].message
    rest = redelivery.list_given_up_callbacks(before=(last.at_ms, last.receiver, last.event))
    assert [it.message.id for it in rest] == [ids[1], ids[0]]
    newest = first[0]
    assert (newest.tenant, newest.status, newest.message.tries) == ("t1", "completed", 1)
    assert (newest.message.last_status, newest.message.last_error) == (404, "gone")
    assert (newest.message.at_ms, newest.message.ended_ms) == (T0 + 3 * SECOND, T0 + 8 * SECOND)
    assert Redelivery(database).list_given_up_webhooks() == [], "that is the list of webhooks"


def test_one_that_was_given_up_is_sent_once_more_under_its_id_and_only_for_its_own_tenant(database, store):
    redelivery, owed = Redelivery(database), _give_up(database, store)
    assert not redelivery.retry_callback(owed, "another", UNTIL)
    assert not redelivery.retry_callback("msg_unknown", None, UNTIL)
    assert not redelivery.retry_callback(owed.replace("completed", "failed"), None, UNTIL), "it did not end so"
    assert due_ids(database, UNTIL) == []
    assert redelivery.retry_callback(owed, "default", UNTIL)
    message = begun(database, owed, UNTIL, UNTIL + SECOND)
    assert (message.id, message.tries) == (owed, 1), "with all its tries before it"
    delivered(database, message, UNTIL)
    assert redelivery.list_given_up_callbacks() == []
    assert redelivery.retry_callback(owed, None, UNTIL) and due_ids(database, UNTIL) == [owed], (
        "also what was delivered"
    )


def test_a_job_without_a_callback_is_not_told_once_more(database, store):
    job = an_ended_job(store)
    assert not Redelivery(database).retry_callback(f"msg_{job.id}_{job.attempt}_{job.state}", None, UNTIL)


def test_a_callback_that_is_being_sent_is_not_sent_beside_that(database, owed):
    claimed = begun(database, owed)
    assert Redelivery(database).retry_callback(owed, None, T0)
    assert claim(database, owed, T0, UNTIL) is None
    delivered(database, claimed, T0)
    assert due_ids(database, UNTIL) == []


def test_all_given_up_since_a_time_are_sent_once_more_each_once(database, store, monkeypatch):
    monkeypatch.setattr(module, "_PAGE", 2)
    redelivery = Redelivery(database)
    ids = [_give_up(database, store, now_ms=T0 + n * SECOND, tenant="t1" if n == 3 else "default") for n in range(7)]
    assert redelivery.retry_callbacks("default", T0 + 2 * SECOND, UNTIL) == 4
    assert sorted(due_ids(database, UNTIL)) == sorted(set(ids[2:]) - {ids[3]})
    assert redelivery.retry_callbacks(None, 0, UNTIL) == 3
    assert redelivery.retry_callbacks(None, 0, UNTIL) == 0
    assert [it.act for it in audit.find_entries(database, audit.AuditFilter())] == ["callback.replay"] * 3


def test_a_job_stays_while_its_callback_is_sent_once_more(database, store):
    owed = _give_up(database, store)
    assert Redelivery(database).retry_callback(owed, None, UNTIL)
    assert retention.delete_ended_jobs(database, UNTIL * 2, 10) == 0
    delivered(database, begun(database, owed, UNTIL, UNTIL + SECOND), UNTIL)
    assert retention.delete_ended_jobs(database, UNTIL * 2, 10) == 1
