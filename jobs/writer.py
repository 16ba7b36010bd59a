"""The connection on which a process writes, kept from one transaction to the next.

There is one committer in a process, so one connection is enough, and none has to be fetched, tried and put back.

On SQLite a commit waits for the disk while it keeps all others from writing, in every process.  So this connection
commits without waiting, and the log it has written to is waited for afterwards, as SQLite would have done itself.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine

from jobs import engines

_sync = getattr(os, "fdatasync", os.fsync)  # macOS has no other


class Writer:
    """Lends the connection to one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: Connection | None = None
        self._log = engines.log_of(engine)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """The connection.  Whatever is raised with it in use gives it up: the next one is as good as new."""
        connection, self._kept = self._kept or self._engine.connect(), None
        try:
            engines.wait_for_no_disk(connection)
            yield connection
        except BaseException:
            connection.close()
            raise
        if connection.invalidated or self._kept is not None:
            connection.close()
        else:
            self._kept = connection

    def sync(self) -> None:
        """Wait until all that was committed so far survives a power cut.  Raises OSError: whether it does is not known.

        What a COMMIT on PostgreSQL has answered does so already.
        """
        if self._log is None:
            return
        log = os.open(self._log, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _sync(log)
        finally:
            os.close(log)

    def close(self) -> None:
        """Give the connection back, if nobody has it just now."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
