"""Slots that are withheld: their run has ended here, and its server has not been heard to let go of it.

The end of a run is two facts: how the job stands, and when its slot may be used again.  Both are written in one
transaction, so that an emptied Redis forgets neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, Insert, Integer, bindparam, delete, insert, select, update

from slotkeeper.db.compiled_sql import CompiledStatement
from slotkeeper.db.group_commit import Database, Transaction
from slotkeeper.jobs.statements import in_state
from slotkeeper.jobs.states import State
from slotkeeper.jobs.tables import jobs, quarantined_slots
from slotkeeper.jobs.values import Quarantine

Row: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class QuarantinedSlot:
    """One slot.  `began_ms`: when its run began, `since_ms`: when that ended here.

    `quiet_ms`: since when its server's count leaves no room for the run; None: it does leave some, or was not asked.
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
_LEFT = select(
    *(jobs.c[name] for name in ("id", "attempt", "server", "slot", "model", "tenant", "remote_id")),
    bindparam("p_reason"),
    jobs.c.started_ms,
    bindparam("p_now", type_=quarantined_slots.c.since_ms.type),
    bindparam("p_until", type_=quarantined_slots.c.until_ms.type),
).where(jobs.c.slot.is_not(None))
_THIS_RUN = (jobs.c.id == bindparam("p_id"), jobs.c.attempt == bindparam("p_attempt", type_=Integer))
_THESE = jobs.c.seq.in_(bindparam("p_seqs", expanding=True))


def _noting(*these: ColumnElement[bool]) -> Insert:
    return insert(quarantined_slots).from_select(_COLUMNS[:-1], _LEFT.where(*these).with_for_update())


_NOTE = CompiledStatement(_noting(*_THIS_RUN, in_state(State.RUNNING)))
_NOTE_MANY = {state: _noting(_THESE, in_state(state)) for state in (State.RUNNING, State.QUEUED)}
_ALL = CompiledStatement(select(quarantined_slots).order_by(quarantined_slots.c.since_ms, quarantined_slots.c.job_id))
_ONE = CompiledStatement(select(quarantined_slots).where(*_THIS))
_FORGET = CompiledStatement(delete(quarantined_slots).where(*_THIS))
_KEEP_SLOT = (
    update(jobs)
    .where(jobs.c.id == bindparam("p_id"), in_state(State.QUEUED))
    .values(slot=select(quarantined_slots.c.slot).where(*_THIS).scalar_subquery())
)
_SHORTEN = update(quarantined_slots).where(*_THIS).values(until_ms=bindparam("p_until"))
_QUIET = update(quarantined_slots).where(*_THIS).values(quiet_ms=bindparam("p_quiet"))


def quarantine_slot(tx: Transaction, job_id: str, attempt: int, now_ms: int, it: Quarantine) -> None:
    """Withhold the slot of a run that is about to end in this transaction."""
    given = {"p_id": job_id, "p_attempt": attempt, "p_reason": it.reason, "p_now": now_ms, "p_until": it.until_ms}
    _NOTE.execute(tx.connection, given)


def quarantine_slots(tx: Transaction, state: State, seqs: Sequence[int], now_ms: int, it: Quarantine) -> None:
    """The same for jobs that are running, or queued to be resumed, by their acceptance numbers.

    This transaction has locked them.
    """
    given = {"p_seqs": list(seqs), "p_reason": it.reason, "p_now": now_ms, "p_until": it.until_ms}
    tx.connection.execute(_NOTE_MANY[state], given)


def delete_row(tx: Transaction, job_id: str, attempt: int) -> bool:
    return _FORGET.execute(tx.connection, {"p_id": job_id, "p_attempt": attempt}) == 1


def keep_slot_for_job(tx: Transaction, job_id: str, attempt: int) -> None:
    """The job, which this transaction has queued, keeps the slot: an emptied Redis must not offer it elsewhere."""
    tx.connection.execute(_KEEP_SLOT, {"p_id": job_id, "p_attempt": attempt})
    delete_row(tx, job_id, attempt)


def list_all(database: Database) -> list[QuarantinedSlot]:
    """All slots that are withheld, the longest first."""
    with database.read() as connection:
        return [_withheld(row) for row in _ALL.fetch_all(connection, {})]


def find(database: Database, job_id: str, attempt: int) -> QuarantinedSlot | None:
    with database.read() as connection:
        row = _ONE.fetch_first(connection, {"p_id": job_id, "p_attempt": attempt})
    return None if row is None else _withheld(row)


def release(database: Database, job_id: str, attempt: int) -> bool:
    """The run is gone from its server.  False: somebody has said so before, or its slot was not withheld."""
    return database.write(lambda tx: delete_row(tx, job_id, attempt))


def shorten(database: Database, it: QuarantinedSlot, until_ms: int) -> None:
    """Withhold the slot until `until_ms` at most."""
    given = {"p_id": it.job_id, "p_attempt": it.attempt, "p_until": until_ms}
    database.write(lambda tx: tx.connection.execute(_SHORTEN, given))


def set_quiet_since(database: Database, it: QuarantinedSlot, quiet_ms: int | None) -> None:
    given = {"p_id": it.job_id, "p_attempt": it.attempt, "p_quiet": quiet_ms}
    database.write(lambda tx: tx.connection.execute(_QUIET, given))


def _withheld(row: Row) -> QuarantinedSlot:
    return QuarantinedSlot(**{name: getattr(row, name) for name in _COLUMNS})
