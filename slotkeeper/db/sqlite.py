"""SQLite: how it connects, how a transaction begins, and how the disk is awaited outside of the write lock."""

import errno
import sqlite3
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from slotkeeper.config import DatabaseTimeouts
from slotkeeper.db.compiled_sql import execute_raw, execute_text
from slotkeeper.db.time_limits import ENGINE_OPTIONS, POOL_TIMEOUT_S, time_left
from slotkeeper.state_folder import make_private_file, make_private_folder, restrict_to_owner

NO_BEGIN: dict[str, Any] = {"slotkeeper_begins": False}
"""Options of a connection for which SQLAlchemy's `begin` event sends no BEGIN."""
_FIRST_PAUSE_S = 0.0001  # doubled each time: most transactions of others are over by then
_MAX_PAUSE_S = 0.001
_DATABASE_FILE = "PRAGMA database_list"


def make_sqlite_engine(url: str, limits: DatabaseTimeouts, pool: dict[str, Any]) -> Engine:
    _make_private(make_url(url).database or "")
    engine = create_engine(
        url,
        connect_args={"timeout": limits.lock_s, "check_same_thread": False},
        **ENGINE_OPTIONS,
        **(pool or {"pool_size": 8, "max_overflow": 56, "pool_timeout": POOL_TIMEOUT_S}),
    )
    event.listen(engine, "connect", _set_pragmas)
    event.listen(engine, "begin", partial(_on_begin, lock_s=limits.lock_s))
    return engine


def _make_private(path: str) -> None:
    """Create the file for its owner alone; SQLite would use the umask.  Files that it makes beside it get this mode.

    Done once and not for each connection: if the folder disappears, no empty database must take its place.
    """
    if path in ("", ":memory:") or path.startswith("file:"):
        return
    file = Path(path)
    if not file.parent.exists():
        make_private_folder(file.parent)
    with suppress(OSError):  # SQLite's own error is more precise.
        make_private_file(file)
        for suffix in ("-wal", "-shm"):
            restrict_to_owner(file.with_name(file.name + suffix))


def _set_pragmas(connection: Any, _: object) -> None:
    connection.isolation_level = None  # The driver sends no BEGIN; `_on_begin` does.
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",  # What was answered survives a power cut.
        "foreign_keys=ON",
        "wal_autocheckpoint=4000",
        "cache_size=-16000",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _on_begin(connection: Connection, lock_s: float) -> None:
    if connection.get_execution_options().get("slotkeeper_begins", True):
        begin_immediate(connection, lock_s)


def begin_immediate(connection: Connection, lock_s: float) -> None:
    """Begin a transaction that writes.  Waits at most `lock_s` seconds for other writers.

    On PostgreSQL the driver begins by itself.
    """
    if connection.dialect.name == "sqlite":
        until, pause_s = time.monotonic() + min(lock_s, time_left()), _FIRST_PAUSE_S
        while not _try_to_begin(connection, until):
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _MAX_PAUSE_S)


def _try_to_begin(connection: Connection, until: float) -> bool:
    """Return False if another connection writes now.  Raises OperationalError if that goes on after `until`."""
    try:
        # IMMEDIATE: a transaction that first reads and then writes cannot fail half-way with SQLITE_BUSY.
        execute_text(connection, "BEGIN IMMEDIATE")
    except OperationalError as error:
        if not is_busy(error) or time.monotonic() >= until:
            raise
        return False
    return True


def is_busy(error: BaseException) -> bool:
    """Return whether SQLite refused something because another connection writes now.

    The connection that was refused stays usable.
    """
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_BUSY


def configure_writer(connection: Connection) -> str | None:
    """Configure the connection that writes, and return the path of the log to be synced after each COMMIT.

    Its COMMITs do not wait for the disk: `LogFile.sync` does, when the write lock is free again.  It does not wait for
    other writers in SQLite's own way, which sleeps longer each time, up to 100 ms, so that a writer that has waited
    for long comes after all others.

    Returns None if nothing is to be synced: on PostgreSQL, and where SQLite can keep no write-ahead log.
    """
    if connection.dialect.name != "sqlite":
        return None
    connection.execution_options(**NO_BEGIN)  # `begin_immediate` is called before SQLAlchemy would begin.
    execute_text(connection, "PRAGMA busy_timeout=0")
    log = find_log(connection)
    if log is not None:
        execute_text(connection, "PRAGMA synchronous=NORMAL")
        _fetch_row(connection, "PRAGMA schema_version")  # SQLite creates the log when it reads for the first time.
    return log


def find_log(connection: Connection) -> str | None:
    """Return the path of the write-ahead log, or None if SQLite keeps none: some file systems do not support it."""
    (mode,), (_, _, file) = _fetch_row(connection, "PRAGMA journal_mode"), _fetch_row(connection, _DATABASE_FILE)
    return f"{file}-wal" if mode == "wal" and file else None


def discard_writer(connection: Connection) -> None:
    """Close the connection that writes.  Its settings are its own, so it does not return to the pool."""
    if connection.dialect.name == "sqlite":
        connection.invalidate()
    connection.close()


def _fetch_row(connection: Connection, text: str) -> Any:
    return execute_raw(connection, text, (), lambda cursor: cursor.fetchone())


def checkpoint_log(engine: Engine) -> None:
    """Write all that stands in the log to the database file, and sync that.  Raises OSError if it could not."""
    try:
        with engine.execution_options(**NO_BEGIN).connect() as connection:
            busy, _, _ = _fetch_row(connection, "PRAGMA wal_checkpoint(RESTART)")
    except SQLAlchemyError as error:
        raise OSError(errno.EIO, str(error.orig if isinstance(error, DBAPIError) else error)) from error
    if busy:
        raise OSError(errno.EBUSY, "the log cannot be rewritten while it is read")
