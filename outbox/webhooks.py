"""Messages owed to clients, and what came of each try (HOOK-1).

The row is written with the job's last transition.  A try begins with a claim: a guarded UPDATE that sets the
next try past the time this one can take, so that a doubled wake-up does not send the message twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Integer, Select, bindparam, func, select, tuple_, update

from database.db import Database, Transaction
from database.prepared import Prepared
from jobs import events
from jobs.models import jobs, webhooks
from jobs.moves import compared
from jobs.record import Webhook, storable
from jobs.states import State

DELIVERED = "webhook.delivered"
"""The event of a message that has arrived."""
_MAX_ERROR = 500

# Said so that the index of pending messages is not used: one message is found by its id.
_IS_PENDING = compared(webhooks.c.state) == "pending"
_CLAIM = Prepared(
    update(webhooks)
    .where(
        webhooks.c.id == bindparam("p_id"),
        _IS_PENDING,
        webhooks.c.next_ms <= bindparam("p_now"),
    )
    .values(tries=webhooks.c.tries + 1, next_ms=bindparam("p_until"))
    .returning(webhooks.c.id, webhooks.c.job_id, webhooks.c.url, webhooks.c.status, webhooks.c.tries)
)
_END = Prepared(
    update(webhooks)
    .where(
        webhooks.c.id == bindparam("p_id"),
        _IS_PENDING,
        webhooks.c.tries == bindparam("p_tries"),
    )
    .values(
        state=bindparam("p_state"),
        next_ms=bindparam("p_next"),
        last_status=bindparam("p_status"),
        last_error=bindparam("p_error"),
        delivered_ms=bindparam("p_delivered"),
    )
)
# Asked of each message: SQLite would begin a join with all jobs.
_TENANT = func.coalesce(select(jobs.c.tenant).where(jobs.c.id == webhooks.c.job_id).scalar_subquery(), "")
_DUE = (
    select(webhooks.c.next_ms, webhooks.c.id, webhooks.c.url, _TENANT)
    .where(webhooks.c.state == "pending", webhooks.c.next_ms <= bindparam("p_now"))
    .limit(bindparam("p_limit", type_=Integer))
)
_OLDEST_DUE = _DUE.order_by(webhooks.c.next_ms, webhooks.c.id)
_FIRST_DUE = Prepared(_OLDEST_DUE)  # said four times a second while anything is owed
_FIRST = Prepared(select(webhooks.c.next_ms).where(webhooks.c.state == "pending").order_by(webhooks.c.next_ms).limit(1))


@dataclass(frozen=True, slots=True)
class Due:
    """A message whose next try is due.  `next_ms` and `id` are the cursor of the page after it."""

    next_ms: int
    id: str
    url: str
    tenant: str


class Webhooks:
    """Reads and changes the messages."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def claim_all(self, ids: Sequence[str], now_ms: int, until: int) -> list[Webhook]:
        """Begin a try, over by `until`, of each of these that is due and that nobody else is at."""

        def unit(tx: Transaction) -> list[Webhook]:
            tried = (_CLAIM.first(tx.connection, {"p_id": id_, "p_now": now_ms, "p_until": until}) for id_ in ids)
            rows = [row for row in tried if row is not None]
            return [Webhook(row.id, row.job_id, row.url, State(row.status), row.tries) for row in rows]

        return self.database.write(unit)

    def delivered(self, webhook: Webhook, now_ms: int, status: int) -> bool:
        return self._end(webhook, "delivered", now_ms, status, None, delivered=now_ms)

    def failed(self, webhook: Webhook, now_ms: int, next_ms: int | None, status: int | None, error: str) -> bool:
        """Note a failed try; `next_ms` None: give up."""
        state, then = ("given_up", now_ms) if next_ms is None else ("pending", next_ms)
        return self._end(webhook, state, then, status, storable(error, _MAX_ERROR), delivered=None)

    def _end(
        self,
        webhook: Webhook,
        state: str,
        next_ms: int,
        status: int | None,
        error: str | None,
        delivered: int | None,
    ) -> bool:
        params = {
            "p_id": webhook.id,
            "p_tries": webhook.tries,
            "p_state": state,
            "p_next": next_ms,
            "p_status": status,
            "p_error": error,
            "p_delivered": delivered,
        }

        def unit(tx: Transaction) -> bool:
            ended = _END.count(tx.connection, params) == 1
            if ended and delivered is not None:
                told = {"tries": webhook.tries, "status": status}
                events.note(tx, webhook.job_id, DELIVERED, delivered, told)
            return ended

        return self.database.write(unit)

    def due(self, now_ms: int, limit: int = 500, after: Due | None = None) -> list[Due]:
        """The messages whose next try is due, oldest first, from `after` on."""
        if after is None:
            with self.database.read() as connection:
                return [Due(*row) for row in _FIRST_DUE.all(connection, {"p_now": now_ms, "p_limit": limit})]
        query = _OLDEST_DUE.where(tuple_(webhooks.c.next_ms, webhooks.c.id) > (after.next_ms, after.id))
        return self._read(query, now_ms, limit)

    def owes(self) -> bool:
        """Whether there is a message that is still to be sent, due or not."""
        with self.database.read() as connection:
            return _FIRST.first(connection, {}) is not None

    def newest_due(self, now_ms: int, limit: int) -> list[Due]:
        """Those that have become due last, the newest first."""
        return self._read(_DUE.order_by(webhooks.c.next_ms.desc(), webhooks.c.id.desc()), now_ms, limit)

    def _read(self, query: Select[Any], now_ms: int, limit: int) -> list[Due]:
        with self.database.read() as connection:
            return [Due(*row) for row in connection.execute(query, {"p_now": now_ms, "p_limit": limit})]
