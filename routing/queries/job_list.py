"""List jobs page by page, and count jobs.  Each page is read by an index, however many jobs there are."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import Column, ColumnElement, Connection, Row, Select, func, select, text

from slotkeeper.db import Database
from slotkeeper.jobs.rows import job_from_row
from slotkeeper.jobs.statements import JOB_LIST, key_range, seq_range, unindexed
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import ACTIVE_CONDITION, closed_models, job_labels, jobs
from slotkeeper.jobs.values import Job
from slotkeeper.outbox.tables import receivers

# The states of most jobs, before and after their run.
_LARGE_STATES = frozenset({State.QUEUED, State.COMPLETED})
_MOST_COUNTED = 1000
"""Jobs of each filter that are counted, to read by the one that has the fewest."""
_MOST_AT_ONCE = 1000
_Key: TypeAlias = str | Column[Any]
"""What jobs are read by: a label, or a column."""


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

    `labels`: labels (admission/labels.py: label_text) that a job must have, all of them.  `before_seq`: the `seq` of
    the last job of the page before; None: the first page.  Raises DatabaseUnavailable.
    """
    filters = [(jobs.c.batch, batch), (jobs.c.tenant, tenant), (jobs.c.model, model)]
    filters.insert(3 if state in _LARGE_STATES else 1, (jobs.c.state, state))
    given = {column: str(value) for column, value in filters if value is not None}
    with database.read() as connection:
        if labels:
            rows = _newest_with_labels(connection, labels, given, before_seq, limit)
        else:
            first = next(iter(given), None)
            rows = connection.execute(_newest_by_column(first, given, before_seq).limit(limit)).all()
    return [job_from_row(row) for row in rows]


def count_tenant_holdings(database: Database, tenant: str) -> Holdings:
    """Count the unfinished jobs and the webhooks of a tenant.  Raises DatabaseUnavailable."""
    active = select(jobs.c.state, func.count().label("jobs")).where(text(ACTIVE_CONDITION), jobs.c.tenant == tenant)
    webhooks = select(func.count()).select_from(receivers).where(receivers.c.tenant == tenant)
    with database.read() as connection:
        by_state = {State(row.state): row.jobs for row in connection.execute(active.group_by(jobs.c.state))}
        return Holdings(by_state, connection.execute(webhooks).scalar_one())


def find_retryable(
    database: Database, model: str | None, tenant: str | None, limit: int, but_of: Collection[str] = ()
) -> tuple[list[Job], int]:
    """Return dead jobs that can be queued again, the newest first, and how many others there are, 1,000 at most.

    The others are of models that were removed or are being removed.  model, tenant: None: of all.  but_of: tenants
    whose jobs are left out.
    Raises DatabaseUnavailable.
    """
    given = {jobs.c.state: State.DEAD.value} | ({} if model is None else {jobs.c.model: model})
    given |= {} if tenant is None else {jobs.c.tenant: tenant}
    query = _newest_by_column(jobs.c.state, given, None)
    if but_of:
        query = query.where(unindexed(jobs.c.tenant).not_in(list(but_of)))
    is_closed = jobs.c.model.in_(select(closed_models.c.name))
    closed = query.with_only_columns(jobs.c.seq).where(is_closed).limit(_MOST_COUNTED).subquery()
    with database.read() as connection:
        rows = connection.execute(query.where(~is_closed).limit(limit)).all()
        count = connection.execute(select(func.count()).select_from(closed)).scalar_one()
    return [job_from_row(row) for row in rows], count


def _newest_by_column(
    first: Column[Any] | None, given: Mapping[Column[Any], str], before_seq: int | None
) -> Select[Any]:
    """Return a query that reads by the index of the column `first`.

    Without labels that is the one that selects the fewest jobs: the first one given of batch, state (unless most jobs
    are in it), tenant, model, state.
    """
    query = JOB_LIST
    if first is not None:
        query = _by_index(query, first, given[first], before_seq).order_by(first.desc())
    elif before_seq is not None:
        query = query.where(jobs.c.seq < before_seq)
    others = [unindexed(column) == value for column, value in given.items() if column is not first]
    return query.where(*others).order_by(jobs.c.seq.desc())


def _by_index(query: Select[Any], column: Column[Any], value: str, before_seq: int | None = None) -> Select[Any]:
    # IS NOT NULL is redundant, but the index of batches is partial and SQLite uses it only with its condition.
    return query.where(column.is_not(None), key_range(column, value, 0, before_seq))


# -- labels ----------------------------------------------------------------------------------------------------


def _newest_with_labels(
    connection: Connection,
    labels: Sequence[str],
    given: Mapping[Column[Any], str],
    before_seq: int | None,
    limit: int,
) -> Sequence[Row[Any]]:
    """Read by the label or the column that the fewest jobs have.

    Where each has many jobs and few have all, this reads until the page is full.
    """
    tenant = given.get(jobs.c.tenant)
    columns = [column for column in given if column is not jobs.c.tenant]  # The tenant is part of the labels' index.

    def count(key: _Key) -> int:
        rows = _rows_of_label(key, tenant) if isinstance(key, str) else _rows_of_column(key, given[key])
        counted = select(func.count()).select_from(rows.limit(_MOST_COUNTED).subquery())
        return int(connection.execute(counted).scalar_one())

    keys: list[_Key] = [*labels, *columns]
    keys.sort(key=lambda key: _usual_rank(key, given))
    fewest = min(keys, key=count) if len(keys) > 1 else keys[0]
    if not isinstance(fewest, str):
        query = _newest_by_column(fewest, given, before_seq).where(*map(_has_label, labels))
        return connection.execute(query.limit(limit)).all()
    others = [_has_label(label) for label in labels if label != fewest]
    others += [unindexed(column) == given[column] for column in columns]
    return _read_by_label(connection, fewest, tenant, others, before_seq, limit)


def _usual_rank(key: _Key, given: Mapping[Column[Any], str]) -> int:
    """Return the place of a key among those that have too many jobs to be counted; 0: it usually has the fewest."""
    if isinstance(key, str):
        return 1
    return 0 if key is jobs.c.batch or (key is jobs.c.state and given[key] not in _LARGE_STATES) else 2


def _read_by_label(
    connection: Connection,
    label: str,
    tenant: str | None,
    others: Sequence[ColumnElement[bool]],
    before_seq: int | None,
    limit: int,
) -> Sequence[Row[Any]]:
    # Two statements, for of a join PostgreSQL may read either table through.
    found: list[Row[Any]] = []
    at_once = limit
    while len(found) < limit:
        seqs = connection.execute(_rows_of_label(label, tenant, before_seq).limit(at_once)).scalars().all()
        if not seqs:
            break
        query = JOB_LIST.where(jobs.c.seq.in_(seqs), *others).order_by(jobs.c.seq.desc())
        found += connection.execute(query.limit(limit - len(found))).all()
        before_seq, at_once = seqs[-1], _MOST_AT_ONCE
    return found


def _rows_of_label(label: str, tenant: str | None, before_seq: int | None = None) -> Select[Any]:
    """Return a query for the numbers of jobs, the newest first.  `tenant`: None: of all tenants."""
    key: list[Column[Any]] = [job_labels.c.label, job_labels.c.seq]
    values = [label]
    if tenant is not None:
        key.insert(0, job_labels.c.tenant)
        values.insert(0, tenant)
    in_range = seq_range(key, values, 0, before_seq)
    return select(job_labels.c.seq).where(in_range).order_by(*(column.desc() for column in key))


def _rows_of_column(column: Column[Any], value: str) -> Select[Any]:
    return _by_index(select(jobs.c.seq), column, value).order_by(column, jobs.c.seq)


def _has_label(label: str) -> ColumnElement[bool]:
    # A look-up for each job: for EXISTS, PostgreSQL may read all rows of the label.  Either index has the row.
    key = (job_labels.c.tenant == jobs.c.tenant, job_labels.c.label == label, job_labels.c.seq == jobs.c.seq)
    return select(job_labels.c.seq).where(*key).limit(1).scalar_subquery().is_not(None)
