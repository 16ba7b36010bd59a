"""Reading what was written down while it happened: the servers' files, and the record."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import select

from slotkeeper.db import Database
from slotkeeper.jobs import events
from slotkeeper.jobs.notifications import make_message_id
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import events as _events
from slotkeeper.jobs.tables import jobs as _jobs
from slotkeeper.jobs.tables import messages as _messages
from slotkeeper.jobs.values import Event
from tools.drill.conduct_checks import PendingMessage
from tools.drill.history_checks import Receipt, Recorded, Run

CUT = "cut"
_OVERDUE_MS = 60_000
# A try that is under way may last so long, and the wait after it grows from here.
_LEAST_WAIT_MS, _FIRST_WAIT_MS = 60_000, 5_500
_STARTED = events.EVENT_TYPES[State.RUNNING]


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


def crowded_starts(server: str, starts: Path, slots: int) -> list[str]:
    """Return a line for each run that a server began while it had no free slot, by its own count (`at_once`)."""
    return [
        f"{it['job_id']} attempt {it['attempt']} on {server}: {it['at_once']} runs, {slots} slots"
        for it in _lines(starts)
        if it["at_once"] > slots
    ]


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


def job_events(database: Database) -> dict[str, list[Event]]:
    """Every job's transitions, oldest first.  What a check of invariants found is none, and may come after its end."""
    query = select(_events).where(_events.c.type.in_(set(events.EVENT_TYPES.values()))).order_by(_events.c.id)
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


def recorded(states: Mapping[str, State], trails: Mapping[str, Sequence[Event]]) -> dict[str, Recorded]:
    """The record as the checker wants it."""
    return {
        job_id: Recorded(state, tuple(event.type for event in trails.get(job_id, ())), _turn(trails.get(job_id, ())))
        for job_id, state in states.items()
    }


def _turn(trail: Iterable[Event]) -> tuple[int, int] | None:
    """The epoch of the queue that offered the job first, and the number of the offer in it."""
    started = next((event for event in trail if event.type == _STARTED), None)
    if started is None or not started.data.get("offer"):
        return None
    return int(started.data["epoch"]), int(started.data["offer"])


def job_numbers(database: Database) -> dict[str, int]:
    """Job -> the number of its order."""
    with database.read() as connection:
        rows = connection.execute(select(_jobs.c.id, _jobs.c.payload)).all()
    return {row.id: int(orjson.loads(row.payload)["number"]) for row in rows}


def pending_messages(database: Database, now_ms: int) -> list[PendingMessage]:
    """What jobs' `callback_url` were not told yet, or not at all, judged at this time."""
    names = ("job_id", "event", "state", "next_ms", "tries")
    columns = (_messages.c[name] for name in names)
    with database.read() as connection:
        rows = connection.execute(select(*columns).where(_messages.c.receiver == _messages.c.job_id)).all()
    found = []
    for row in rows:
        wait_ms = row.next_ms - now_ms if row.state == "pending" else 0
        longest_ms = _LEAST_WAIT_MS + _FIRST_WAIT_MS * 2.5 ** max(row.tries - 1, 0)
        found.append(
            PendingMessage(
                make_message_id(row.job_id, row.event),
                row.job_id,
                row.state,
                wait_ms < -_OVERDUE_MS,
                wait_ms > longest_ms,
            )
        )
    return found


def active_jobs(database: Database) -> tuple[dict[str, str], dict[str, str]]:
    """(those that are queued, those that run): job -> model."""
    query = select(_jobs.c.id, _jobs.c.model, _jobs.c.state).where(_jobs.c.state.in_([State.QUEUED, State.RUNNING]))
    with database.read() as connection:
        rows = connection.execute(query).all()
    found: dict[str, dict[str, str]] = {State.QUEUED: {}, State.RUNNING: {}}
    for row in rows:
        found[row.state][row.id] = row.model
    return found[State.QUEUED], found[State.RUNNING]
