"""Ends that somebody outside waits for by the way the job came, and has not been told of.

A row is written with the last transition of a job that has an envelope, and removed when its clients have been told.
So an end is told at least once, whatever dies in between; jobs without an envelope owe nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, case, delete, select, update

from slotkeeper.db import Database
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.jobs import notifications
from slotkeeper.jobs.tables import result_notifications

_LONGEST_MS = 600_000

_AGE = bindparam("p_now", type_=result_notifications.c.created_ms.type) - result_notifications.c.created_ms
_DUE = (
    select(result_notifications.c.id)
    .where(result_notifications.c.next_ms <= bindparam("p_now"))
    .order_by(result_notifications.c.next_ms)
    .limit(bindparam("p_limit"))
)
_IS_ANY_DUE = CompiledStatement(
    select(result_notifications.c.next_ms).where(result_notifications.c.next_ms <= bindparam("p_now")).limit(1)
)
# The next try is written before this one: a claim that comes to nothing costs no second write.
_CLAIM = (
    update(result_notifications)
    .where(result_notifications.c.id.in_(_DUE), result_notifications.c.next_ms <= bindparam("p_now"))
    .values(next_ms=bindparam("p_until") + case((_AGE < _LONGEST_MS, _AGE), else_=_LONGEST_MS))
    .returning(result_notifications.c.id, result_notifications.c.job_id, result_notifications.c.created_ms)
)


@dataclass(frozen=True, slots=True)
class ResultNotification:
    """One end that is owed.  `id` names the job, its run and how it ended: a revived job owes another."""

    id: str
    job_id: str


class ResultNotifications:
    """Reads and removes what is owed."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def claim_due(self, now_ms: int, limit: int) -> list[ResultNotification]:
        """What is due, oldest first; each falls due again, later each time, unless it is told meanwhile.

        It is on the disk before it is answered, and with it the ends that will be told of.
        """
        with self.database.read() as connection:  # A write would wait for the disk, and mostly in vain.
            if _IS_ANY_DUE.fetch_first(connection, {"p_now": now_ms}) is None:
                return []
        params: dict[str, Any] = {"p_now": now_ms, "p_until": now_ms + notifications.NOTIFY_AFTER_MS, "p_limit": limit}
        rows = self.database.write(lambda tx: tx.connection.execute(_CLAIM, params).all())
        return [ResultNotification(row.id, row.job_id) for row in sorted(rows, key=lambda row: row.created_ms)]

    def is_pending(self, telling_id: str) -> bool:
        with self.database.read() as connection:
            return (
                connection.execute(
                    select(result_notifications.c.id).where(result_notifications.c.id == telling_id)
                ).first()
                is not None
            )

    def delete(self, ids: Sequence[str]) -> None:
        """Owed no more.  Relaxed: after a power cut it is told once more."""
        gone = delete(result_notifications).where(result_notifications.c.id.in_(ids))
        self.database.write(lambda tx: tx.connection.execute(gone), durable=False)
