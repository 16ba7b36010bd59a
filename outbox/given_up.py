"""Callbacks of single jobs that were given up: found, and owed once more, under the ids that they had.

They are remembered as long as their jobs are in the record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, Select, select, tuple_, update

from audit import acts
from database.db import Database, Transaction
from jobs.models import jobs, webhooks
from jobs.moves import compared

Row: TypeAlias = Any
Cursor: TypeAlias = tuple[int, str]
"""When a callback was owed first, ms, and its id."""

_PAGE = 500  # that one transaction owes once more
# Said so that the index of all jobs of a tenant is not used: there are fewer callbacks that were given up.
_of_tenant = compared(jobs.c.tenant)
_GIVEN_UP = webhooks.c.state == "given_up"
_FOUND = select(
    webhooks.c.id,
    webhooks.c.job_id,
    jobs.c.model,
    jobs.c.tenant,
    webhooks.c.url,
    webhooks.c.status,
    webhooks.c.tries,
    webhooks.c.last_status,
    webhooks.c.last_error,
    webhooks.c.created_ms.label("ended_ms"),
    webhooks.c.next_ms.label("given_up_ms"),
).join(jobs, jobs.c.id == webhooks.c.job_id)


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A callback that was given up.  `status`: how its job had ended, at `ended_ms`; `given_up_ms` 0: not known."""

    id: str
    job_id: str
    model: str
    tenant: str
    url: str
    status: str
    tries: int
    last_status: int | None
    last_error: str | None
    ended_ms: int
    given_up_ms: int


class GivenUpCallbacks:
    """Finds them.  `tenant`, wherever it is taken: whose jobs; None: anybody's."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def page(self, tenant: str | None = None, before: Cursor | None = None, limit: int = 50) -> list[GivenUp]:
        """Those whose jobs ended last come first; `before`: a cursor, the last one of the page before."""
        query = _FOUND.where(_GIVEN_UP, *_whose(tenant))
        if before is not None:
            query = query.where(_place() < before)
        newest = query.order_by(webhooks.c.created_ms.desc(), webhooks.c.id.desc()).limit(limit)
        with self.database.read() as connection:
            return [GivenUp(*row) for row in connection.execute(newest)]

    def owe(self, webhook_id: str, tenant: str | None, now_ms: int) -> bool:
        """Have one sent once more, also one that was delivered; one that is being sent goes on.

        False: there is none.
        """
        query = _FOUND.where(webhooks.c.id == webhook_id, *_whose(tenant))
        replaying = acts.act("callback.replay", webhook=webhook_id)

        def unit(tx: Transaction) -> bool:
            found = tx.connection.execute(query).first()
            if found is None:
                return False
            _again(tx, [webhook_id], webhooks.c.state != "pending", now_ms)
            replaying.note(tx, tenant=found.tenant, model=found.model)
            return True

        return self.database.write(unit)

    def owe_all(self, tenant: str | None, since_ms: int, now_ms: int) -> int:
        """Have all that were given up of jobs that ended since a time sent once more; answers how many."""
        acts.record(self.database, acts.act("callback.replay", tenant=tenant, since_ms=since_ms))
        owed, after = 0, (since_ms - 1, "\U0010ffff")
        while page := self._after(tenant, after):
            ids, after = [row.id for row in page], (page[-1].created_ms, page[-1].id)
            owed += self.database.write(lambda tx, it=ids: _again(tx, it, _GIVEN_UP, now_ms))  # type: ignore[misc]
        return owed

    def _after(self, tenant: str | None, after: Cursor) -> Sequence[Row]:
        """Some of them, the oldest first: one that is given up anew meanwhile is not met again."""
        query: Select[Any] = select(webhooks.c.id, webhooks.c.created_ms).where(_GIVEN_UP, _place() > after)
        if tenant is not None:
            query = query.join(jobs, jobs.c.id == webhooks.c.job_id).where(_of_tenant == tenant)
        oldest = query.order_by(webhooks.c.created_ms, webhooks.c.id).limit(_PAGE)
        with self.database.read() as connection:
            return connection.execute(oldest).all()


def _whose(tenant: str | None) -> tuple[ColumnElement[bool], ...]:
    return () if tenant is None else (_of_tenant == tenant,)


def _place() -> Any:
    return tuple_(webhooks.c.created_ms, webhooks.c.id)


def _again(tx: Transaction, ids: Sequence[str], which: ColumnElement[bool], now_ms: int) -> int:
    fresh = {"state": "pending", "tries": 0, "next_ms": now_ms, "delivered_ms": None}
    return tx.connection.execute(update(webhooks).where(webhooks.c.id.in_(ids), which).values(fresh)).rowcount
