"""Searches that answer many jobs, each said so that an index gives them in order and no more than are asked for.

So they stay quick whatever the statistics say, which may be from before a backlog came, or from before they were many.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Executable,
    Integer,
    and_,
    bindparam,
    literal,
    select,
    text,
    tuple_,
    union_all,
)

from slotkeeper.jobs import tables
from slotkeeper.jobs.statements import QUEUED_JOB_COLUMNS
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import JOB_COLUMNS, QUEUED_CONDITION, jobs

_MOST_MODELS = 100  # of which the queued jobs are asked for in one statement; SQLite joins at most 500 queries

_LAST_NUMBER = 2**63 - 1

JOB_LIST = select(*(column for column in JOB_COLUMNS if column.name not in {"payload", "result", "envelope"}))
"""Jobs without what they carry."""
RUNNING = JOB_LIST.where(jobs.c.state == State.RUNNING.value).order_by(jobs.c.seq)
TO_BE_RESUMED = select(*QUEUED_JOB_COLUMNS, jobs.c.slot).where(text(tables.RESUMABLE_CONDITION)).order_by(jobs.c.seq)
_FIRST = select(*QUEUED_JOB_COLUMNS).limit(bindparam("p_limit", type_=Integer))
_QUEUED_OF = _FIRST.where(text(QUEUED_CONDITION), jobs.c.seq > bindparam("p_after")).order_by(jobs.c.seq)


def select_queued(names: Sequence[str]) -> Sequence[Executable]:
    """The first of each model, so that its index gives them in order and reads no more than it must."""
    firsts = [select(_QUEUED_OF.where(jobs.c.model == model).subquery()) for model in names]
    return [union_all(*firsts[n : n + _MOST_MODELS]) for n in range(0, len(firsts), _MOST_MODELS)]


def key_range(column: ColumnElement[str], value: str, after: Any, before: int | None = None) -> ColumnElement[bool]:
    """Jobs of which a column has this value, and whose number lies between `after` and `before`, both left out.

    To be read in order of (column, number).  Then it is that column's index which has them in order; said as
    `column = value`, all jobs in order of their numbers may look as good.
    """
    pair, word = tuple_(column, jobs.c.seq), literal(value)
    return and_(pair > tuple_(word, after), pair < tuple_(word, _LAST_NUMBER if before is None else before))


QUEUED_OF_ALL = _FIRST.where(key_range(jobs.c.state, State.QUEUED.value, bindparam("p_after"))).order_by(
    jobs.c.state, jobs.c.seq
)
