"""Removing events that have come of age.  They outlive their jobs: what happened is known when the job is not any more.
What no sink has got yet stays, however old it is, as does the trail of a job that is still here.
"""

from sqlalchemy import Integer, bindparam, delete, select

from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import raise_counter_to
from slotkeeper.jobs.tables import events, jobs
from slotkeeper.outbox.event_reader import REMOVED_COUNTER

_ANY = (1 << 63) - 1
_OF_AGE = "events.of_age_ms"
"""The counter by which the database lets acts go: those before this time may."""
_OLD = (
    select(events.c.id, events.c.at_ms, events.c.actor, jobs.c.seq.label("job"))
    .select_from(events.outerjoin(jobs, jobs.c.id == events.c.job_id))
    .where(events.c.id > bindparam("p_after"), events.c.id <= bindparam("p_last"))
    .order_by(events.c.id)
    .limit(bindparam("p_limit", type_=Integer))
)


class EventRetention:
    """Goes through the events from the oldest on, a slice at a time.  Raises RecordUnavailable."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._after = 0  # Up to here all is looked at that is old enough.

    def delete_next(
        self, transitions_before_ms: int, acts_before_ms: int, last: int | None, limit: int = 1000
    ) -> int | None:
        """Look at the next slice; answers how many it removed.  None: what comes next is young; begin anew.

        `last`: nothing behind this event is removed; None: anything may be.
        """
        query = {"p_after": self._after, "p_last": _ANY if last is None else last, "p_limit": limit}
        with self.database.read(unbounded=True) as connection:
            rows = connection.execute(_OLD, query).all()
        old = [row for row in rows if row.at_ms < max(transitions_before_ms, acts_before_ms)]
        if not old:
            self._after = 0
            return None
        self._after = old[-1].id
        gone = [
            row.id
            for row in old
            if (row.at_ms < acts_before_ms if row.actor is not None else row.at_ms < transitions_before_ms)
            and row.job is None
        ]
        if gone:
            self.database.write(lambda tx: _remove(tx, gone, acts_before_ms))
        return len(gone)


def _remove(tx: Transaction, ids: list[int], acts_before_ms: int) -> None:
    raise_counter_to(tx.connection, _OF_AGE, acts_before_ms)
    raise_counter_to(tx.connection, REMOVED_COUNTER, ids[-1])  # Whoever reads on from before it is told.
    tx.connection.execute(delete(events).where(events.c.id.in_(ids)))
