"""The connection that a process writes on, kept between transactions.

A process has one leader at a time (group_commit.py), so one connection is enough, and none is taken from the pool.

On SQLite a commit that waits for the disk holds the write lock against all other processes meanwhile.  So this
connection commits without waiting, and `LogFile` syncs the log afterwards, as SQLite would have done itself.
"""

import errno
import os
import threading
import weakref
from contextlib import suppress

from sqlalchemy import Connection, Engine

from slotkeeper.db import sqlite
from slotkeeper.db.compiled_sql import commit, roll_back

_sync = getattr(os, "fdatasync", os.fsync)  # macOS has only fsync.


class LogFile:
    """SQLite's write-ahead log.  Kept open, because the kernel reports a write error only to descriptors open then."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._lock = threading.Lock()
        self._syncs = 0  # how many have begun
        self._failure: OSError | None = None  # of the latest sync

    def is_at(self, path: str) -> bool:
        """Return whether this is still the file at `path`."""
        return os.path.samestat(os.fstat(self._file), os.stat(path))

    def sync(self, engine: Engine) -> None:
        """Wait until the disk has the log.  Raises OSError.

        After a failure the kernel would report success for what is lost, so the next sync first has everything
        written again.  Syncs run one after another, for the kernel reports an error to one of several callers only; a
        caller that comes before another sync begins shares the outcome of that one.
        """
        before = self._syncs
        with self._lock:
            if self._syncs == before:
                self._syncs += 1
                rewrite = self._failure is not None
                self._failure = OSError(errno.EINTR, "the wait for the disk was interrupted")  # unless it returns
                self._failure = self._sync(engine, rewrite)
            if self._failure is not None:
                raise self._failure

    def _sync(self, engine: Engine, rewrite: bool) -> OSError | None:
        try:
            if rewrite:
                sqlite.checkpoint_log(engine)
            _sync(self._file)
        except OSError as error:
            return error
        return None


class Writer:
    """Lends the connection to one leader at a time."""

    def __init__(self, engine: Engine, lock_s: float) -> None:
        """lock_s: how long to wait for other writers, on SQLite."""
        self._engine = engine
        self._lock_s = lock_s
        self.is_quick = engine.dialect.name == "sqlite"  # It answers without a network.
        self._kept: Connection | None = None
        self._log: LogFile | None = None
        self._log_lock = threading.Lock()  # A reader opens it beside the leader.

    def begin(self) -> Connection:
        """Begin a transaction, and return the connection, which goes to `commit` or to `undo`."""
        connection, self._kept = self._kept or self._connect(), None
        try:
            sqlite.begin_immediate(connection, self._lock_s)
        except BaseException as error:
            if sqlite.is_busy(error):  # No transaction has begun.
                self._keep(connection)
            else:
                sqlite.discard_writer(connection)
            raise
        return connection

    def commit(self, connection: Connection) -> None:
        """Commit.  If it raises, the outcome is not known, and the connection goes to `drop`."""
        commit(connection)
        self._keep(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection that may still be in a transaction, with its locks."""
        connection.invalidate()
        connection.close()

    def undo(self, connection: Connection) -> None:
        """Roll back, and close the connection: the next one is as good as new."""
        try:
            roll_back(connection)
        finally:
            sqlite.discard_writer(connection)

    def sync(self) -> None:
        """Wait until everything committed so far survives a power cut.  Raises OSError if that is not known.

        PostgreSQL answers a COMMIT only then.
        """
        log = self._log
        if log is not None:
            log.sync(self._engine)

    def sync_for_readers(self, path: str) -> None:
        """The same for the commits of all processes, which readers see at once.  path: of the log.  Raises OSError.

        It waits on the file that `sync` waits on: a newly opened one would not learn of an earlier error.
        """
        with suppress(FileNotFoundError):  # SQLite deletes the log with the last connection.
            self._open_log(path).sync(self._engine)

    def close(self) -> None:
        """Close the connection, unless it is lent."""
        kept, self._kept = self._kept, None
        if kept is not None:
            sqlite.discard_writer(kept)

    def _keep(self, connection: Connection) -> None:
        if connection.invalidated or self._kept is not None:
            sqlite.discard_writer(connection)
        else:
            self._kept = connection

    def _connect(self) -> Connection:
        connection = self._engine.connect()
        try:
            log = sqlite.configure_writer(connection)
            if log is not None:
                self._open_log(log)
        except BaseException:
            sqlite.discard_writer(connection)
            raise
        return connection

    def _open_log(self, path: str) -> LogFile:
        """Return the log, opened again only if SQLite has replaced the file.  Raises FileNotFoundError."""
        with self._log_lock:
            if self._log is None or not self._log.is_at(path):
                self._log = LogFile(path)
            return self._log
