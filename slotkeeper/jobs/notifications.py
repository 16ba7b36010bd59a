"""What an ended job owes to those who wait for it: rows that are written in the transaction of its end.

Who sends the messages, and who tells the ends, reads them from there (slotkeeper/outbox/webhook_messages.py,
slotkeeper/outbox/result_notifications.py).
"""

import re
from typing import Any, TypeAlias

from slotkeeper.db.compiled_sql import BulkInsert
from slotkeeper.db.group_commit import Transaction
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.tables import messages, result_notifications

Row: TypeAlias = Any

NOTIFY_AFTER_MS = 10_000
"""Whoever ended a job tells it at once; only after this does anybody else look."""

_MESSAGES, _TELLINGS = BulkInsert(messages), BulkInsert(result_notifications)
# Stored by their place here.  A dead job may come to another end under the same attempt, which is told after that.
_ENDS = (State.DEAD, State.COMPLETED, State.FAILED, State.EXPIRED, State.CANCELED)
_MESSAGE_ID = re.compile(r"msg_(.+)_([0-9]{1,9})_([a-z]+)", re.DOTALL)


def add_callback_message(tx: Transaction, row: Row, to: State, now_ms: int) -> None:
    """In the transaction that brings a job to `to`: note the message for its `callback_url`, if this is the end.

    The job is the subscription: the message's receiver is its id (HOOK-1).
    """
    if to not in FINAL_STATES or not row.callback_url:
        return
    tx.insert(
        _MESSAGES,
        {
            "receiver": row.id,
            "event": make_end_number(row.attempt, to),
            "job_id": row.id,
            "type": EVENT_TYPES[to],
            "at_ms": now_ms,
            "next_ms": now_ms,
            "owed_ms": now_ms,
        },
    )


def make_end_number(attempt: int, state: State) -> int:
    """Return the number by which a job's own subscription knows this end.

    The event's number is not known before the transaction writes its rows.  The attempt alone is not enough: a dead
    job may be revived and end again before its next start.
    """
    return attempt * 10 + _ENDS.index(state)


def make_message_id(job_id: str, number: int) -> str:
    """Return the webhook-id of the message that tells this end to the job's `callback_url`."""
    return f"msg_{job_id}_{number // 10}_{state_of_end(number)}"


def state_of_end(number: int) -> State:
    """Return how the job had ended."""
    return _ENDS[number % 10]


def parse_message_id(given_id: str) -> tuple[str, int, State] | None:
    """Return the job, attempt and state that such a webhook-id names; None: it is none."""
    found = _MESSAGE_ID.fullmatch(given_id)
    return None if found is None or found[3] not in _ENDS else (found[1], int(found[2]), State(found[3]))


def add_result_notification(tx: Transaction, row: Row, to: State, now_ms: int) -> str | None:
    """In the transaction that brings a job to `to`: note that this is to be told, if it is the end and somebody waits.

    Answers the id of what is owed.
    """
    if to not in FINAL_STATES or row.envelope is None:
        return None
    telling_id = f"{row.id}_{row.attempt}_{to.value}"
    tx.insert(
        _TELLINGS, {"id": telling_id, "job_id": row.id, "next_ms": now_ms + NOTIFY_AFTER_MS, "created_ms": now_ms}
    )
    return telling_id
