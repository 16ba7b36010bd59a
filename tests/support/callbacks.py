"""Messages to jobs' `callback_url` for tests, by the writes with which the webhook process sends them."""

from slotkeeper.db import Database
from slotkeeper.jobs.notifications import make_end_number, make_message_id, parse_message_id
from slotkeeper.jobs.store import JobStore
from slotkeeper.outbox.subscriptions import subscription_of_job
from slotkeeper.outbox.webhook_messages import DeliveryResult, Message, MessageKey, MessageQueue


def due_ids(database: Database, now_ms: int, limit: int = 1000) -> list[str]:
    """Return the webhook-ids of due messages, oldest first."""
    due = MessageQueue(database).list_due_callbacks(now_ms, limit)
    return [make_message_id(message.job_id, message.event) for message in due]


def claim(database: Database, webhook_id: str, now_ms: int, until: int) -> Message | None:
    """Claim a message for a delivery until `until`; None: it is not due, or claimed by another process."""
    if (named := parse_message_id(webhook_id)) is None:
        return None
    job_id, attempt, state = named
    key = MessageKey(job_id, make_end_number(attempt, state), of_job=True)
    return next(iter(MessageQueue(database).claim([key], now_ms, until)), None)


def delivered(database: Database, message: Message, now_ms: int, status: int = 200) -> None:
    """Store that the receiver has accepted the message."""
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
    """Store a failed delivery.  `next_ms` None: there is no further one."""
    job = JobStore(database).get(message.job_id)
    assert job is not None
    MessageQueue(database).note_failed(
        message, subscription_of_job(job), DeliveryResult(False, status, 1, error), now_ms, next_ms
    )
