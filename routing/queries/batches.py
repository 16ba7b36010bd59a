"""Batches: jobs that were submitted together, in one request or in several that named the same batch.

They are known by their jobs, and gone with the last of them.

A batch's id is a UUIDv7, so that the newest are last in the order of ids; a look at a page of batches reads their jobs
and no others, however many there are.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, func, select, text

from slotkeeper.db import Database
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.tables import jobs

_BEHIND_ALL = "z"  # behind each id, whatever the database's order of signs

# From each batch one step to the next older: an index has them in order, and no step reads more than one row.
_STEP = "SELECT batch FROM jobs WHERE batch IS NOT NULL{mine} AND batch < {last} ORDER BY {order} DESC LIMIT 1"
_NEWEST = """
WITH RECURSIVE found(batch, number) AS (
    SELECT ({first}), 1
    UNION ALL
    SELECT ({then}), number + 1 FROM found WHERE found.batch IS NOT NULL AND number < :most
)
SELECT batch FROM found WHERE batch IS NOT NULL
"""
_FACTS = (
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
    """`by_state`: how many of its jobs stand in each; `finished_ms`: when the last ended, ms; None: not all have."""

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


def newest_batches(database: Database, tenant: str | None, before: str | None, limit: int) -> list[Batch]:
    """Batches of a tenant, or of all, the newest first; `before`: the last of the page before.

    Raises DatabaseUnavailable.
    """
    params = {"last": before or _BEHIND_ALL, "most": limit} | ({} if tenant is None else {"tenant": tenant})
    with database.read() as connection:
        ids = connection.execute(text(_statement(tenant)), params).scalars().all()
    return look(database, ids, tenant)


def look(database: Database, ids: Sequence[str], tenant: str | None = None) -> list[Batch]:
    """Return these batches in this order, by the jobs of `tenant`, or of all.

    A batch without such a job is left out: clients may name batches, and two tenants may take the same name.

    Raises DatabaseUnavailable.
    """
    if not ids:
        return []
    rows: dict[str, list[Any]] = defaultdict(list)
    facts = _FACTS if tenant is None else _FACTS.where(jobs.c.tenant == tenant)
    with database.read() as connection:
        for row in connection.execute(facts, {"p_batches": list(ids)}):
            rows[row.batch].append(row)
    return [_batch(it, rows[it]) for it in ids if it in rows]


def unfinished_jobs(database: Database, batch: str, tenant: str | None = None) -> list[str]:
    """Return the ids of its jobs, of `tenant` or of all, that have not ended, in order of acceptance.

    Raises DatabaseUnavailable.
    """
    active = select(jobs.c.id, jobs.c.state).where(text("batch IS NOT NULL"), jobs.c.batch == batch)
    if tenant is not None:
        active = active.where(jobs.c.tenant == tenant)
    with database.read() as connection:
        rows = connection.execute(active.order_by(jobs.c.batch, jobs.c.seq)).all()
    return [row.id for row in rows if State(row.state) not in FINAL_STATES]


def _statement(tenant: str | None) -> str:
    mine, order = ("", "batch") if tenant is None else (" AND tenant = :tenant", "tenant DESC, batch")
    first = _STEP.format(mine=mine, order=order, last=":last")
    return _NEWEST.format(first=first, then=_STEP.format(mine=mine, order=order, last="found.batch"))


def _batch(batch: str, rows: Sequence[Any]) -> Batch:
    counts = {State(row.state): row.jobs for row in rows}
    by_state = {state: counts[state] for state in State if state in counts}
    ends = [row.finished_ms for row in rows]
    over = all(state in FINAL_STATES for state in by_state)
    return Batch(batch, rows[0].tenant, min(row.created_ms for row in rows), by_state, max(ends) if over else None)
