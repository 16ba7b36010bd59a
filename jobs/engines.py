"""Engines for SQLite and PostgreSQL: how they connect, how a transaction begins, how long anything may take.

What only PostgreSQL needs stands in jobs/postgresql.py, with its driver, which a process on SQLite never loads.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, NullPool, create_engine, event, make_url

from jobs.config import Limits
from jobs.home import close, private_file, private_folder
from jobs.prepared import say

# Options of a connection, by database.  Reading needs no transaction, so that each statement sees the newest commit;
# psycopg is told so by isolation level, SQLite by our saying no BEGIN.
_NO_BEGIN: dict[str, Any] = {"slotkeeper_begins": False}
READS: dict[str, dict[str, Any]] = {"sqlite": _NO_BEGIN, "postgresql": {"isolation_level": "AUTOCOMMIT"}}
# PostgreSQL pages only inside a transaction; on SQLite that would lock out all who write.
SNAPSHOT: dict[str, dict[str, Any]] = {"sqlite": _NO_BEGIN, "postgresql": {}}
_UNSYNCED = "slotkeeper_unsynced"

SILENT: dict[str, Any] = {"hide_parameters": True}  # or the texts of errors would hold payloads
CONNECT_S = 5
POOL_S = 2.0

_clock = threading.local()


def make(url: str, limits: Limits, *, pooled: bool = True) -> Engine:
    """The engine of a record.  `pooled` False: each connection is a new one."""
    pool: dict[str, Any] = {} if pooled else {"poolclass": NullPool}
    if url.startswith("sqlite"):
        return _sqlite(url, limits, pool)
    from jobs import postgresql

    return postgresql.engine(url, limits, pool)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Whatever this thread asks of PostgreSQL meanwhile takes no longer in all: then the connection is given up."""
    before = getattr(_clock, "until", math.inf)
    _clock.until = min(before, time.monotonic() + seconds)
    try:
        yield
    finally:
        _clock.until = before


def left() -> float:
    """Seconds of the block in `within` that are left; infinite outside of any."""
    return float(getattr(_clock, "until", math.inf)) - time.monotonic()


# -- SQLite ------------------------------------------------------------------------------------------------


def _sqlite(url: str, limits: Limits, pool: dict[str, Any]) -> Engine:
    _make_private(make_url(url).database or "")
    engine = create_engine(
        url,
        connect_args={"timeout": limits.lock_s, "check_same_thread": False},
        **SILENT,
        **(pool or {"pool_size": 8, "max_overflow": 56, "pool_timeout": POOL_S}),
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _make_private(path: str) -> None:
    """SQLite would make the file by the umask.  What it makes beside it has the file's mode.

    Only here, and not with each connection: a record whose folder went away shall not begin anew.
    """
    if path in ("", ":memory:") or path.startswith("file:"):
        return
    file = Path(path)
    if not file.parent.exists():
        private_folder(file.parent)
    with suppress(OSError):  # SQLite says it better.
        private_file(file)
        for suffix in ("-wal", "-shm"):
            close(file.with_name(file.name + suffix))


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


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE: a transaction that first reads and then writes cannot fail half-way with SQLITE_BUSY.
    if connection.get_execution_options().get("slotkeeper_begins", True):
        say(connection, "BEGIN IMMEDIATE")


def wait_for_no_disk(connection: Connection) -> None:
    """From the next transaction on, a COMMIT on this connection does not wait for the disk (SQLite)."""
    if connection.dialect.name == "sqlite" and _UNSYNCED not in connection.info:
        say(connection, "PRAGMA synchronous=NORMAL")
        connection.info[_UNSYNCED] = True


def log_of(engine: Engine) -> str | None:
    """The file to which SQLite commits, in WAL mode; None: there is none to wait for."""
    file = engine.url.database or ""
    if engine.dialect.name != "sqlite" or file in ("", ":memory:") or file.startswith("file:"):
        return None
    return f"{file}-wal"
