"""List jobs and batches page by page, and count jobs.

A batch is the jobs that were submitted with the same batch id, in one request or in several.  It has no row: it is read
from its jobs, and ends with the last of them.  Each page is read by an index, however many jobs there are.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, bindparam, func, select, text

from slotkeeper.db import Database
from slotkeeper.jobs.rows import job_from_row
from slotkeeper.jobs.statements import JOB_LIST, key_range, unindexed
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.tables import ACTIVE_CONDITION, jobs
from slotkeeper.jobs.values import Job
from slotkeeper.outbox.tables import receivers

# The states of most jobs, before and after their run.
_LARGE_STATES = frozenset({State.QUEUED, State.COMPLETED})
_AFTER_ALL_IDS = "z"  # in every collation of a database
# Batch ids are UUIDv7, so the newest batch has the last id.  The query steps from each id to the one before it by an
# index, so that each step reads one row.
_PREVIOUS_BATCH = "SELECT batch FROM jobs WHERE batch IS NOT NULL{tenant} AND batch < {last} ORDER BY {order} LIMIT 1"
_NEWEST_BATCHES = """
WITH RECURSIVE found(batch, number) AS (
    SELECT ({first}), 1
    UNION ALL
    SELECT ({then}), number + 1 FROM found WHERE found.batch IS NOT NULL AND number < :most
)
SELECT batch FROM found WHERE batch IS NOT NULL
"""
_BATCH_STATES = (
    select(
        jobs.c.batch,
        jobs.c.state,
        func.count().label("jobs"),
        func.min(jobs.c.tenant).label("tenant"),
        func.min(jobs.c.created_ms).label("created_ms"),
        func.max(jobs.c.finished_ms).label("finished_ms"),
    )
    .where(text("batch IS NOT NULL"), jobs.c.batch.in_(bindparam("p_batches", expanding=True)))
    .group_by(jobs.c.batch, jobs.c.state)
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch.  `by_state`: number of its jobs in each state.  `finished_ms`: its end; None: it has not ended."""

    id: str
    tenant: str
    created_ms: int
    by_state: Mapping[State, int]
    finished_ms: int | None

    @property
    def jobs(self) -> int:
        return sum(self.by_state.values())

    @property
    def ended(self) -> int:
        return sum(count for state, count in self.by_state.items() if state in FINAL_STATES)


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the removal of a tenant concerns.  `active`: jobs that have not ended, by state."""

    active: dict[State, int]
    webhooks: int


# -- jobs ------------------------------------------------------------------------------------------------------


def find_jobs(
    database: Database,
    *,
    state: State | None = None,
    model: str | None = None,
    tenant: str | None = None,
    batch: str | None = None,
    labels: Sequence[str] = (),
    before_seq: int | None = None,
    limit: int = 50,
) -> list[Job]:
    """Return jobs without payload and result, the newest first.

    `labels`: texts of labels (admission/labels.py: label_text) that a job must have.  No index has them, so with a rare
    label all jobs are read that the other filters leave.  `before_seq`: the `seq` of the last job of the page before;
    None: the first page.  Raises DatabaseUnavailable.
    """
    query = _newest_jobs(state, model, tenant, batch, before_seq).limit(limit)
    for label in labels:  # LIKE would ignore case in SQLite.
        query = query.where(func.replace(jobs.c.labels, label, "") != jobs.c.labels)
    with database.read() as connection:
        return [job_from_row(row) for row in connection.execute(query)]


def count_tenant_holdings(database: Database, tenant: str) -> Holdings:
    """Count the unfinished jobs and the webhooks of a tenant.  Raises DatabaseUnavailable."""
    active = select(jobs.c.state, func.count().label("jobs")).where(text(ACTIVE_CONDITION), jobs.c.tenant == tenant)
    webhooks = select(func.count()).select_from(receivers).where(receivers.c.tenant == tenant)
    with database.read() as connection:
        by_state = {State(row.state): row.jobs for row in connection.execute(active.group_by(jobs.c.state))}
        return Holdings(by_state, connection.execute(webhooks).scalar_one())


def _newest_jobs(
    state: State | None, model: str | None, tenant: str | None, batch: str | None, before_seq: int | None
) -> Select[Any]:
    """Return a query that uses the index of one column, the one that selects the fewest jobs.

    That is the first one given of: batch, state (unless most jobs are in it), tenant, model, state.
    """
    filters = [(jobs.c.batch, batch), (jobs.c.tenant, tenant), (jobs.c.model, model)]
    filters.insert(3 if state in _LARGE_STATES else 1, (jobs.c.state, state))
    given = [(column, str(value)) for column, value in filters if value is not None]
    query = JOB_LIST
    if given:
        column, value = given[0]
        # IS NOT NULL is redundant, but the index of batches is partial and SQLite uses it only with its condition.
        query = query.where(column.is_not(None), key_range(column, value, 0, before_seq)).order_by(column.desc())
    elif before_seq is not None:
        query = query.where(jobs.c.seq < before_seq)
    for column, value in given[1:]:
        query = query.where(unindexed(column) == value)
    return query.order_by(jobs.c.seq.desc())


# -- batches ---------------------------------------------------------------------------------------------------


def newest_batches(database: Database, tenant: str | None, before: str | None, limit: int) -> list[Batch]:
    """Return batches of a tenant, or of all, the newest first.

    `before`: the id of the last batch of the page before; None: the first page.  Raises DatabaseUnavailable.
    """
    params = {"last": before or _AFTER_ALL_IDS, "most": limit} | ({} if tenant is None else {"tenant": tenant})
    with database.read() as connection:
        ids = connection.execute(text(_newest_batches_sql(tenant)), params).scalars().all()
    return read_batches(database, ids, tenant)


def read_batches(database: Database, ids: Sequence[str], tenant: str | None = None) -> list[Batch]:
    """Return these batches in this order, from the jobs of `tenant`, or of all.  Raises DatabaseUnavailable.

    A batch without such a job is left out: clients may name batches, and two tenants may use the same name.
    """
    if not ids:
        return []
    query = _BATCH_STATES if tenant is None else _BATCH_STATES.where(jobs.c.tenant == tenant)
    rows: dict[str, list[Any]] = defaultdict(list)
    with database.read() as connection:
        for row in connection.execute(query, {"p_batches": list(ids)}):
            rows[row.batch].append(row)
    return [_batch_from_rows(batch, rows[batch]) for batch in ids if batch in rows]


def _newest_batches_sql(tenant: str | None) -> str:
    condition, order = ("", "batch DESC") if tenant is None else (" AND tenant = :tenant", "tenant DESC, batch DESC")
    first, then = (
        _PREVIOUS_BATCH.format(tenant=condition, order=order, last=last) for last in (":last", "found.batch")
    )
    return _NEWEST_BATCHES.format(first=first, then=then)


def _batch_from_rows(batch: str, rows: Sequence[Any]) -> Batch:
    """Return a batch from one row for each state of its jobs."""
    counts_by_state = {State(row.state): row.jobs for row in rows}
    by_state = {state: counts_by_state[state] for state in State if state in counts_by_state}
    has_ended = all(state in FINAL_STATES for state in by_state)
    finished_ms = max(row.finished_ms for row in rows) if has_ended else None
    return Batch(batch, rows[0].tenant, min(row.created_ms for row in rows), by_state, finished_ms)
