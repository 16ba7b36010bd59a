"""Pending notifications of Celery's clients that their jobs have ended.

A row is written in the transaction that ends a job with a Celery envelope, and deleted when its clients have been
notified.  So they are notified at least once, whichever process dies in between.  Jobs without an envelope have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, case, delete, select, update

from slotkeeper.db import Database
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.jobs import notifications
from slotkeeper.jobs.tables import result_notifications

_MAX_RETRY_MS = 600_000

_AGE = bindparam("p_now", type_=result_notifications.c.created_ms.type) - result_notifications.c.created_ms
_DUE = (
    select(result_notifications.c.id)
    .where(result_notifications.c.next_ms <= bindparam("p_now"))
    .order_by(result_notifications.c.next_ms)
    .limit(bindparam("p_limit"))
)
_ANY_DUE = CompiledStatement(
    select(result_notifications.c.next_ms).where(result_notifications.c.next_ms <= bindparam("p_now")).limit(1)
)
# The claim schedules the next attempt, so that a failed attempt needs no second write.
_CLAIM = (
    update(result_notifications)
    .where(result_notifications.c.id.in_(_DUE), result_notifications.c.next_ms <= bindparam("p_now"))
    .values(next_ms=bindparam("p_until") + case((_AGE < _MAX_RETRY_MS, _AGE), else_=_MAX_RETRY_MS))
    .returning(result_notifications.c.id, result_notifications.c.job_id, result_notifications.c.created_ms)
)


@dataclass(frozen=True, slots=True)
class ResultNotification:
    """One pending notification.

    id: names the job, its attempt and its final state, so that a job that is revived and ends again has another one.
    """

    id: str
    job_id: str


class ResultNotifications:
    """The pending notifications in the database."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def claim_due(self, now_ms: int, limit: int) -> list[ResultNotification]:
        """Claim at most `limit` due notifications and return them, the oldest first.

        A claimed notification becomes due again, after a longer time at each claim, until it is deleted.  When this
        returns, the claim and the ends of the jobs are durable.
        """
        with self.database.read() as connection:  # Mostly nothing is due, and a write would wait for the disk.
            if _ANY_DUE.fetch_first(connection, {"p_now": now_ms}) is None:
                return []
        params: dict[str, Any] = {"p_now": now_ms, "p_until": now_ms + notifications.NOTIFY_AFTER_MS, "p_limit": limit}
        rows = self.database.write(lambda tx: tx.connection.execute(_CLAIM, params).all())
        return [ResultNotification(row.id, row.job_id) for row in sorted(rows, key=lambda row: row.created_ms)]

    def is_pending(self, notification_id: str) -> bool:
        """Return True if this notification has not been deleted."""
        query = select(result_notifications.c.id).where(result_notifications.c.id == notification_id)
        with self.database.read() as connection:
            return connection.execute(query).first() is not None

    def delete(self, ids: Sequence[str]) -> None:
        """Delete notifications that were sent.  Not durable: after a power cut they are sent again."""
        sent = delete(result_notifications).where(result_notifications.c.id.in_(ids))
        self.database.write(lambda tx: tx.connection.execute(sent), durable=False)
