"""Messages to jobs' `callback_url`: those that are due, and those that were given up; and how they are owed once more.

All else about them is as with those of webhooks (slotkeeper/outbox/webhook_messages.py).  They are remembered as long
as their jobs.
"""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Integer, bindparam, select, tuple_

from slotkeeper import audit
from slotkeeper.db import Database, Transaction
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.jobs import notifications
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.statements import unindexed
from slotkeeper.jobs.tables import events, jobs, messages
from slotkeeper.outbox.webhook_messages import IS_DUE, IS_GIVEN_UP, OF_JOB, Message, MessageQueue

# Asked of each message: SQLite would begin a join with all jobs.
_url, _tenant = (
    select(column).where(jobs.c.id == messages.c.job_id).scalar_subquery()
    for column in (jobs.c.callback_url, jobs.c.tenant)
)
_NEXT = (messages.c.next_ms, messages.c.receiver, messages.c.event)
_DUE = select(*_NEXT, _url, _tenant).where(IS_DUE, OF_JOB).limit(bindparam("p_limit", type_=Integer))
_OLDEST = _DUE.order_by(*_NEXT)
_FIRST = CompiledStatement(_OLDEST)  # asked four times a second while anything is owed
_NEWEST = _DUE.order_by(*(column.desc() for column in _NEXT))
_ENDED = (messages.c.at_ms, messages.c.receiver, messages.c.event)


@dataclass(frozen=True, slots=True)
class DueCallback:
    """A message that is due.  The first three are the cursor of the page after it."""

    next_ms: int
    job_id: str
    event: int
    url: str
    tenant: str


@dataclass(frozen=True, slots=True)
class GivenUpCallback:
    """A message that was given up."""

    message: Message
    model: str
    tenant: str
    url: str

    @property
    def status(self) -> str:
        """How the job had ended."""
        return notifications.state_of_end(self.message.event).value


class Callbacks:
    """Finds them.  `tenant`, wherever it is taken: whose jobs; None: anybody's."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._messages = MessageQueue(database)

    def list_due_callbacks(self, now_ms: int, limit: int, after: DueCallback | None = None) -> list[DueCallback]:
        """Those that are due, the oldest first, from `after` on."""
        params = {"p_now": now_ms, "p_limit": limit}
        with self.database.read() as connection:
            if after is None:
                return [DueCallback(*row) for row in _FIRST.fetch_all(connection, params)]
            query = _OLDEST.where(tuple_(*_NEXT) > (after.next_ms, after.job_id, after.event))
            return [DueCallback(*row) for row in connection.execute(query, params)]

    def list_newest_due_callbacks(self, now_ms: int, limit: int) -> list[DueCallback]:
        """Those that have become due last, the newest first."""
        with self.database.read() as connection:
            return [DueCallback(*row) for row in connection.execute(_NEWEST, {"p_now": now_ms, "p_limit": limit})]

    def list_given_up_callbacks(
        self, tenant: str | None = None, before: tuple[int, str, int] | None = None, limit: int = 50
    ) -> list[GivenUpCallback]:
        """Those that were given up, of jobs that ended last first; `before`: a cursor, time, job and number of the last
        one of the page before."""
        query = select(messages, jobs.c.model, jobs.c.tenant, jobs.c.callback_url)
        query = query.join(jobs, jobs.c.id == messages.c.job_id).where(IS_GIVEN_UP, OF_JOB, *_whose(tenant))
        if before is not None:
            query = query.where(tuple_(*_ENDED) < before)
        query = query.order_by(*(column.desc() for column in _ENDED)).limit(limit)
        with self.database.read() as connection:
            return [GivenUpCallback(Message(*row[:-3]), *row[-3:]) for row in connection.execute(query)]

    def retry_all(self, tenant: str | None, since_ms: int, now_ms: int) -> int:
        """Owe all once more that were given up of jobs that ended since a time; answers how many."""
        audit.write_entry(self.database, audit.make_entry("callback.replay", tenant=tenant, since_ms=since_ms))
        which = OF_JOB & (messages.c.at_ms >= since_ms)
        return self._messages.retry(which if tenant is None else which & (_tenant == tenant), now_ms)

    def retry(self, message_id: str, tenant: str | None, now_ms: int) -> bool:
        """Owe one once more, also one that was delivered; one that is being sent goes on.  False: there is none."""
        if (named := notifications.parse_message_id(message_id)) is None:
            return False
        job_id, attempt, state = named
        query = (
            select(events.c.at_ms, jobs.c.tenant, jobs.c.model)
            .join(jobs, jobs.c.id == events.c.job_id)
            .where(events.c.job_id == job_id, events.c.type == EVENT_TYPES[state], events.c.attempt == attempt)
            .where(jobs.c.callback_url.is_not(None), *_whose(tenant))
        )
        replaying = audit.make_entry("callback.replay", webhook=message_id)

        def unit(tx: Transaction) -> bool:
            found = tx.connection.execute(query).first()
            if found is None:
                return False
            told = (notifications.make_end_number(attempt, state), job_id, EVENT_TYPES[state], found.at_ms)
            self._messages.enqueue(tx, job_id, [told], now_ms)
            replaying.write(tx, tenant=found.tenant, model=found.model)
            return True

        return self.database.write(unit)


def _whose(tenant: str | None) -> tuple[ColumnElement[bool], ...]:
    # Said so that the index of all jobs of a tenant is not used: there are fewer messages that were given up.
    return () if tenant is None else (unindexed(jobs.c.tenant) == tenant,)
