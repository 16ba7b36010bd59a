"""What an ended job owes to those who wait for it: rows that are written in the transaction of its end.

Who sends the messages, and who tells the ends, reads them from there (outbox/webhooks.py, outbox/tellings.py).
"""

from typing import Any, TypeAlias

from database.db import Transaction
from database.prepared import Rows
from jobs.models import tellings, webhooks
from jobs.states import FINAL, State

Row: TypeAlias = Any

FIRST_MS = 10_000
"""Whoever ended a job tells it at once; only after this does anybody else look."""

_WEBHOOKS, _TELLINGS = Rows(webhooks), Rows(tellings)


def webhook(tx: Transaction, row: Row, to: State, now_ms: int) -> None:
    """In the transaction that brings a job to `to`: note the message that its client is owed, if this is the end."""
    if to not in FINAL or not row.callback_url:
        return
    # A dead job may be revived and end again before its next start: the same attempt, another message.
    tx.insert(
        _WEBHOOKS,
        {
            "id": f"msg_{row.id}_{row.attempt}_{to.value}",
            "job_id": row.id,
            "url": row.callback_url,
            "status": to.value,
            "state": "pending",
            "next_ms": now_ms,
            "created_ms": now_ms,
        },
    )


def telling(tx: Transaction, row: Row, to: State, now_ms: int) -> str | None:
    """In the transaction that brings a job to `to`: note that this is to be told, if it is the end and somebody waits.

    Answers the id of what is owed.
    """
    if to not in FINAL or row.envelope is None:
        return None
    telling_id = f"{row.id}_{row.attempt}_{to.value}"
    tx.insert(_TELLINGS, {"id": telling_id, "job_id": row.id, "next_ms": now_ms + FIRST_MS, "created_ms": now_ms})
    return telling_id
