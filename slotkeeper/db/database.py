"""The database of one process: read, write, and wait for the disk."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, NullPool
from sqlalchemy.exc import SQLAlchemyError

from slotkeeper.config import DatabaseTimeouts
from slotkeeper.db import sqlite, time_limits
from slotkeeper.db.driver_errors import explain_unavailable
from slotkeeper.db.group_commit import GroupCommit, Transaction, Write
from slotkeeper.db.schema import raise_counter_to
from slotkeeper.errors import DatabaseUnavailable, SlotkeeperError

T = TypeVar("T")

# Reading needs no transaction, so that each statement sees the newest commit.
_READ_OPTIONS: dict[str, dict[str, Any]] = {
    "sqlite": sqlite.NO_BEGIN,
    "postgresql": {"isolation_level": "AUTOCOMMIT"},
}
_WRITE_CHECK = "doctor"
"""Counter that `check_writable` writes."""
# PostgreSQL reads page by page only inside a transaction; on SQLite that would lock out all writers.
_SNAPSHOT_OPTIONS: dict[str, dict[str, Any]] = {"sqlite": sqlite.NO_BEGIN, "postgresql": {}}


def make_engine(url: str, limits: DatabaseTimeouts, *, pooled: bool = True) -> Engine:
    """Return the engine of a database.  pooled=False: each connection is a new one."""
    pool: dict[str, Any] = {} if pooled else {"poolclass": NullPool}
    if url.startswith("sqlite"):
        return sqlite.make_sqlite_engine(url, limits, pool)
    # Imported here, so that a process on SQLite does not load PostgreSQL's driver.
    from slotkeeper.db import postgresql

    return postgresql.make_postgresql_engine(url, limits, pool)


class Database:
    """One database.  Thread-safe; must not be used across a fork."""

    def __init__(self, url: str, limits: DatabaseTimeouts | None = None) -> None:
        self.url = url
        self.limits = limits or DatabaseTimeouts()
        self.engine = make_engine(url, self.limits)
        dialect = self.engine.dialect.name
        self._reader = self.engine.execution_options(**_READ_OPTIONS[dialect])
        self._snapshots = self.engine.execution_options(**_SNAPSHOT_OPTIONS[dialect])
        # Not pooled: a pooled connection may be broken like the one whose COMMIT was lost.
        inquirer = make_engine(url, self.limits, pooled=False).execution_options(**_READ_OPTIONS[dialect])
        self._group = GroupCommit(self.engine, inquirer, self.limits)

    # -- writing ---------------------------------------------------------------------------------------------

    def write(self, unit: Callable[[Transaction], T | SlotkeeperError], *, durable: bool = True) -> T:
        """Run `unit` in a transaction, perhaps with other units, and return its result after the commit.

        unit, durable: as in `Write`.

        Raises what the unit raised or returned as an error; DatabaseUnavailable if nothing was stored; CommitUnknown if
        that is not known.
        """
        return self.commit(Write(unit, durable))

    def commit(self, write: Write[T]) -> T:
        """Commit one write, and return its result.  Raises as `write`."""
        (result,) = self._group.commit_all([write])
        if isinstance(result, Exception):
            raise result
        return result

    def commit_all(self, writes: Sequence[Write[Any]]) -> list[Any]:
        """Commit writes, in one transaction if none fails, and return the result or the error of each."""
        return self._group.commit_all(writes)

    def try_commit_all(self, writes: Sequence[Write[Any]]) -> list[Any] | None:
        """Commit writes from an event loop, without waiting; see `GroupCommit.try_commit_all`."""
        return self._group.try_commit_all(writes)

    def sync(self) -> None:
        """Wait until the disk has everything that this process committed.  Raises CommitUnknown."""
        self._group.sync()

    def check_writable(self, *, durable: bool = False) -> None:
        """Write a row that nothing reads.  Raises as `write`: DatabaseUnavailable with a full disk, for example."""
        now_ms = time.time_ns() // 1_000_000
        self.write(lambda tx: raise_counter_to(tx.connection, _WRITE_CHECK, now_ms), durable=durable)

    # -- reading ---------------------------------------------------------------------------------------------

    @contextmanager
    def read(self, *, unbounded: bool = False) -> Iterator[Connection]:
        """Yield a connection on which each statement sees the newest commit.  Raises DatabaseUnavailable.

        unbounded: only `DatabaseTimeouts.statement_s`, for background work and for reads of all jobs.
        """
        limit = (
            time_limits.time_limit(math.inf, alone=True) if unbounded else time_limits.time_limit(self.limits.read_s)
        )
        with self._connect(self._reader, limit) as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """Yield a connection for one long, consistent read, page by page.  Raises DatabaseUnavailable.

        The database keeps the rows that others delete meanwhile, so do not hold it for hours.
        """
        with self._connect(self._snapshots, time_limits.time_limit(math.inf, alone=True)) as connection:
            yield connection

    def sync_for_readers(self) -> None:
        """Wait until everything that a reader sees survives a power cut, whichever process committed it.

        PostgreSQL shows only commits that its disk has.  Raises DatabaseUnavailable.
        """
        if self._log is None:
            return
        try:
            self._group.sync_for_readers(self._log)
        except OSError as error:
            raise DatabaseUnavailable(f"The disk did not answer ({error}); try again.") from error

    @cached_property
    def _log(self) -> str | None:
        """The path of SQLite's write-ahead log."""
        if self.engine.dialect.name != "sqlite":
            return None
        with self.read() as connection:
            return sqlite.find_log(connection)

    @contextmanager
    def _connect(self, engine: Engine, limit: time_limits.time_limit) -> Iterator[Connection]:
        try:
            with limit, engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            if (unavailable := explain_unavailable(error, reading=True)) is not None:
                raise unavailable from error
            raise

    def close(self) -> None:
        self._group.close()
        self.engine.dispose()
