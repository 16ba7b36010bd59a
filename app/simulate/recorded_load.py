"""A recorded load: the jobs in the database that arrived in a time window, and their run times."""

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import make_url

from app.simulate import history
from app.simulate.history import PastJob
from app.simulate.scenario import Arrival, SimulationError
from migrations import migrate
from slotkeeper.db import Database
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.values import AdminState

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_DEFAULT_RUN_MS = 10_000  # run time for a model without an ended job in the window


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
    rows = [row for row in history.read_past_jobs(database, since_ms, until_ms) if row.started_ms is not None]
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
