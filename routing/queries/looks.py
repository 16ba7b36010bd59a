"""Looks at many jobs at once, for people: bounded by an index each, however many jobs there are.

of_minute      what ended in a minute, by the index of ends, summed up by the database
oldest_queued  the first that waits of each model
delayed        how many of each model wait to be tried again
around         what was accepted shortly before and after a job
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import bindparam, case, func, select

from slotkeeper.db import Database
from slotkeeper.jobs.statements import select_queued
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs

MINUTE_MS = 60_000

_STARTED = jobs.c.started_ms - jobs.c.started_ms % MINUTE_MS
_ENDED = (
    select(
        jobs.c.model,
        _STARTED.label("started"),
        func.count().label("jobs"),
        func.sum(case((jobs.c.state == State.FAILED.value, 1), (jobs.c.state == State.DEAD.value, 1), else_=0)).label(
            "failed"
        ),
        func.sum(jobs.c.started_ms).label("starts"),
        func.sum(jobs.c.finished_ms).label("ends"),
    )
    .where(jobs.c.finished_ms >= bindparam("p_from"), jobs.c.finished_ms < bindparam("p_to"))
    .group_by(jobs.c.model, _STARTED)
)


@dataclass(frozen=True, slots=True)
class Ended:
    """Jobs of a model that ended in one minute and whose last run began in another, or the same.

    `started_ms`: the beginning of that minute; None: they never ran.  `starts_ms`, `ends_ms`: sums over all of them.
    """

    model: str
    started_ms: int | None
    jobs: int
    failed: int
    starts_ms: int
    ends_ms: int


def of_minute(database: Database, begins_ms: int) -> list[Ended]:
    """What ended in the minute that begins then.  Raises DatabaseUnavailable."""
    params = {"p_from": begins_ms, "p_to": begins_ms + MINUTE_MS}
    with database.read() as connection:
        rows = connection.execute(_ENDED, params).all()
    return [Ended(it.model, it.started, it.jobs, int(it.failed), int(it.starts or 0), int(it.ends or 0)) for it in rows]


def oldest_queued(database: Database, models: Sequence[str]) -> dict[str, int]:
    """When the queued job of each of these models that comes first was accepted, ms.  Raises DatabaseUnavailable."""
    queries = select_queued(models)
    params = {"p_after": 0, "p_limit": 1}
    with database.read() as connection:
        return {row.model: row.created_ms for query in queries for row in connection.execute(query, params)}


_DELAYED = (
    select(jobs.c.model, func.count().label("jobs")).where(jobs.c.state == State.DELAYED.value).group_by(jobs.c.model)
)


def delayed(database: Database) -> dict[str, int]:
    """How many jobs of each model wait to be tried again, or for their time.  Raises DatabaseUnavailable."""
    with database.read() as connection:
        return {row.model: row.jobs for row in connection.execute(_DELAYED)}


@dataclass(frozen=True, slots=True)
class Nearby:
    """A job as its neighbours need to know it; its run is the last it had."""

    id: str
    model: str
    tenant: str
    state: State
    server: str | None
    started_ms: int | None
    finished_ms: int | None
    has_failed: bool


_NEARBY = (
    jobs.c.id,
    jobs.c.model,
    jobs.c.tenant,
    jobs.c.state,
    jobs.c.server,
    jobs.c.started_ms,
    jobs.c.finished_ms,
    (jobs.c.failures + jobs.c.crashes > 0).label("has_failed"),
)
_AROUND = (
    select(*_NEARBY).where(jobs.c.seq >= bindparam("p_from"), jobs.c.seq <= bindparam("p_to")).order_by(jobs.c.seq)
)


def around(database: Database, seq: int, reach: int) -> list[Nearby]:
    """Jobs accepted up to `reach` before and after this number, in order of acceptance.  Raises DatabaseUnavailable."""
    with database.read() as connection:
        rows = connection.execute(_AROUND, {"p_from": seq - reach, "p_to": seq + reach}).all()
    return [
        Nearby(
            it.id,
            it.model,
            it.tenant,
            State(it.state),
            it.server,
            it.started_ms,
            it.finished_ms,
            bool(it.has_failed),
        )
        for it in rows
    ]
