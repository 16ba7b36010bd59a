"""Engines for SQLite and PostgreSQL: how they connect, how a transaction begins.

What only PostgreSQL needs stands in slotkeeper/db/postgresql.py, with its driver, which a process on SQLite never
loads.
"""

import errno
import os
import sqlite3
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, NullPool, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from slotkeeper.config import DatabaseTimeouts
from slotkeeper.db.compiled_sql import run, say
from slotkeeper.db.time_limits import ENGINE_OPTIONS, POOL_TIMEOUT_S, time_left
from slotkeeper.state_folder import make_private_file, make_private_folder, restrict_to_owner

# Options of a connection, by database.  Reading needs no transaction, so that each statement sees the newest commit;
# psycopg is told so by isolation level, SQLite by our saying no BEGIN.
_NO_BEGIN: dict[str, Any] = {"slotkeeper_begins": False}
READ_OPTIONS: dict[str, dict[str, Any]] = {"sqlite": _NO_BEGIN, "postgresql": {"isolation_level": "AUTOCOMMIT"}}
# PostgreSQL pages only inside a transaction; on SQLite that would lock out all who write.
SNAPSHOT_OPTIONS: dict[str, dict[str, Any]] = {"sqlite": _NO_BEGIN, "postgresql": {}}
_LOOK_AGAIN_S = 0.0001  # at first, and twice as long each time, for most transactions are over by then
_LOOK_EVERY_S = 0.001
_HURRY_MS = 250  # A commit on a busy disk takes less; the default times leave three times as much.


def make_engine(url: str, limits: DatabaseTimeouts, *, pooled: bool = True) -> Engine:
    """The engine of a record.  `pooled` False: each connection is a new one."""
    pool: dict[str, Any] = {} if pooled else {"poolclass": NullPool}
    if url.startswith("sqlite"):
        return _sqlite(url, limits, pool)
    from slotkeeper.db import postgresql

    return postgresql.make_postgresql_engine(url, limits, pool)


# -- SQLite ------------------------------------------------------------------------------------------------


def _sqlite(url: str, limits: DatabaseTimeouts, pool: dict[str, Any]) -> Engine:
    _make_private(make_url(url).database or "")
    engine = create_engine(
        url,
        connect_args={"timeout": limits.lock_s, "check_same_thread": False},
        **ENGINE_OPTIONS,
        **(pool or {"pool_size": 8, "max_overflow": 56, "pool_timeout": POOL_TIMEOUT_S}),
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", partial(_begin_sqlite, patience_s=limits.lock_s))
    return engine


def _make_private(path: str) -> None:
    """SQLite would make the file by the umask.  What it makes beside it has the file's mode.

    Only here, and not with each connection: a record whose folder went away shall not begin anew.
    """
    if path in ("", ":memory:") or path.startswith("file:"):
        return
    file = Path(path)
    if not file.parent.exists():
        make_private_folder(file.parent)
    with suppress(OSError):  # SQLite says it better.
        make_private_file(file)
        for suffix in ("-wal", "-shm"):
            restrict_to_owner(file.with_name(file.name + suffix))


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # We say BEGIN ourselves, see below.
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",  # What was answered survives a power cut.
        "foreign_keys=ON",
        "wal_autocheckpoint=4000",
        "cache_size=-16000",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection, patience_s: float) -> None:
    if connection.get_execution_options().get("slotkeeper_begins", True):
        begin_immediate(connection, patience_s)


def begin_immediate(connection: Connection, patience_s: float) -> None:
    """Begin to write, when nobody else does.  PostgreSQL's driver does so by itself."""
    if connection.dialect.name == "sqlite":
        until, pause_s = time.monotonic() + min(patience_s, time_left()), _LOOK_AGAIN_S
        while not _has_begun(connection, until):
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LOOK_EVERY_S)


def _has_begun(connection: Connection, until: float) -> bool:
    """Begin, unless another writes now.  Raises OperationalError: others have written for too long."""
    try:
        # IMMEDIATE: a transaction that first reads and then writes cannot fail half-way with SQLITE_BUSY.
        say(connection, "BEGIN IMMEDIATE")
    except OperationalError as error:
        if not is_busy(error) or time.monotonic() >= until:
            raise
        return False
    return True


def is_busy(error: BaseException) -> bool:
    """Whether SQLite has refused something because another writes now: its connection is as good as before."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_BUSY


def hurry(connection: Connection) -> None:
    """Wait for rows that others have locked no longer than lets the transaction be tried again (PostgreSQL)."""
    if connection.dialect.name == "postgresql":
        say(connection, f"SET LOCAL lock_timeout = {_HURRY_MS}")


def configure_writer(connection: Connection) -> str | None:
    """Have a connection wait for nothing by itself (SQLite); answers the log that it writes to, None: nobody need wait.

    Its COMMITs do not wait for the disk, for which somebody else does.  And it does not wait for others' in SQLite's
    own way, which sleeps longer each time, up to 100 ms, so that whoever has waited long comes after all others.
    """
    if connection.dialect.name != "sqlite":
        return None
    connection.execution_options(**_NO_BEGIN)  # Whoever writes has begun, before SQLAlchemy would.
    say(connection, "PRAGMA busy_timeout=0")
    (mode,), (_, _, file) = _row(connection, "PRAGMA journal_mode"), _row(connection, "PRAGMA database_list")
    if mode != "wal" or not file:  # There are file systems where SQLite can keep no log.
        return None
    say(connection, "PRAGMA synchronous=NORMAL")
    _row(connection, "PRAGMA schema_version")  # The log is there from the first look on.
    return f"{file}-wal"


def discard_writer(connection: Connection) -> None:
    """Give it up.  Nobody else gets it: they would not expect what `make_writer` has set."""
    if connection.dialect.name == "sqlite":
        connection.invalidate()
    connection.close()


def _row(connection: Connection, text: str) -> Any:
    return run(connection, text, (), lambda cursor: cursor.fetchone())


def sync_log(engine: Engine) -> None:
    """Wait until the disk has all commits that are visible now, of every process.  Raises OSError.

    PostgreSQL shows only commits that its disk has.
    """
    if engine.dialect.name != "sqlite":
        return
    with engine.connect() as connection:
        _, _, file = _row(connection, "PRAGMA database_list")
    with suppress(FileNotFoundError):  # in memory, or without a log
        log = os.open(f"{file}-wal", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(log)
        finally:
            os.close(log)


def checkpoint_log(engine: Engine) -> None:
    """Have all that stands in the log written and secured in the record itself.  Raises OSError: it is not."""
    try:
        with engine.execution_options(**READ_OPTIONS["sqlite"]).connect() as connection:
            busy, _, _ = _row(connection, "PRAGMA wal_checkpoint(RESTART)")
    except SQLAlchemyError as error:
        raise OSError(errno.EIO, str(error.orig if isinstance(error, DBAPIError) else error)) from error
    if busy:
        raise OSError(errno.EBUSY, "the log cannot be rewritten while it is read")
