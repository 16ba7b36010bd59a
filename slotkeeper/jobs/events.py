"""Events: one row for each transition, written in the transition's own transaction (JOB-2).

The table is an outbox: whoever relays events reads it in order of `id`.  The trail of a job's attempts is
read from it too (routing/queries/attempts.py), so that no fact stands in two places.
"""

from typing import Any, Protocol

import orjson
from sqlalchemy import Connection, bindparam, select

from slotkeeper.db import fate
from slotkeeper.db.db import Transaction
from slotkeeper.db.prepared import Prepared, Rows
from slotkeeper.jobs.models import events
from slotkeeper.jobs.record import Event
from slotkeeper.jobs.states import State

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

_EVENTS = Rows(events, is_witness=True)
TRANSITIONS = frozenset(TYPES.values())
_NOTHING_ELSE: dict[str, Any] = dict.fromkeys(("model", "tenant", "priority", "server", "actor"))
_IS_TRANSITION = events.c.actor.is_(None)
_OF_JOB = Prepared(select(events).where(events.c.job_id == bindparam("job_id"), _IS_TRANSITION).order_by(events.c.id))


class Concerned(Protocol):
    """A job, as far as its events tell of it."""

    @property
    def id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int: ...


def row_of(
    job: Concerned, to: State, at_ms: int, attempt: int, data: dict[str, Any], server: str | None = None
) -> dict[str, Any]:
    """The event of one transition, for `insert`.  `server`: where the job is, or was."""
    about = {"model": job.model, "tenant": job.tenant, "priority": job.priority, "server": server, "actor": None}
    return mark_of(job.id, to, at_ms, attempt, data) | about


def mark_of(job_id: str, to: State, at_ms: int, attempt: int, data: dict[str, Any]) -> dict[str, Any]:
    """By what the event of one transition is told from all others: columns of the table."""
    return {"job_id": job_id, "type": TYPES[to], "at_ms": at_ms, "attempt": attempt, "data": text_of(data)}


def wrote(connection: Connection, job_id: str, to: State, at_ms: int, attempt: int, data: dict[str, Any]) -> bool:
    """Whether this very event is in the record.  It says who did what, when and under which token."""
    return fate.wrote(connection, fate.Witness(events, mark_of(job_id, to, at_ms, attempt, data)))


def note(transaction: Transaction, subject: str, type_: str, at_ms: int, data: dict[str, Any]) -> None:
    """Have an event written that is no transition, and nobody's act."""
    row = {"job_id": subject, "type": type_, "at_ms": at_ms, "attempt": 0, "data": text_of(data)}
    insert(transaction, row | _NOTHING_ELSE)


def insert(transaction: Transaction, row: dict[str, Any]) -> None:
    """Have a row of the table written before the transaction commits; all of them name all columns."""
    transaction.insert(_EVENTS, row)


def text_of(data: dict[str, Any]) -> str:
    """Data of an event, as it is stored."""
    return orjson.dumps(data).decode()


def of_job(connection: Connection, job_id: str) -> list[Event]:
    """All transitions of a job, oldest first."""
    rows = _OF_JOB.all(connection, {"job_id": job_id})
    return [Event(r.id, r.job_id, r.type, r.at_ms, r.attempt, orjson.loads(r.data)) for r in rows]
