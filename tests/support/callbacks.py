"""Messages to jobs' `callback_url` for tests, by the writes with which the webhook process sends them."""

from slotkeeper.db.db import Database
from slotkeeper.jobs.owed import end_of, message_id, number_of_end
from slotkeeper.jobs.store import Store
from slotkeeper.outbox.callbacks import Callbacks
from slotkeeper.outbox.messages import Answered, Key, Message, Messages
from slotkeeper.outbox.receivers import subscription_of


def due_ids(database: Database, now_ms: int, limit: int = 1000) -> list[str]:
    """The webhook-ids of those that are due, oldest first."""
    return [message_id(it.job_id, it.event) for it in Callbacks(database).due(now_ms, limit)]


def claim(database: Database, webhook_id: str, now_ms: int, until: int) -> Message | None:
    """Begin a try that will be over by `until`; None: it is not due, or another is at it."""
    if (named := end_of(webhook_id)) is None:
        return None
    job_id, attempt, state = named
    key = Key(job_id, number_of_end(attempt, state), of_job=True)
    return next(iter(Messages(database).claim_all([key], now_ms, until)), None)


def delivered(database: Database, message: Message, now_ms: int, status: int = 200) -> None:
    """Its receiver has taken it."""
    job = Store(database).get(message.job_id)
    assert job is not None
    Messages(database).delivered(message, subscription_of(job), Answered(True, status, 1), now_ms)


def failed(
    database: Database,
    message: Message,
    now_ms: int,
    next_ms: int | None,
    status: int | None = None,
    error: str = "it failed",
) -> None:
    """Its receiver has not taken it; `next_ms` None: it is given up."""
    job = Store(database).get(message.job_id)
    assert job is not None
    Messages(database).failed(message, subscription_of(job), Answered(False, status, 1, error), now_ms, next_ms)
