"""Find out the outcome of a COMMIT that was not answered."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, and_, literal, select, text
from sqlalchemy.exc import DBAPIError


class CommitOutcome(Enum):
    COMMITTED = "stored"
    NOT_COMMITTED = "not stored"
    UNDECIDED = "open"  # It has not ended yet, or this server does not have its outcome.
    UNTRACEABLE = "hidden"  # It left no trace; asking again does not help.


class WitnessRow(NamedTuple):
    """A row that only this transaction writes."""

    table: Table
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TransactionMark:
    """Identifies a transaction afterwards.  number: PostgreSQL's transaction number."""

    number: int | None
    witness: WitnessRow | None


# A standby does not have the newest transactions.
_STATUS = text("SELECT CASE WHEN pg_is_in_recovery() THEN NULL ELSE txid_status(:number) END")
# No client is connected to this backend any more.  It may still wait for the COMMIT, and hold its locks.
_END_BACKEND = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE backend_xid::text::bigint = :number % 4294967296 AND usename = current_user"
)
_IN_THE_FUTURE = "22023"


def find_outcome(connection: Connection, of: TransactionMark) -> CommitOutcome:
    """Return the outcome of a transaction, on another connection than its own.  Raises SQLAlchemy's errors."""
    if connection.dialect.name == "sqlite":
        return _by_witness(connection, of)
    if of.number is None:
        return CommitOutcome.COMMITTED  # It wrote nothing.
    try:
        status = connection.execute(_STATUS, {"number": of.number}).scalar()
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == _IN_THE_FUTURE:
            return CommitOutcome.NOT_COMMITTED  # This server replaced one that was ahead of it.
        raise
    match status:
        case "committed":  # A server that took over assigns numbers again, so the witness must be there, too.
            return (
                CommitOutcome.NOT_COMMITTED
                if _by_witness(connection, of) is CommitOutcome.NOT_COMMITTED
                else CommitOutcome.COMMITTED
            )
        case "aborted":
            return CommitOutcome.NOT_COMMITTED
        case "in progress":
            connection.execute(_END_BACKEND, {"number": of.number})
    return CommitOutcome.UNDECIDED


def _by_witness(connection: Connection, of: TransactionMark) -> CommitOutcome:
    if of.witness is None:
        return CommitOutcome.UNTRACEABLE
    return CommitOutcome.COMMITTED if has_row(connection, of.witness) else CommitOutcome.NOT_COMMITTED


def has_row(connection: Connection, witness: WitnessRow) -> bool:
    """Return whether this row is in the database."""
    same = and_(*(witness.table.c[name] == value for name, value in witness.row.items()))
    return connection.execute(select(literal(1)).select_from(witness.table).where(same)).first() is not None
