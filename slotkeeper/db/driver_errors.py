"""Translate errors of the database's driver into those that callers see."""

import sqlite3

from sqlalchemy.exc import (
    DBAPIError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
    TimeoutError,
)

from slotkeeper.errors import CommitUnknown, DatabaseUnavailable

# InternalError: PostgreSQL has become a read-only standby.  TimeoutError: every connection of the pool is in use.
_UNAVAILABLE = (OperationalError, InterfaceError, InternalError, TimeoutError)
# A process of a newer release before the migration.  SQLSTATEs of PostgreSQL: undefined_table, undefined_column;
# SQLite has only words.
_NOT_MIGRATED = ("42P01", "42703")
_MISSING_IN_SQLITE = ("no such table", "no such column", "has no column named")
# Why a database that is there refuses, by SQLSTATE of PostgreSQL and by SQLite's primary error code.
_REFUSALS: dict[str | int, str] = {
    "53100": "its disk is full",
    "25006": "it is read-only: a standby, or set so",
    "28P01": "it refuses the log-in",
    "28000": "it refuses the log-in",
    "42501": "its user lacks the rights",
    "53300": "it has no connection left",
    sqlite3.SQLITE_FULL: "its disk is full",
    sqlite3.SQLITE_READONLY: "its file is read-only",
    sqlite3.SQLITE_IOERR: "its disk has an error",
    sqlite3.SQLITE_CORRUPT: "its file is damaged",
    sqlite3.SQLITE_NOTADB: "its file is damaged",
}


def explain_unavailable(error: SQLAlchemyError, *, reading: bool = False) -> DatabaseUnavailable | None:
    """Return the refusal that an error means to the caller; None: it is a bug, to be raised as it is."""
    if (
        isinstance(error, (*_UNAVAILABLE, ProgrammingError))
        and (old := _explain_old_schema(error, reading)) is not None
    ):
        return old
    if not isinstance(error, _UNAVAILABLE):
        return None
    if reading:
        return DatabaseUnavailable(f"The database did not answer ({first_line(error)}); try again.")
    return nothing_stored(first_line(error))


def was_disconnected(error: BaseException) -> bool:
    """Return whether the connection was lost before COMMIT was sent."""
    return isinstance(error.__cause__, DBAPIError) and error.__cause__.connection_invalidated


def explain_refusal(error: BaseException) -> str | None:
    """Return why the database refused, as a clause without addresses; None: it did not answer, or said nothing known.

    error: as raised, with the driver's as its cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        driver = getattr(cause, "orig", None)
        code = getattr(driver, "sqlstate", None) or getattr(driver, "sqlite_errorcode", 0) & 0xFF
        if code in _REFUSALS:
            return _REFUSALS[code]
        if driver is not None and "FATAL:" in str(driver):  # PostgreSQL, while a connection is made: without SQLSTATE
            return "it refuses connections"
        cause = cause.__cause__
    return None


def first_line(error: BaseException) -> str:
    """Return what the driver says, in one line."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0] if lines else "no reason given"


def nothing_stored(reason: str) -> DatabaseUnavailable:
    return DatabaseUnavailable(f"The database did not take the request ({reason}); nothing was stored, try again.")


def commit_unknown(reason: str) -> CommitUnknown:
    return CommitUnknown(
        f"The database did not answer ({reason}); whether the request was stored is not known.  Look for what it "
        "asked for, or ask again with the same Idempotency-Key."
    )


def _explain_old_schema(error: SQLAlchemyError, reading: bool) -> DatabaseUnavailable | None:
    reason = first_line(error)
    sqlstate = getattr(getattr(error, "orig", None), "sqlstate", None)
    if sqlstate in _NOT_MIGRATED or (sqlstate is None and any(words in reason for words in _MISSING_IN_SQLITE)):
        outcome = "" if reading else "Nothing was stored. "
        return DatabaseUnavailable(
            f"The database does not have the schema of this release ({reason}). {outcome}"
            "Run `slotkeeper migrate`, then try again."
        )
    return None
