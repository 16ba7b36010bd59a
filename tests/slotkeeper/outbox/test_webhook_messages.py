"""HOOK-1: the message of an ended job is pending until it is delivered or given up; every try has the same id."""

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
def webhook_id(database, store) -> str:
    """The id of a message that is due since T0."""
    an_ended_job(store, callback_url=CALLBACK)
    return due_ids(database, T0)[0]


def begun(database: Database, webhook_id: str, now_ms: int = T0, until: int = UNTIL) -> Message:
    message = claim(database, webhook_id, now_ms, until)
    assert message is not None
    return message


def log_of(database: Database, message: Message) -> list[tuple[int, str, int | None, str | None]]:
    return [
        (attempt.number, attempt.outcome, attempt.status, attempt.error)
        for attempt in Redelivery(database).list_attempts(message.job_id)
    ]


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


def test_each_end_of_a_revived_job_has_a_separate_message_and_the_messages_are_sent_in_order(database, store):
    dead = an_ended_job(store, State.DEAD, callback_url=CALLBACK)
    store.revive(dead.id, T0)
    run = a_start(store, dead.id)
    store_end(store, dead.id, run.attempt, Reason.RETRIES_EXHAUSTED, T0)
    first, second = due_ids(database, T0)
    assert claim(database, second, T0, UNTIL) is None
    delivered(database, begun(database, first), T0)
    assert begun(database, second).tries == 1


def test_a_claimed_message_cannot_be_claimed_again_until_its_claim_expires(database, webhook_id):
    assert claim(database, webhook_id, T0, UNTIL) is not None
    assert claim(database, webhook_id, T0, UNTIL) is None
    assert claim(database, webhook_id, UNTIL - 1, UNTIL) is None
    assert due_ids(database, UNTIL - 1) == []


def test_of_concurrent_claims_of_a_message_one_succeeds(database, store):
    sides = [Database(database.url) for _ in range(3)]
    for _ in range(5):
        an_ended_job(store, callback_url=CALLBACK)
    for webhook_id in due_ids(database, T0):
        claims = at_once(*[lambda side=side, key=webhook_id: claim(side, key, T0, UNTIL) for side in sides])
        assert [message.tries for message in claims if message is not None] == [1]
    for side in sides:
        side.close()


def test_a_message_is_not_tried_before_its_time(database, webhook_id):
    assert claim(database, webhook_id, T0 - 1, UNTIL) is None
    assert due_ids(database, T0 - 1) == []


def test_a_try_whose_worker_died_is_repeated_with_the_same_message_id(database, webhook_id):
    first = begun(database, webhook_id)
    assert due_ids(database, UNTIL) == [webhook_id]
    second = begun(database, webhook_id, UNTIL, UNTIL + SECOND)
    assert (first.id, second.id, second.tries) == (webhook_id, webhook_id, 2)


def test_a_delivered_message_is_not_sent_again_and_is_in_the_log_and_the_events_of_the_job(database, webhook_id):
    message = begun(database, webhook_id)
    delivered(database, message, T0 + SECOND, 204)
    assert log_of(database, message) == [(1, "delivered", 204, None)]
    with database.read() as connection:
        rows = connection.exec_driver_sql("SELECT job_id, at_ms, data FROM events WHERE type = 'webhook.delivered'")
        assert rows.all() == [(message.job_id, T0 + SECOND, '{"tries":1,"status":204}')]
    assert due_ids(database, UNTIL * 2) == []
    assert claim(database, webhook_id, UNTIL * 2, UNTIL * 3) is None


def test_a_failed_message_is_due_again_at_the_time_of_its_next_try(database, webhook_id):
    message = begun(database, webhook_id)
    failed(database, message, T0, UNTIL + SECOND, 503, "busy")
    assert log_of(database, message) == [(1, "failed", 503, "busy")]
    assert due_ids(database, UNTIL) == []
    assert due_ids(database, UNTIL + SECOND) == [webhook_id]


def test_a_message_that_is_given_up_is_not_sent_again_and_keeps_its_last_error(database, webhook_id):
    failed(database, begun(database, webhook_id), UNTIL, None, None, "no such host " * 100)
    (given_up,) = Redelivery(database).list_given_up_callbacks()
    message = given_up.message
    assert (message.id, message.last_status, message.ended_ms) == (webhook_id, None, UNTIL)
    assert message.last_error is not None
    assert message.last_error.startswith("no such host") and len(message.last_error) == 500
    assert due_ids(database, UNTIL * 2) == []


@pytest.mark.parametrize("error", ["half a \ud83d pair", "a \x00 byte"])
def test_a_failure_is_stored_when_its_error_text_holds_a_surrogate_or_a_nul(database, webhook_id, error):
    failed(database, begun(database, webhook_id), T0, UNTIL, 500, error)
    assert due_ids(database, UNTIL) == [webhook_id]


def test_the_outcome_of_an_expired_try_is_ignored(database, webhook_id):
    slow = begun(database, webhook_id)
    quick = begun(database, webhook_id, UNTIL, UNTIL * 2)
    failed(database, slow, T0, None, 500, "too late")
    delivered(database, slow, UNTIL)
    assert log_of(database, slow) == [] and Redelivery(database).list_given_up_callbacks() == []
    delivered(database, quick, UNTIL)
    failed(database, quick, T0, None, 500, "said twice")
    assert log_of(database, quick) == [(2, "delivered", 200, None)]


def test_the_log_keeps_the_last_tries_of_a_job(database, webhook_id):
    for n in range(MOST_LOGGED_OF_JOB + 3):
        message = begun(database, webhook_id, T0 + n * SECOND, T0 + n * SECOND + 1)
        failed(database, message, T0 + n * SECOND, T0 + (n + 1) * SECOND, 500)
    numbers = [number for number, *_ in log_of(database, message)]
    assert numbers == [*range(MOST_LOGGED_OF_JOB + 3, 3, -1)]


def test_due_messages_are_listed_oldest_first_up_to_the_limit(database, store):
    third, first, second = (T0 + 3, T0 + 1, T0 + 2)
    for now in (third, first, second):
        job = a_queued_job(store, callback_url=CALLBACK)
        store.cancel_waiting(job.id, now)
    due = due_ids(database, T0 + 9)
    assert len(due) == 3
    assert due_ids(database, T0 + 9, limit=2) == due[:2]
    assert due_ids(database, T0 + 2) == due[:2]
    assert due_ids(database, T0 + 1) == due[:1]
    messages = MessageQueue(database)
    page = messages.list_due_callbacks(T0 + 9, 2)
    assert (
        page + messages.list_due_callbacks(T0 + 9, 2, page[-1]) == messages.list_newest_due_callbacks(T0 + 9, 9)[::-1]
    )


# -- given up, and sent once more ------------------------------------------------------------------------------------


def _give_up(database, store, *, now_ms: int = T0, **job: Any) -> str:
    """Give up a message and return its id."""
    an_ended_job(store, now_ms=now_ms, callback_url=CALLBACK, **job)
    (webhook_id,) = due_ids(database, now_ms)
    failed(database, begun(database, webhook_id, now_ms, now_ms + SECOND), now_ms + 5 * SECOND, None, 404, "gone")
    return webhook_id


def test_given_up_messages_are_listed_newest_first_and_filtered_by_tenant(database, store):
    redelivery = Redelivery(database)
    ids = [_give_up(database, store, now_ms=T0 + n * SECOND, tenant=f"t{n % 2}") for n in range(4)]
    an_ended_job(store, callback_url=CALLBACK)  # pending, not given up
    assert [callback.message.id for callback in redelivery.list_given_up_callbacks()] == ids[::-1]
    assert [callback.message.id for callback in redelivery.list_given_up_callbacks("t1")] == [ids[3], ids[1]]
    first = redelivery.list_given_up_callbacks(limit=2)
    last = first[-1].message
    rest = redelivery.list_given_up_callbacks(before=(last.at_ms, last.receiver, last.event))
    assert [callback.message.id for callback in rest] == [ids[1], ids[0]]
    newest = first[0]
    assert (newest.tenant, newest.status, newest.message.tries) == ("t1", "completed", 1)
    assert (newest.message.last_status, newest.message.last_error) == (404, "gone")
    assert (newest.message.at_ms, newest.message.ended_ms) == (T0 + 3 * SECOND, T0 + 8 * SECOND)
    assert Redelivery(database).list_given_up_webhooks() == [], "that is the list of webhooks"


def test_a_given_up_message_is_resent_with_its_id_and_only_for_its_tenant(database, store):
    redelivery, webhook_id = Redelivery(database), _give_up(database, store)
    assert not redelivery.retry_callback(webhook_id, "another", UNTIL)
    assert not redelivery.retry_callback("msg_unknown", None, UNTIL)
    assert not redelivery.retry_callback(webhook_id.replace("completed", "failed"), None, UNTIL), (
        "the job did not end in that state"
    )
    assert due_ids(database, UNTIL) == []
    assert redelivery.retry_callback(webhook_id, "default", UNTIL)
    message = begun(database, webhook_id, UNTIL, UNTIL + SECOND)
    assert (message.id, message.tries) == (webhook_id, 1), "all its tries are available again"
    delivered(database, message, UNTIL)
    assert redelivery.list_given_up_callbacks() == []
    assert redelivery.retry_callback(webhook_id, None, UNTIL) and due_ids(database, UNTIL) == [webhook_id], (
        "a delivered message can be resent, too"
    )


def test_a_job_without_a_callback_has_no_message_to_resend(database, store):
    job = an_ended_job(store)
    assert not Redelivery(database).retry_callback(f"msg_{job.id}_{job.attempt}_{job.state}", None, UNTIL)


def test_a_callback_that_is_being_sent_is_not_claimed_a_second_time(database, webhook_id):
    claimed = begun(database, webhook_id)
    assert Redelivery(database).retry_callback(webhook_id, None, T0)
    assert claim(database, webhook_id, T0, UNTIL) is None
    delivered(database, claimed, T0)
    assert due_ids(database, UNTIL) == []


def test_all_messages_given_up_since_a_time_are_resent_once_each(database, store, monkeypatch):
    monkeypatch.setattr(module, "_PAGE", 2)
    redelivery = Redelivery(database)
    ids = [_give_up(database, store, now_ms=T0 + n * SECOND, tenant="t1" if n == 3 else "default") for n in range(7)]
    assert redelivery.retry_callbacks("default", T0 + 2 * SECOND, UNTIL) == 4
    assert sorted(due_ids(database, UNTIL)) == sorted(set(ids[2:]) - {ids[3]})
    assert redelivery.retry_callbacks(None, 0, UNTIL) == 3
    assert redelivery.retry_callbacks(None, 0, UNTIL) == 0
    assert [entry.act for entry in audit.find_entries(database, audit.AuditFilter())] == ["callback.replay"] * 3


def test_a_job_is_not_deleted_while_its_callback_is_resent(database, store):
    webhook_id = _give_up(database, store)
    assert Redelivery(database).retry_callback(webhook_id, None, UNTIL)
    assert retention.delete_ended_jobs(database, UNTIL * 2, 10) == 0
    delivered(database, begun(database, webhook_id, UNTIL, UNTIL + SECOND), UNTIL)
    assert retention.delete_ended_jobs(database, UNTIL * 2, 10) == 1
