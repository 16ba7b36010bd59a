"""Quarantined slots: the run has ended here, its server has not released it.

The end of a run is two facts: the state of the job, and when its slot may be used again.  Both are written in one
transaction, so that an emptied Redis forgets neither.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, Insert, Integer, bindparam, case, delete, insert, select, update

from slotkeeper.db import Database, Transaction
from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.jobs.statements import in_state
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs, quarantined_slots
from slotkeeper.jobs.values import Quarantine

Row: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class QuarantinedSlot:
    """One slot, and the run that its server may still execute.

    began_ms: when its request was sent, at the earliest.  since_ms: when it ended here.  until_ms: the latest end of
    the quarantine.  quiet_ms: since when the server reports too few runs for this one to be among them; None: it
    reports enough, or was not asked.
    """

    job_id: str
    attempt: int
    server: str
    slot: str
    model: str
    tenant: str
    remote_id: str | None
    reason: str
    began_ms: int
    since_ms: int
    until_ms: int
    quiet_ms: int | None = None


_COLUMNS = [field.name for field in fields(QuarantinedSlot)]
_THIS = (quarantined_slots.c.job_id == bindparam("p_id"), quarantined_slots.c.attempt == bindparam("p_attempt"))
_SLOT_OF_JOB = select(
    *(jobs.c[name] for name in ("id", "attempt", "server", "slot", "model", "tenant", "remote_id")),
    bindparam("p_reason"),
    case((jobs.c.sent_ms > jobs.c.started_ms, jobs.c.sent_ms), else_=jobs.c.started_ms),
    bindparam("p_now", type_=quarantined_slots.c.since_ms.type),
    bindparam("p_until", type_=quarantined_slots.c.until_ms.type),
).where(jobs.c.slot.is_not(None))
_THIS_RUN = (jobs.c.id == bindparam("p_id"), jobs.c.attempt == bindparam("p_attempt", type_=Integer))
_THESE_JOBS = jobs.c.seq.in_(bindparam("p_seqs", expanding=True))


def _insert_slots(*conditions: ColumnElement[bool]) -> Insert:
    """Return an INSERT of the slots of jobs.  The jobs are locked, so that their state holds until the commit."""
    return insert(quarantined_slots).from_select(_COLUMNS[:-1], _SLOT_OF_JOB.where(*conditions).with_for_update())


_INSERT_ONE = CompiledStatement(_insert_slots(*_THIS_RUN, in_state(State.RUNNING)))
_INSERT_MANY = {state: _insert_slots(_THESE_JOBS, in_state(state)) for state in (State.RUNNING, State.QUEUED)}
_ALL = CompiledStatement(select(quarantined_slots).order_by(quarantined_slots.c.since_ms, quarantined_slots.c.job_id))
_ONE = CompiledStatement(select(quarantined_slots).where(*_THIS))
_DELETE = CompiledStatement(delete(quarantined_slots).where(*_THIS))
_KEEP_SLOT = (
    update(jobs)
    .where(jobs.c.id == bindparam("p_id"), in_state(State.QUEUED))
    .values(slot=select(quarantined_slots.c.slot).where(*_THIS).scalar_subquery())
)
_SHORTEN = update(quarantined_slots).where(*_THIS).values(until_ms=bindparam("p_until"))
_SET_QUIET = update(quarantined_slots).where(*_THIS).values(quiet_ms=bindparam("p_quiet"))


def quarantine_slot(tx: Transaction, job_id: str, attempt: int, now_ms: int, quarantine: Quarantine) -> None:
    """Quarantine the slot of a run that this transaction is about to end."""
    params = {"p_id": job_id, "p_attempt": attempt}
    _INSERT_ONE.execute(tx.connection, params | _quarantine_params(quarantine, now_ms))


def quarantine_slots(tx: Transaction, state: State, seqs: Sequence[int], now_ms: int, quarantine: Quarantine) -> None:
    """The same for jobs that this transaction has locked: running ones, or queued ones that are to be resumed."""
    params = {"p_seqs": list(seqs)} | _quarantine_params(quarantine, now_ms)
    tx.connection.execute(_INSERT_MANY[state], params)


def delete_row(tx: Transaction, job_id: str, attempt: int) -> bool:
    """End a quarantine.  Returns False if there is none."""
    return _DELETE.execute(tx.connection, {"p_id": job_id, "p_attempt": attempt}) == 1


def keep_slot_for_job(tx: Transaction, job_id: str, attempt: int) -> None:
    """Store the slot with the job, which this transaction has queued: an emptied Redis must not offer it elsewhere."""
    tx.connection.execute(_KEEP_SLOT, {"p_id": job_id, "p_attempt": attempt})
    delete_row(tx, job_id, attempt)


def list_all(database: Database) -> list[QuarantinedSlot]:
    """Return all quarantined slots, the longest first."""
    with database.read() as connection:
        return [_from_row(row) for row in _ALL.fetch_all(connection, {})]


def list_by_server(database: Database) -> defaultdict[str, list[QuarantinedSlot]]:
    """Return all quarantined slots, by server."""
    found = defaultdict[str, list[QuarantinedSlot]](list)
    for slot in list_all(database):
        found[slot.server].append(slot)
    return found


def find(database: Database, job_id: str, attempt: int) -> QuarantinedSlot | None:
    with database.read() as connection:
        row = _ONE.fetch_first(connection, {"p_id": job_id, "p_attempt": attempt})
    return None if row is None else _from_row(row)


def release(database: Database, job_id: str, attempt: int) -> bool:
    """End a quarantine: the server has released the run.  Returns False if there is none any more."""
    return database.write(lambda tx: delete_row(tx, job_id, attempt))


def shorten(database: Database, slot: QuarantinedSlot, until_ms: int) -> None:
    """Let the quarantine end at `until_ms` at the latest."""
    params = {"p_id": slot.job_id, "p_attempt": slot.attempt, "p_until": until_ms}
    database.write(lambda tx: tx.connection.execute(_SHORTEN, params))


def set_quiet_since(database: Database, slot: QuarantinedSlot, quiet_ms: int | None) -> None:
    params = {"p_id": slot.job_id, "p_attempt": slot.attempt, "p_quiet": quiet_ms}
    database.write(lambda tx: tx.connection.execute(_SET_QUIET, params))


def _quarantine_params(quarantine: Quarantine, now_ms: int) -> dict[str, Any]:
    return {"p_reason": quarantine.reason, "p_now": now_ms, "p_until": quarantine.until_ms}


def _from_row(row: Row) -> QuarantinedSlot:
    return QuarantinedSlot(**{name: getattr(row, name) for name in _COLUMNS})
