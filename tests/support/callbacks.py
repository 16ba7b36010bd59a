"""Messages to jobs' `callback_url` for tests, by the writes with which the webhook process sends them."""

from slotkeeper.db import Database
from slotkeeper.jobs.notifications import make_end_number, make_message_id, parse_message_id
from slotkeeper.jobs.store import JobStore
from slotkeeper.outbox.subscriptions import subscription_of_job
from slotkeeper.outbox.webhook_messages import DeliveryResult, Message, MessageKey, MessageQueue


def due_ids(database: Database, now_ms: int, limit: int = 1000) -> list[str]:
    """The webhook-ids of those that are due, oldest first."""
    return [make_message_id(it.job_id, it.event) for it in MessageQueue(database).list_due_callbacks(now_ms, limit)]


def claim(database: Database, webhook_id: str, now_ms: int, until: int) -> Message | None:
    """Begin a try that will be over by `until`; None: it is not due, or another is at it."""
    if (named := parse_message_id(webhook_id)) is None:
        return None
    job_id, attempt, state = named
    key = MessageKey(job_id, make_end_number(attempt, state), of_job=True)
    return next(iter(MessageQueue(database).claim([key], now_ms, until)), None)


def delivered(database: Database, message: Message, now_ms: int, status: int = 200) -> None:
    """Its receiver has taken it."""
    job = JobStore(database).get(message.job_id)
    assert job is not None
    MessageQueue(database).note_delivered(message, subscription_of_job(job), DeliveryResult(True, status, 1), now_ms)


def failed(
    database: Database,
    message: Message,
    now_ms: int,
    next_ms: int | None,
    status: int | None = None,
    error: str = "it failed",
) -> None:
    """Its receiver has not taken it; `next_ms` None: it is given up."""
    job = JobStore(database).get(message.job_id)
    assert job is not None
    MessageQueue(database).note_failed(
        message, subscription_of_job(job), DeliveryResult(False, status, 1, error), now_ms, next_ms
    )
