"""Removing jobs for good, and what hangs on them, so that the ledger still balances (JOB-3).

A job whose webhook is owed stays until that is delivered or given up: the message is made from the job (HOOK-1).
"""

from collections import Counter
from collections.abc import Sequence

from sqlalchemy import ColumnElement, bindparam, case, delete, func, insert, select, update

from jobs.db import Database, Transaction
from jobs.errors import Conflict
from jobs.models import counters, events, jobs, tellings, webhooks
from jobs.moves import compared, stands
from jobs.states import State
from jobs.tail import REMOVED

# A question asked of each job, not a set to be left out: for that PostgreSQL would read all messages.
_OWES = (
    select(webhooks.c.id)
    .where(webhooks.c.job_id == jobs.c.id, compared(webhooks.c.state) == "pending")
    .limit(1)
    .scalar_subquery()
    .is_not(None)
)
_OWED = select(webhooks.c.id).where(webhooks.c.job_id == bindparam("p_id"), compared(webhooks.c.state) == "pending")
_DEAD = select(jobs.c.seq).where(jobs.c.id == bindparam("p_id"), stands(State.DEAD)).with_for_update()


def purge(database: Database, ended_before_ms: int, limit: int) -> int:
    """Remove jobs that ended before that time; answers how many."""
    # Without a word of states, of which there is an index, too: only what has ended has an end.
    old = (jobs.c.finished_ms < ended_before_ms) & ~_OWES
    with database.read() as connection:  # Not in the transaction: who searches keeps nobody from writing.
        seqs = connection.execute(select(jobs.c.seq).where(old).limit(limit)).scalars().all()
    if not seqs:
        return 0
    # It is said again, as a dead job may have been revived meanwhile.
    return database.write(lambda tx: _remove(tx, jobs.c.seq.in_(seqs) & old))


def delete_dead(database: Database, job_id: str) -> bool:
    """Remove a dead job.  False: it is not dead.  Raises Conflict while its webhook is owed."""

    def unit(tx: Transaction) -> bool | Conflict:
        # Locked, or on PostgreSQL it could be revived and die again, owing another message, before it is removed.
        seq = tx.connection.execute(_DEAD, {"p_id": job_id}).scalar()
        if seq is None:
            return False
        owed = tx.connection.execute(_OWED, {"p_id": job_id}).scalars().first()
        if owed is not None:
            return Conflict(
                f"Job {job_id!r} still owes its webhook {owed!r}, which would be lost with it; "
                "remove the job when that is delivered or given up.",
                job_id=job_id,
                webhook_id=owed,
            )
        return _remove(tx, jobs.c.seq == seq) == 1

    return database.write(unit)


def _remove(tx: Transaction, which: ColumnElement[bool]) -> int:
    """A few statements, however many jobs."""
    rows = tx.connection.execute(delete(jobs).where(which).returning(jobs.c.id, jobs.c.state)).all()
    ids = [row.id for row in rows]
    if ids:
        _note_removed(tx, ids)
        for table in (events, webhooks, tellings):
            tx.connection.execute(delete(table).where(table.c.job_id.in_(ids)))
    for state, number in sorted(Counter(row.state for row in rows).items()):
        count(tx, f"purged.{state}", number)
    return len(rows)


def _note_removed(tx: Transaction, ids: Sequence[str]) -> None:
    """Remember up to which event some are missing from now on: whoever reads on from before it is told."""
    last = tx.connection.execute(select(func.max(events.c.id)).where(events.c.job_id.in_(ids))).scalar() or 0
    higher = case((counters.c.value < last, last), else_=counters.c.value)
    raised = update(counters).where(counters.c.name == REMOVED).values(value=higher)
    if tx.connection.execute(raised).rowcount == 0:
        tx.connection.execute(insert(counters), {"name": REMOVED, "value": last})


def count(tx: Transaction, name: str, by: int = 1) -> None:
    """Raise a counter of the record."""
    raised = update(counters).where(counters.c.name == name).values(value=counters.c.value + by)
    if tx.connection.execute(raised).rowcount == 0:
        tx.connection.execute(insert(counters), {"name": name, "value": by})
