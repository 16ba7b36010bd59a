"""Events: one row for each transition, written in the transition's own transaction (JOB-2).

The table is an outbox: whoever relays events reads it in order of `id`.  The trail of a job's attempts is
read from it too (routing/queries/attempts.py), so that no fact stands in two places.
"""

from typing import Any, Protocol

import orjson
from sqlalchemy import Connection, bindparam, select

from slotkeeper.db import commit_outcome
from slotkeeper.db.compiled_sql import BulkInsert, CompiledStatement
from slotkeeper.db.group_commit import Transaction
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import events
from slotkeeper.jobs.values import Event

EVENT_TYPES: dict[State, str] = {
    State.QUEUED: "job.enqueued",
    State.DELAYED: "job.delayed",
    State.RUNNING: "job.started",
    State.COMPLETED: "job.completed",
    State.FAILED: "job.failed",
    State.EXPIRED: "job.expired",
    State.CANCELED: "job.canceled",
    State.DEAD: "job.dlq",
}

_EVENTS = BulkInsert(events, is_witness=True)
TRANSITION_TYPES = frozenset(EVENT_TYPES.values())
_NOTHING_ELSE: dict[str, Any] = dict.fromkeys(("model", "tenant", "priority", "server", "actor"))
_IS_TRANSITION = events.c.actor.is_(None)
_OF_JOB = CompiledStatement(
    select(events).where(events.c.job_id == bindparam("job_id"), _IS_TRANSITION).order_by(events.c.id)
)


class EventSubject(Protocol):
    """A job, as far as its events tell of it."""

    @property
    def id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int: ...


def make_row(
    job: EventSubject, to: State, at_ms: int, attempt: int, data: dict[str, Any], server: str | None = None
) -> dict[str, Any]:
    """The event of one transition, for `insert`.  `server`: where the job is, or was."""
    about = {"model": job.model, "tenant": job.tenant, "priority": job.priority, "server": server, "actor": None}
    return make_key_columns(job.id, to, at_ms, attempt, data) | about


def make_key_columns(job_id: str, to: State, at_ms: int, attempt: int, data: dict[str, Any]) -> dict[str, Any]:
    """By what the event of one transition is told from all others: columns of the table."""
    return {"job_id": job_id, "type": EVENT_TYPES[to], "at_ms": at_ms, "attempt": attempt, "data": encode_data(data)}


def has_event(connection: Connection, job_id: str, to: State, at_ms: int, attempt: int, data: dict[str, Any]) -> bool:
    """Whether this very event is in the record.  It says who did what, when and under which token."""
    return commit_outcome.has_row(
        connection, commit_outcome.WitnessRow(events, make_key_columns(job_id, to, at_ms, attempt, data))
    )


def add_event(transaction: Transaction, subject: str, type_: str, at_ms: int, data: dict[str, Any]) -> None:
    """Have an event written that is no transition, and nobody's act."""
    row = {"job_id": subject, "type": type_, "at_ms": at_ms, "attempt": 0, "data": encode_data(data)}
    add_row(transaction, row | _NOTHING_ELSE)


def add_row(transaction: Transaction, row: dict[str, Any]) -> None:
    """Have a row of the table written before the transaction commits; all of them name all columns."""
    transaction.insert(_EVENTS, row)


def encode_data(data: dict[str, Any]) -> str:
    """Data of an event, as it is stored."""
    return orjson.dumps(data).decode()


def list_of_job(connection: Connection, job_id: str) -> list[Event]:
    """All transitions of a job, oldest first."""
    rows = _OF_JOB.fetch_all(connection, {"job_id": job_id})
    return [Event(r.id, r.job_id, r.type, r.at_ms, r.attempt, orjson.loads(r.data)) for r in rows]
