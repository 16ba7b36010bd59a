"""Events: one row for each transition, in its transaction (JOB-2).

The table is an outbox: relays read it in order of `id`.  A job's attempts are read from it, too
(routing/queries/job_timeline.py), so that no fact stands in two places.
"""

from typing import Any, Protocol

import orjson
from sqlalchemy import Connection, bindparam, select

from slotkeeper.db import Transaction, commit_outcome
from slotkeeper.db.compiled_sql import BulkInsert, CompiledStatement
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
_NO_SUBJECT: dict[str, Any] = dict.fromkeys(("model", "tenant", "priority", "server", "actor"))
_NOT_IN_AUDIT_LOG = events.c.actor.is_(None)
_OF_JOB = CompiledStatement(
    select(events).where(events.c.job_id == bindparam("job_id"), _NOT_IN_AUDIT_LOG).order_by(events.c.id)
)


class EventSubject(Protocol):
    """The fields of a job that its events hold."""

    @property
    def id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int: ...


class WriteAuditEntry(Protocol):
    """Writes who asked for a change, in the transaction that makes it."""

    def __call__(self, tx: Transaction, /, **about: str) -> None: ...


def make_row(
    job: EventSubject, to: State, at_ms: int, attempt: int, data: dict[str, Any], server: str | None = None
) -> dict[str, Any]:
    """Return the row of a transition's event.  server: of the run that starts or ends."""
    subject = {"model": job.model, "tenant": job.tenant, "priority": job.priority, "server": server, "actor": None}
    return make_key_columns(job.id, to, at_ms, attempt, data) | subject


def make_key_columns(job_id: str, to: State, at_ms: int, attempt: int, data: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that identify the event of one transition."""
    return {"job_id": job_id, "type": EVENT_TYPES[to], "at_ms": at_ms, "attempt": attempt, "data": encode_data(data)}


def has_event(connection: Connection, job_id: str, to: State, at_ms: int, attempt: int, data: dict[str, Any]) -> bool:
    """Return whether this event is in the database."""
    return commit_outcome.has_row(
        connection, commit_outcome.WitnessRow(events, make_key_columns(job_id, to, at_ms, attempt, data))
    )


def add_event(
    transaction: Transaction, subject: str, type_: str, at_ms: int, data: dict[str, Any], tenant: str | None = None
) -> None:
    """Add an event that is neither a transition nor an entry of the audit log."""
    row = {"job_id": subject, "type": type_, "at_ms": at_ms, "attempt": 0, "data": encode_data(data)}
    add_row(transaction, row | _NO_SUBJECT | {"tenant": tenant})


def add_row(transaction: Transaction, row: dict[str, Any]) -> None:
    """Add a row, which is inserted before the commit with the others.  Each must have all columns."""
    transaction.insert(_EVENTS, row)


def encode_data(data: dict[str, Any]) -> str:
    """Return the data of an event as stored JSON."""
    return orjson.dumps(data).decode()


def list_of_job(connection: Connection, job_id: str) -> list[Event]:
    """Return the events of a job without the entries of the audit log, oldest first."""
    rows = _OF_JOB.fetch_all(connection, {"job_id": job_id})
    return [Event(r.id, r.job_id, r.type, r.at_ms, r.attempt, orjson.loads(r.data)) for r in rows]
