"""The connection on which a process writes, kept from one transaction to the next.

There is one committer in a process, so one connection is enough, and none has to be fetched, tried and put back.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine

from jobs import engines


class Writer:
    """Lends the connection to one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: Connection | None = None

    @contextmanager
    def connection(self, *, relaxed: bool) -> Iterator[Connection]:
        """The connection.  Whatever is raised with it in use gives it up: the next one is as good as new."""
        connection, self._kept = self._kept or self._engine.connect(), None
        try:
            engines.relax(connection, relaxed)
            yield connection
        except BaseException:
            connection.close()
            raise
        if connection.invalidated or self._kept is not None:
            connection.close()
        else:
            self._kept = connection

    def close(self) -> None:
        """Give the connection back, if nobody has it just now."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
