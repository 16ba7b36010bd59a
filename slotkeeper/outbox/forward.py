"""The outbox read forward: what has been queued since, whoever queued it.

On PostgreSQL an event becomes visible when its transaction commits, which may be after that of a later one: who must
not miss any reads a while back.
"""

from sqlalchemy import Integer, bindparam, func, select

from slotkeeper.db import Database
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.statements import QUEUED_JOB_COLUMNS, in_state
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import events, jobs
from slotkeeper.jobs.values import QueuedJob

_LAST = CompiledStatement(select(func.max(events.c.id)))
_QUEUED = CompiledStatement(
    select(events.c.id.label("event"), *QUEUED_JOB_COLUMNS)
    .join(jobs, jobs.c.id == events.c.job_id)
    .where(
        events.c.id > bindparam("p_after"),
        events.c.id <= bindparam("p_last"),
        events.c.type == EVENT_TYPES[State.QUEUED],
        in_state(State.QUEUED),
    )
    .order_by(events.c.id)
    .limit(bindparam("p_limit", type_=Integer))
)


def get_last_id(database: Database) -> int:
    """The number of the last event; 0: there is none."""
    with database.read() as connection:
        return _LAST.fetch_value(connection, {}) or 0


def list_queued_between(database: Database, after: int, last: int, limit: int = 1000) -> list[tuple[int, QueuedJob]]:
    """Jobs that an event after `after`, up to `last`, has queued, and that still are; each with its event."""
    if after >= last:
        return []
    with database.read() as connection:
        rows = _QUEUED.fetch_all(connection, {"p_after": after, "p_last": last, "p_limit": limit})
        return [(event, QueuedJob(*waiting)) for event, *waiting in rows]
