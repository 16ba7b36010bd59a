"""Translate errors of the database's driver into those that callers see."""

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


def explain_unavailable(error: SQLAlchemyError, *, reading: bool = False) -> DatabaseUnavailable | None:
    """Return the refusal that an error means to the caller; None: it is a bug, to be raised as it is."""
    if isinstance(error, (*_UNAVAILABLE, ProgrammingError)) and (old := _explain_old_schema(error)) is not None:
        return old
    if not isinstance(error, _UNAVAILABLE):
        return None
    if reading:
        return DatabaseUnavailable(f"The database did not answer ({first_line(error)}); try again.")
    return nothing_stored(first_line(error))


def was_disconnected(error: BaseException) -> bool:
    """Return whether the connection was lost before COMMIT was sent."""
    return isinstance(error.__cause__, DBAPIError) and error.__cause__.connection_invalidated


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


def _explain_old_schema(error: SQLAlchemyError) -> DatabaseUnavailable | None:
    reason = first_line(error)
    sqlstate = getattr(getattr(error, "orig", None), "sqlstate", None)
    if sqlstate in _NOT_MIGRATED or (sqlstate is None and any(words in reason for words in _MISSING_IN_SQLITE)):
        return DatabaseUnavailable(
            f"The database does not have the schema of this release ({reason}); nothing was stored. "
            "Run `slotkeeper migrate`, then try again."
        )
    return None
