"""The notifications of a job's end for its clients: rows that are written with the end.

slotkeeper/outbox/webhook_messages.py sends the messages, slotkeeper/outbox/result_notifications.py the results.
"""

import re
from typing import Any, TypeAlias

from slotkeeper.db import Transaction
from slotkeeper.db.compiled_sql import BulkInsert
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.tables import messages, result_notifications

Row: TypeAlias = Any

NOTIFY_AFTER_MS = 10_000
"""The process that ended a job notifies its clients at once; after this time another one does."""

SECRET_OVERLAP_MS = 24 * 3600 * 1000
"""How long webhook messages are signed with the former secret, too, after a rotation."""

_MESSAGES, _RESULT_NOTIFICATIONS = BulkInsert(messages), BulkInsert(result_notifications)
# Stored by their position.  A dead job may end once more under the same attempt: that message comes after.
_ENDS = (State.DEAD, State.COMPLETED, State.FAILED, State.EXPIRED, State.CANCELED)
_MESSAGE_ID = re.compile(r"msg_(.+)_([0-9]{1,9})_([a-z]+)", re.DOTALL)


def add_callback_message(tx: Transaction, row: Row, to: State, now_ms: int) -> None:
    """Add the message of a job's end for its `callback_url`, in the transaction of that end.

    The job is its own subscription: the message's receiver is the job's id (HOOK-1).
    """
    if to not in FINAL_STATES or not row.callback_url:
        return
    add_message(tx, row.id, row.attempt, to, EVENT_TYPES[to], now_ms)


def add_message(tx: Transaction, subject: str, attempt: int, to: State, type_: str, now_ms: int) -> None:
    """Add the message of an end for the `callback_url` of a job or a batch.  subject: its id."""
    tx.insert(
        _MESSAGES,
        {
            "receiver": subject,
            "event": make_end_number(attempt, to),
            "job_id": subject,
            "type": type_,
            "at_ms": now_ms,
            "next_ms": now_ms,
            "owed_ms": now_ms,
        },
    )


def make_end_number(attempt: int, state: State) -> int:
    """Return the number of the end's message, which stands for the event's number.

    That is not known before the transaction writes its rows.  The attempt alone is not enough: a dead job may be
    revived and end again before its next start.
    """
    return attempt * 10 + _ENDS.index(state)


def make_message_id(job_id: str, number: int) -> str:
    """Return the webhook-id of the message about this end."""
    return f"msg_{job_id}_{number // 10}_{state_of_end(number)}"


def state_of_end(number: int) -> State:
    """Return the state in which the job ended."""
    return _ENDS[number % 10]


def parse_message_id(given_id: str) -> tuple[str, int, State] | None:
    """Return (job id, attempt, state) of a webhook-id; None if it is malformed."""
    found = _MESSAGE_ID.fullmatch(given_id)
    return None if found is None or found[3] not in _ENDS else (found[1], int(found[2]), State(found[3]))


def add_result_notification(tx: Transaction, row: Row, to: State, now_ms: int) -> str | None:
    """Add the notification of a job's end for Celery's clients, in the transaction of that end, and return its id.

    Returns None if `to` is no end, or the job was not sent by Celery.
    """
    notification_id = make_notification_id(row, to, row.attempt)
    if notification_id is not None:
        tx.insert(
            _RESULT_NOTIFICATIONS,
            {"id": notification_id, "job_id": row.id, "next_ms": now_ms + NOTIFY_AFTER_MS, "created_ms": now_ms},
        )
    return notification_id


def make_notification_id(row: Row, to: State, attempt: int) -> str | None:
    """Return the id of the notification of this end; None if it is no end, or the job was not sent by Celery."""
    if to not in FINAL_STATES or row.envelope is None:
        return None
    return f"{row.id}_{attempt}_{to.value}"
