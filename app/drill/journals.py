"""Reading what was written down while it happened: the servers' files, and the record."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import select

from app.drill.checker import Receipt, Recorded, Run
from jobs import events
from jobs.db import Database
from jobs.models import events as _events
from jobs.models import jobs as _jobs
from jobs.record import Event
from jobs.states import State

CUT = "cut"
_STARTED = events.TYPES[State.RUNNING]


def server_runs(server: str, journal: Path, starts: Path, killed_ns: Sequence[int], now_ns: int) -> list[Run]:
    """All runs of a server: those that ended, from its journal, and those that it was killed under.

    `killed_ns`: when it was killed.  A start without an end lasted until then, or lasts still.
    """
    runs = [
        Run(it["job_id"], it["attempt"] or 0, server, it["slot"], it["started_ns"], it["ended_ns"], it["outcome"])
        for it in _lines(journal)
    ]
    ended: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in runs:
        ended[(run.job_id, run.slot)].append(run)
    for it in _lines(starts):
        at = it["at_ns"]
        if any(run.started_ns <= at <= run.ended_ns for run in ended[(it["job_id"], it["slot"])]):
            continue
        end = next((killed for killed in sorted(killed_ns) if killed >= at), now_ns)
        runs.append(Run(it["job_id"], it["attempt"] or 0, server, it["slot"], at, max(end, at), CUT))
    return runs


def write_receipts(path: Path, receipts: Iterable[Receipt]) -> None:
    """One JSON line for each, for whoever wants to look closer afterwards."""
    path.write_bytes(b"".join(orjson.dumps(receipt, option=orjson.OPT_APPEND_NEWLINE) for receipt in receipts))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError:  # a kill came in the middle of the last line
            continue


def trails(database: Database) -> dict[str, list[Event]]:
    """Every job's transitions, oldest first.  What an audit found about a job is none, and may come after its end."""
    query = select(_events).where(_events.c.type.in_(set(events.TYPES.values()))).order_by(_events.c.id)
    found: dict[str, list[Event]] = defaultdict(list)
    with database.read() as connection:
        for row in connection.execute(query):
            event = Event(row.id, row.job_id, row.type, row.at_ms, row.attempt, orjson.loads(row.data))
            found[row.job_id].append(event)
    return found


def states(database: Database) -> dict[str, State]:
    """Where every job stands."""
    with database.read() as connection:
        return {row.id: State(row.state) for row in connection.execute(select(_jobs.c.id, _jobs.c.state))}


def recorded(
    states: Mapping[str, State], trails: Mapping[str, Sequence[Event]], emptied_ms: Sequence[int]
) -> dict[str, Recorded]:
    """The record as the checker wants it.  `emptied_ms`: when Redis was emptied, and counted from 1 again."""
    return {
        job_id: Recorded(
            state, tuple(event.type for event in trails.get(job_id, ())), _turn(trails.get(job_id, ()), emptied_ms)
        )
        for job_id, state in states.items()
    }


def _turn(trail: Iterable[Event], emptied_ms: Sequence[int]) -> tuple[int, int] | None:
    started = next((event for event in trail if event.type == _STARTED), None)
    if started is None or not started.data.get("offer"):
        return None
    return sum(at <= started.at_ms for at in emptied_ms), int(started.data["offer"])
