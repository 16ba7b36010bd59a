"""Reads the past jobs of a time window from the database, for a simulation.

`created_ms` has no index, because an index would slow down every submit.  `seq` and `created_ms` grow together, except
for concurrent submits and clock differences.  So a binary search finds the range of `seq`, and the jobs are read by it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, func, or_, select

from slotkeeper.db import Database
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs


@dataclass(frozen=True, slots=True)
class PastJob:
    """The fields of a started or ended job that order and placement depend on.  `started_ms`: its last start."""

    model: str
    priority: int
    tenant: str
    constraints: str
    created_ms: int
    started_ms: int | None
    finished_ms: int | None
    deadline_ms: int | None
    state: State


# The largest difference between the clocks of processes that accept jobs.
_SLACK_MS = 3_600_000

# Two subqueries: SQLite uses the index for a minimum or a maximum, but not for both in one query.
_RANGE = select(select(func.min(jobs.c.seq)).scalar_subquery(), select(func.max(jobs.c.seq)).scalar_subquery())
_NEXT = select(jobs.c.created_ms).where(jobs.c.seq >= bindparam("p_seq")).order_by(jobs.c.seq).limit(1)
_PAST = (
    select(*(jobs.c[name] for name in PastJob.__dataclass_fields__))
    .where(
        jobs.c.seq >= bindparam("p_first"),
        jobs.c.seq < bindparam("p_end"),
        jobs.c.created_ms >= bindparam("p_since"),
        jobs.c.created_ms < bindparam("p_until"),
        or_(jobs.c.started_ms.is_not(None), jobs.c.finished_ms.is_not(None)),
    )
    .order_by(jobs.c.created_ms, jobs.c.seq)
)


def read_past_jobs(database: Database, since_ms: int, until_ms: int, limit_per_batch: int = 5000) -> Iterator[PastJob]:
    """Yield the started or ended jobs that were accepted from `since_ms` on and before `until_ms`, in that order.

    Jobs are read in pages of `limit_per_batch`, to limit memory.  The iterator holds a connection until it is exhausted
    or closed.  If clocks differed by more than an hour, a job may be missed.
    """
    with database.snapshot() as connection:
        params = {
            "p_first": _first_seq(connection, since_ms - _SLACK_MS),
            "p_end": _first_seq(connection, until_ms + _SLACK_MS),
            "p_since": since_ms,
            "p_until": until_ms,
        }
        for row in connection.execute(_PAST, params, execution_options={"yield_per": limit_per_batch}):
            yield _past_job(row)


def _first_seq(connection: Connection, at_ms: int) -> int:
    """Return the first `seq` of the jobs that were accepted at `at_ms` or later; approximate by up to _SLACK_MS."""
    first, last = connection.execute(_RANGE).one()
    if first is None:
        return 0
    low, high = first, last + 1
    while low < high:
        middle = (low + high) // 2
        created_ms = connection.execute(_NEXT, {"p_seq": middle}).scalar()
        if created_ms is not None and created_ms < at_ms:  # None: the job was removed meanwhile
            low = middle + 1
        else:
            high = middle
    return low


def _past_job(row: Any) -> PastJob:
    *facts, state = row
    fields: list[Any] = [*facts, State(state)]
    return PastJob(*fields)
