"""Removing jobs for good, and what hangs on them, so that the ledger still balances (JOB-3).

Their events stay for a time of their own (slotkeeper/outbox/ageing.py).

A job whose webhook is owed stays until that is delivered or given up: the message is made from the job (HOOK-1).
"""

from collections import Counter

from sqlalchemy import ColumnElement, and_, bindparam, delete, select

from slotkeeper import audit
from slotkeeper.db import Database, Transaction
from slotkeeper.db.schema import add_to_counter
from slotkeeper.errors import Conflict
from slotkeeper.jobs.statements import in_state
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs, result_notifications
from slotkeeper.outbox import webhook_messages

_IS_DEAD = (jobs.c.id == bindparam("p_id")) & in_state(State.DEAD)
_DEAD = select(jobs.c.seq, jobs.c.model, jobs.c.tenant).where(_IS_DEAD).with_for_update()


def delete_ended_jobs(database: Database, ended_before_ms: int, limit: int = 500) -> int:
    """Remove jobs that ended before that time, and what hangs on them; answers how many, at most `limit`."""
    # Without a word of states, of which there is an index, too: only what has ended has an end.
    old = and_(jobs.c.finished_ms < ended_before_ms, ~webhook_messages.HAS_PENDING_MESSAGE)
    with database.read() as connection:  # Not in the transaction: who searches keeps nobody from writing.
        seqs = connection.execute(select(jobs.c.seq).where(old).limit(limit)).scalars().all()
    if not seqs:
        return 0
    # It is said again, as a dead job may have been revived meanwhile.
    return database.write(lambda tx: _remove(tx, jobs.c.seq.in_(seqs) & old))


def delete_dead_job(database: Database, job_id: str) -> bool:
    """Remove a dead job.  False: it is not dead.  Raises Conflict while a webhook that tells of it is owed."""
    deleting = audit.make_entry("job.delete", job_id=job_id)

    def unit(tx: Transaction) -> bool | Conflict:
        # Locked, or on PostgreSQL it could be revived and die again, owing another message, before it is removed.
        dead = tx.connection.execute(_DEAD, {"p_id": job_id}).first()
        if dead is None:
            return False
        objection = webhook_messages.find_objection(tx, job_id)
        if objection is not None:
            return objection
        deleting.write(tx, model=dead.model, tenant=dead.tenant)
        return _remove(tx, jobs.c.seq == dead.seq) == 1

    return database.write(unit)


def _remove(tx: Transaction, which: ColumnElement[bool]) -> int:
    """A few statements, however many jobs."""
    rows = tx.connection.execute(delete(jobs).where(which).returning(jobs.c.id, jobs.c.state)).all()
    ids = [row.id for row in rows]
    if ids:
        tx.connection.execute(delete(result_notifications).where(result_notifications.c.job_id.in_(ids)))
        webhook_messages.forget_jobs(tx, ids)
    for state, number in sorted(Counter(row.state for row in rows).items()):
        add_to_counter(tx.connection, f"purged.{state}", number)
    return len(rows)
