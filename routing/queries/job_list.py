"""Jobs as people look through them: page by page, each read by an index, and how many stand in each state."""

from typing import Any

from sqlalchemy import Select, func, select

from slotkeeper.db import Database
from slotkeeper.jobs.statements import JOB_LIST, key_range, unindexed
from slotkeeper.jobs.states import State
from slotkeeper.jobs.store import job_from_row
from slotkeeper.jobs.tables import jobs
from slotkeeper.jobs.values import Job

# Where most jobs are, before they ran and after.
_MANY_STAND = frozenset({State.QUEUED, State.COMPLETED})


def find_jobs(
    database: Database,
    *,
    state: State | None = None,
    model: str | None = None,
    tenant: str | None = None,
    batch: str | None = None,
    before_seq: int | None = None,
    limit: int = 50,
) -> list[Job]:
    """Jobs without payload and result, newest first; `before_seq` is the cursor: the last one's `seq`.

    Raises DatabaseUnavailable.
    """
    with database.read() as connection:
        found = connection.execute(_newest(state, model, tenant, batch, before_seq).limit(limit))
        return [job_from_row(row) for row in found]


def count(database: Database, state: State) -> int:
    """How many jobs stand in this state; it reads an entry of an index for each.  Raises DatabaseUnavailable."""
    query = select(func.count()).select_from(jobs).where(jobs.c.state == state.value)
    with database.read() as connection:
        return int(connection.execute(query).scalar_one())


def counts(database: Database) -> dict[State, int]:
    """How many jobs stand in each state, counted one by one; ledger.count_by_state answers in milliseconds."""
    query = select(jobs.c.state, func.count()).group_by(jobs.c.state)
    with database.read() as connection:
        found = {State(state): number for state, number in connection.execute(query)}
    return {state: found.get(state, 0) for state in State}


def _newest(
    state: State | None, model: str | None, tenant: str | None, batch: str | None, before_seq: int | None
) -> Select[Any]:
    """It reads the jobs of the first that is given: the batch, the state, if few stand in it, the tenant, the model."""
    wanted = [(jobs.c.batch, batch), (jobs.c.tenant, tenant), (jobs.c.model, model)]
    wanted.insert(3 if state in _MANY_STAND else 1, (jobs.c.state, state))
    given = [(column, str(value)) for column, value in wanted if value is not None]
    query = JOB_LIST
    if given:
        # Said twice, for the index of batches has only jobs that are in one, and SQLite looks for its condition.
        query = query.where(given[0][0].is_not(None), key_range(*given[0], 0, before_seq)).order_by(given[0][0].desc())
    elif before_seq is not None:
        query = query.where(jobs.c.seq < before_seq)
    for column, value in given[1:]:
        query = query.where(unindexed(column) == value)
    return query.order_by(jobs.c.seq.desc())
