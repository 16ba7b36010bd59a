"""A recorded load: the jobs in the database that arrived in a time window, and their run times."""

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, bindparam, func, make_url, or_, select

from app.simulate.scenario import Arrival, SimulationError
from migrations import migrate
from slotkeeper.db import Database
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.values import AdminState

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_DEFAULT_RUN_MS = 10_000  # run time for a model without an ended job in the window
# The largest difference between the clocks of processes that accept jobs.
_SLACK_MS = 3_600_000
# Two subqueries: SQLite uses the index for a minimum or a maximum, but not for both in one query.
_RANGE = select(select(func.min(jobs.c.seq)).scalar_subquery(), select(func.max(jobs.c.seq)).scalar_subquery())
_NEXT = select(jobs.c.created_ms).where(jobs.c.seq >= bindparam("p_seq")).order_by(jobs.c.seq).limit(1)


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


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded load.  `drawn`: jobs that have not ended, with the run time of another job of their model."""

    arrivals: list[Arrival]
    catalog: CatalogSnapshot
    drawn: int
    unknown: int
    """Number of jobs that were left out, because their model is not in the catalog."""


@contextmanager
def open_database(url: str) -> Iterator[Database]:
    """Open the database at an SQLAlchemy URL.  Raises SimulationError if there is none that this release can read."""
    parts = make_url(url)
    if parts.drivername.startswith("sqlite") and not Path(parts.database or "").is_file():
        raise SimulationError(
            f"There is no record at {parts.database}: name it in SLOTKEEPER_HOME or SLOTKEEPER_DATABASE_URL."
        )
    if missing := migrate.check(url):
        raise SimulationError(missing)
    database = Database(url)
    try:
        yield database
    finally:
        database.close()


def read_recorded_load(database: Database, since_ms: int, until_ms: int, seed: int) -> Recorded:
    """Return the jobs that were accepted in the window, and the current catalog with everything online.

    Jobs that never ran are left out, because they used no slot time.  Raises SimulationError if no jobs remain, and
    errors of the database.
    """
    catalog = _all_online(Catalog(database).read())
    rows = [row for row in read_past_jobs(database, since_ms, until_ms) if row.started_ms is not None]
    usable = [row for row in rows if row.model in catalog.models]
    if not usable:
        raise SimulationError(
            "The database has no jobs of that time: name another, for example --from-record 2026-01-05..2026-01-09."
        )
    rng = random.Random(f"{seed} lengths")
    measured: Mapping[str, list[int]] = defaultdict(list)
    for row in usable:
        if (run_ms := _run_ms(row)) is not None:
            measured[row.model].append(run_ms)
    drawn = 0
    arrivals = []
    for row in usable:
        run_ms = _run_ms(row)
        if run_ms is None:
            run_ms, drawn = rng.choice(measured[row.model] or [_DEFAULT_RUN_MS]), drawn + 1
        arrivals.append(
            Arrival(
                row.created_ms,
                row.model,
                run_ms,
                row.tenant,
                row.priority,
                row.constraints,
                deadline_ms=row.deadline_ms or 0,
            )
        )
    return Recorded(arrivals, catalog, drawn, len(rows) - len(usable))


def parse_window(text: str, today: datetime) -> tuple[int, int]:
    """Return begin and end, in ms, of yesterday, today, a date, or FROM..TO.  A date is its whole day, in UTC.

    Raises SimulationError.
    """
    first, dots, last = text.strip().partition("..")
    begin, end = _parse_moment(first, today)[0], _parse_moment(last if dots else first, today)[1]
    if end <= begin:
        raise SimulationError(f"--from-record {text}: it ends before it begins; write FROM..TO.")
    return begin, end


def _parse_moment(text: str, today: datetime) -> tuple[int, int]:
    """Return begin and end of one part of a window, in ms."""
    days = {"yesterday": -1, "today": 0}.get(text.strip().lower())
    try:
        if days is None:
            at = datetime.fromisoformat(text.strip())
        else:
            at = today.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=days)
    except ValueError:
        raise SimulationError(
            f"--from-record {text}: write yesterday, today, a date like 2026-01-05, or FROM..TO with dates or times."
        ) from None
    begin = at if at.tzinfo else at.replace(tzinfo=UTC)
    whole_day = days is not None or _DATE.fullmatch(text.strip())
    end = begin + timedelta(days=1) if whole_day else begin
    return int(begin.timestamp() * 1000), int(end.timestamp() * 1000)


def _run_ms(row: PastJob) -> int | None:
    """Return how long the job held its slot; None: it has not ended."""
    if row.started_ms is None or row.finished_ms is None:
        return None
    return max(row.finished_ms - row.started_ms, 1)


def _all_online(catalog: CatalogSnapshot) -> CatalogSnapshot:
    """Return the catalog with all models, servers and tenants online."""
    return replace(
        catalog,
        models={name: replace(model, state=AdminState.ONLINE) for name, model in catalog.models.items()},
        servers={name: replace(server, state=AdminState.ONLINE) for name, server in catalog.servers.items()},
        tenants={},
    )


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
    """Return the first `seq` of the jobs that were accepted at `at_ms` or later; approximate by up to _SLACK_MS.

    `created_ms` has no index, because an index would slow down every submit.  `seq` and `created_ms` grow together,
    except for concurrent submits and clock differences, so a binary search of `seq` finds the place.
    """
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
