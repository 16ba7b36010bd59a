"""A load that the record knows: what arrived between two moments, and how long it ran."""

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
_UNKNOWN_MS = 10_000  # for a model of which no job has ended in the window


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the record tells.  `drawn`: jobs whose run time is another's of their model, for they have not ended."""

    arrivals: list[Arrival]
    catalog: CatalogSnapshot
    drawn: int
    unknown: int
    """Jobs left out, for their model is not in the catalog any more."""


@contextmanager
def open_database(url: str) -> Iterator[Database]:
    """The record at an SQLAlchemy URL, to be read.  Raises Wrong where there is none that this release can read."""
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
    """The jobs that were accepted in the window, on the catalog as it is now, with everything in it online.

    Jobs that never ran are left out: they never asked for a slot's time.  Raises Wrong if there are no others;
    errors of the record pass through.
    """
    catalog = _online(Catalog(database).read())
    rows = [row for row in history.read_past_jobs(database, since_ms, until_ms) if row.started_ms is not None]
    known = [row for row in rows if row.model in catalog.models]
    if not known:
        raise SimulationError(
            "The record has no jobs of that time: name another, for example --from-record 2026-01-05..2026-01-09."
        )
    chance = random.Random(f"{seed} lengths")
    measured: Mapping[str, list[int]] = defaultdict(list)
    for row in known:
        if (ran := _ran_ms(row)) is not None:
            measured[row.model].append(ran)
    drawn = 0
    found = []
    for row in known:
        ran = _ran_ms(row)
        if ran is None:
            ran, drawn = chance.choice(measured[row.model] or [_UNKNOWN_MS]), drawn + 1
        found.append(
            Arrival(
                row.created_ms,
                row.model,
                ran,
                row.tenant,
                row.priority,
                row.constraints,
                deadline_ms=row.deadline_ms or 0,
            )
        )
    return Recorded(found, catalog, drawn, len(rows) - len(known))


def parse_window(text: str, today: datetime) -> tuple[int, int]:
    """Two moments, in ms, from yesterday, today, a date, or FROM..TO; a date means its whole day, in UTC.

    Raises Wrong.
    """
    first, dots, last = text.strip().partition("..")
    begin, end = _moment(first, today)[0], _moment(last if dots else first, today)[1]
    if end <= begin:
        raise SimulationError(f"--from-record {text}: it ends before it begins; write FROM..TO.")
    return begin, end


def _moment(text: str, today: datetime) -> tuple[int, int]:
    """Where it begins and where it ends."""
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


def _ran_ms(row: PastJob) -> int | None:
    """How long it held its slot; None: it has not ended."""
    if row.started_ms is None or row.finished_ms is None:
        return None
    return max(row.finished_ms - row.started_ms, 1)


def _online(catalog: CatalogSnapshot) -> CatalogSnapshot:
    return replace(
        catalog,
        models={name: replace(model, state=AdminState.ONLINE) for name, model in catalog.models.items()},
        servers={name: replace(server, state=AdminState.ONLINE) for name, server in catalog.servers.items()},
        tenants={},
    )
