"""The connection on which a process writes, kept from one transaction to the next.

There is one committer in a process, so one connection is enough, and none has to be fetched, tried and put back.

On SQLite a commit waits for the disk while it keeps all others from writing, in every process.  So this connection
commits without waiting, and the log it has written to is waited for afterwards, as SQLite would have done itself.
"""

import errno
import os
import threading
import weakref

from sqlalchemy import Connection, Engine

from slotkeeper.db import sqlite
from slotkeeper.db.compiled_sql import commit, undo

_sync = getattr(os, "fdatasync", os.fsync)  # macOS has no other


class LogFile:
    """SQLite's log, open for as long as somebody may wait for it: only so does the system tell of an error it met."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._turn = threading.Lock()
        self._begun = 0  # How often the disk has been waited for.
        self._lost: OSError | None = None  # What came of the latest time.

    def is_at(self, path: str) -> bool:
        """Whether it is still the one there."""
        return os.path.samestat(os.fstat(self._file), os.stat(path))

    def sync(self, engine: Engine) -> None:
        """Raises OSError.  After that the disk would say yes to what is lost: first all is written anew.

        One after another: of several who wait for it at once, the system tells a single one of an error.  Whoever has
        come before another began shares what that one finds.
        """
        before = self._begun
        with self._turn:
            if self._begun == before:
                self._begun += 1
                anew = self._lost is not None
                self._lost = OSError(errno.EINTR, "the wait for the disk was interrupted")  # unless it comes to its end
                self._lost = self._wait(engine, anew)
            if self._lost is not None:
                raise self._lost

    def _wait(self, engine: Engine, anew: bool) -> OSError | None:
        try:
            if anew:
                sqlite.checkpoint_log(engine)
            _sync(self._file)
        except OSError as error:
            return error
        return None


class Writer:
    """Lends the connection to one at a time.  `is_quick`: what it is asked it answers without waiting for anybody."""

    def __init__(self, engine: Engine, patience_s: float) -> None:
        """`patience_s`: how long others who write are waited for, on SQLite."""
        self._engine = engine
        self._patience_s = patience_s
        self.is_quick = engine.dialect.name == "sqlite"
        self._kept: Connection | None = None
        self._log: LogFile | None = None

    def begin(self) -> Connection:
        """The connection, on which a transaction has begun: to be handed to `commit` or to `undo`."""
        connection, self._kept = self._kept or self._connect(), None
        try:
            sqlite.begin_immediate(connection, self._patience_s)
        except BaseException as error:
            if sqlite.is_busy(error):  # Nothing was begun on it.
                self._keep(connection)
            else:
                sqlite.discard_writer(connection)
            raise
        return connection

    def commit(self, connection: Connection) -> None:
        """Raises: what came of it is not known.  Then the connection is to be handed to `drop`."""
        commit(connection)
        self._keep(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection that may still be in a transaction, with its locks."""
        connection.invalidate()
        connection.close()

    def undo(self, connection: Connection) -> None:
        """Give the connection up, with what was begun on it: the next one is as good as new."""
        try:
            undo(connection)
        finally:
            sqlite.discard_writer(connection)

    def _keep(self, connection: Connection) -> None:
        if connection.invalidated or self._kept is not None:
            sqlite.discard_writer(connection)
        else:
            self._kept = connection

    def _connect(self) -> Connection:
        connection = self._engine.connect()
        try:
            log = sqlite.configure_writer(connection)
            if log is None:
                self._log = None
            elif self._log is None or not self._log.is_at(log):  # Else it knows of errors, and is to hear.
                self._log = LogFile(log)
        except BaseException:
            sqlite.discard_writer(connection)
            raise
        return connection

    def sync(self) -> None:
        """Wait until all that was committed so far survives a power cut.  Raises OSError: whether it does is not known.

        What a COMMIT on PostgreSQL has answered does so already.
        """
        log = self._log
        if log is not None:
            log.sync(self._engine)

    def close(self) -> None:
        """Give the connection back, if nobody has it just now."""
        kept, self._kept = self._kept, None
        if kept is not None:
            sqlite.discard_writer(kept)
