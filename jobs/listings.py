"""Searches that answer many jobs, each said so that an index gives them in order and no more than are asked for.

So they stay quick whatever the statistics say, which may be from before a backlog came, or from before they were many.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Integer,
    Select,
    and_,
    bindparam,
    func,
    literal,
    select,
    text,
    tuple_,
    union_all,
)

from jobs.models import QUEUED, jobs
from jobs.moves import WAITING_COLUMNS, compared
from jobs.states import State

MOST_MODELS = 100
"""Of which the queued jobs are asked for in one statement; SQLite joins at most 500 queries."""

# Where most jobs are, before they ran and after.
_MANY_STAND = frozenset({State.QUEUED, State.COMPLETED})
_LAST_NUMBER = 2**63 - 1

LISTED = select(*(column for column in jobs.c if column.name not in {"payload", "result", "envelope"}))
"""Jobs without what they carry."""
RUNNING = LISTED.where(jobs.c.state == State.RUNNING.value).order_by(jobs.c.seq)
QUEUED_BY_MODEL = select(jobs.c.model, func.count()).where(text(QUEUED)).group_by(jobs.c.model)
COUNTS = select(jobs.c.state, func.count()).group_by(jobs.c.state)
_FIRST = select(*WAITING_COLUMNS).limit(bindparam("p_limit", type_=Integer))
_QUEUED_OF = _FIRST.where(text(QUEUED), jobs.c.seq > bindparam("p_after")).order_by(jobs.c.seq)


def newest(state: State | None, model: str | None, tenant: str | None, before_seq: int | None) -> Select[Any]:
    """The newest first.  It reads the jobs of one of these: the state, if few stand in it, the tenant, the model."""
    wanted = [(jobs.c.tenant, tenant), (jobs.c.model, model)]
    wanted.insert(2 if state in _MANY_STAND else 0, (jobs.c.state, state))
    given = [(column, str(value)) for column, value in wanted if value is not None]
    query = LISTED
    if given:
        query = query.where(_between(*given[0], 0, before_seq)).order_by(given[0][0].desc())
    elif before_seq is not None:
        query = query.where(jobs.c.seq < before_seq)
    for column, value in given[1:]:
        query = query.where(compared(column) == value)
    return query.order_by(jobs.c.seq.desc())


def queued_of(models: Sequence[str]) -> CompoundSelect[Any]:
    """The first of each model, so that its index gives them in order and reads no more than it must."""
    return union_all(*[select(_QUEUED_OF.where(jobs.c.model == model).subquery()) for model in models])


def _between(column: ColumnElement[str], value: str, after: Any, before: int | None = None) -> ColumnElement[bool]:
    """Jobs of which a column has this value, and whose number lies between `after` and `before`, both left out.

    To be read in order of (column, number).  Then it is that column's index which has them in order; said as
    `column = value`, all jobs in order of their numbers may look as good.
    """
    pair, word = tuple_(column, jobs.c.seq), literal(value)
    return and_(pair > tuple_(word, after), pair < tuple_(word, _LAST_NUMBER if before is None else before))


QUEUED_OF_ALL = _FIRST.where(_between(jobs.c.state, State.QUEUED.value, bindparam("p_after"))).order_by(
    jobs.c.state, jobs.c.seq
)
