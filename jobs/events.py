"""Events: one row for each transition, written in the transition's own transaction (JOB-2).

The table is an outbox: whoever relays events reads it in order of `id`.  The trail of a job's attempts is
read from it too, so that no fact stands in two places.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Connection, bindparam, select

from jobs.db import Transaction
from jobs.models import events
from jobs.prepared import Prepared
from jobs.record import Event
from jobs.states import State

TYPES: dict[State, str] = {
    State.QUEUED: "job.enqueued",
    State.DELAYED: "job.delayed",
    State.RUNNING: "job.started",
    State.COMPLETED: "job.completed",
    State.FAILED: "job.failed",
    State.EXPIRED: "job.expired",
    State.CANCELED: "job.canceled",
    State.DEAD: "job.dlq",
}

_TRANSITIONS = frozenset(TYPES.values())
_OF_JOB = Prepared(select(events).where(events.c.job_id == bindparam("job_id")).order_by(events.c.id))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a job and what came of it.  `ended_ms` None: it is still running."""

    attempt: int
    server: str | None
    slot: str | None
    started_ms: int
    ended_ms: int | None
    outcome: str | None
    error: dict[str, Any] | None


def append(transaction: Transaction, job_id: str, to: State, at_ms: int, attempt: int, data: dict[str, Any]) -> None:
    """Have the event of one transition written before the transaction commits."""
    transaction.events.append(row_of(job_id, to, at_ms, attempt, data))


def row_of(job_id: str, to: State, at_ms: int, attempt: int, data: dict[str, Any]) -> dict[str, Any]:
    """The event of one transition, as it stands in the table."""
    return {
        "job_id": job_id,
        "type": TYPES[to],
        "at_ms": at_ms,
        "attempt": attempt,
        "data": orjson.dumps(data).decode(),
    }


def note(transaction: Transaction, subject: str, type_: str, at_ms: int, data: dict[str, Any]) -> None:
    """Have an event written that is no transition."""
    row = {"job_id": subject, "type": type_, "at_ms": at_ms, "attempt": 0, "data": orjson.dumps(data).decode()}
    transaction.events.append(row)


def of_job(connection: Connection, job_id: str) -> list[Event]:
    """All events of a job, oldest first."""
    rows = _OF_JOB.all(connection, {"job_id": job_id})
    return [Event(r.id, r.job_id, r.type, r.at_ms, r.attempt, orjson.loads(r.data)) for r in rows]


def attempts(trail: Iterable[Event]) -> list[Attempt]:
    """Fold a job's events into its attempts, oldest first."""
    found: list[Attempt] = []
    started: Event | None = None
    for event in trail:
        if event.type == TYPES[State.RUNNING]:
            if started is not None:
                found.append(_attempt(started, None))
            started = event
        elif started is not None and event.type in _TRANSITIONS:
            found.append(_attempt(started, event))
            started = None
    if started is not None:
        found.append(_attempt(started, None))
    return found


def _attempt(started: Event, ended: Event | None) -> Attempt:
    return Attempt(
        attempt=started.attempt,
        server=started.data.get("server"),
        slot=started.data.get("slot"),
        started_ms=started.at_ms,
        ended_ms=ended.at_ms if ended else None,
        outcome=ended.data.get("why") if ended else None,
        error=ended.data.get("error") if ended else None,
    )
