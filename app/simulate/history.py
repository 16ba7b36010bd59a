"""What was: the jobs of a span of time as they came, for whoever wants to know what would have been.

There is no index on `created_ms`, which every submit would pay for: numbers and times of acceptance grow
together, but for the time that a submit may take and for clocks that disagree.  So the numbers that a span can
have are found by halving, and its jobs by their numbers.
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
    """A job that has started or ended, as far as order and placement are concerned.  `started_ms`: its last start."""

    model: str
    priority: int
    tenant: str
    constraints: str
    created_ms: int
    started_ms: int | None
    finished_ms: int | None
    deadline_ms: int | None
    state: State


# How far the clocks of two that accept jobs may be apart.
_SLACK_MS = 3_600_000

# One by one: SQLite looks into the index for a least or a greatest number, but not for both at once.
_ENDS = select(select(func.min(jobs.c.seq)).scalar_subquery(), select(func.max(jobs.c.seq)).scalar_subquery())
_NEXT = select(jobs.c.created_ms).where(jobs.c.seq >= bindparam("p_seq")).order_by(jobs.c.seq).limit(1)
_PAST = (
    select(*(jobs.c[name] for name in PastJob.__dataclass_fields__))
    .where(
        jobs.c.seq >= bindparam("p_first"),
        jobs.c.seq < bindparam("p_behind"),
        jobs.c.created_ms >= bindparam("p_since"),
        jobs.c.created_ms < bindparam("p_until"),
        or_(jobs.c.started_ms.is_not(None), jobs.c.finished_ms.is_not(None)),
    )
    .order_by(jobs.c.created_ms, jobs.c.seq)
)


def read_past_jobs(database: Database, since_ms: int, until_ms: int, limit_per_batch: int = 5000) -> Iterator[PastJob]:
    """Jobs accepted from `since_ms` on and before `until_ms` that have started or ended, as they came.

    Read page by page, so that millions take no more memory than one page; close the iterator, or exhaust it,
    for it keeps a connection.  Where clocks were apart by more than an hour, a job may be missed.
    """
    with database.snapshot() as connection:
        params = {
            "p_first": _first_number(connection, since_ms - _SLACK_MS),
            "p_behind": _first_number(connection, until_ms + _SLACK_MS),
            "p_since": since_ms,
            "p_until": until_ms,
        }
        for row in connection.execute(_PAST, params, execution_options={"yield_per": limit_per_batch}):
            yield _past(row)


def _first_number(connection: Connection, at_ms: int) -> int:
    """The number from which on jobs were accepted at `at_ms` or later, as far as numbers and times agree."""
    first, last = connection.execute(_ENDS).one()
    if first is None:
        return 0
    low, high = first, last + 1
    while low < high:
        middle = (low + high) // 2
        created_ms = connection.execute(_NEXT, {"p_seq": middle}).scalar()
        if created_ms is not None and created_ms < at_ms:  # None: it was removed while we looked
            low = middle + 1
        else:
            high = middle
    return low


def _past(row: Any) -> PastJob:
    *facts, state = row
    told: list[Any] = [*facts, State(state)]
    return PastJob(*told)
