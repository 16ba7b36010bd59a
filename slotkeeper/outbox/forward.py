"""The outbox read forward: what has been queued since, whoever queued it.

On PostgreSQL an event becomes visible when its transaction commits, which may be after that of a later one: who must
not miss any reads a while back.
"""

from sqlalchemy import Integer, bindparam, func, select

from slotkeeper.db.db import Database
from slotkeeper.db.prepared import Prepared
from slotkeeper.jobs.events import TYPES
from slotkeeper.jobs.models import events, jobs
from slotkeeper.jobs.moves import WAITING_COLUMNS, stands
from slotkeeper.jobs.record import Waiting
from slotkeeper.jobs.states import State

_LAST = Prepared(select(func.max(events.c.id)))
_QUEUED = Prepared(
    select(events.c.id.label("event"), *WAITING_COLUMNS)
    .join(jobs, jobs.c.id == events.c.job_id)
    .where(
        events.c.id > bindparam("p_after"),
        events.c.id <= bindparam("p_last"),
        events.c.type == TYPES[State.QUEUED],
        stands(State.QUEUED),
    )
    .order_by(events.c.id)
    .limit(bindparam("p_limit", type_=Integer))
)


def last_event(database: Database) -> int:
    """The number of the last event; 0: there is none."""
    with database.read() as connection:
        return _LAST.scalar(connection, {}) or 0


def queued_between(database: Database, after: int, last: int, limit: int = 1000) -> list[tuple[int, Waiting]]:
    """Jobs that an event after `after`, up to `last`, has queued, and that still are; each with its event."""
    if after >= last:
        return []
    with database.read() as connection:
        rows = _QUEUED.all(connection, {"p_after": after, "p_last": last, "p_limit": limit})
        return [(event, Waiting(*waiting)) for event, *waiting in rows]
