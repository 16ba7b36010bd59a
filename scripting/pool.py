"""Connections to Redis, lent and taken back by few steps.

redis-py's own pool looks for telemetry, warns of arguments from former releases and tells listeners of each connection
that comes back, which here nobody is: to fetch one and to put it back cost as much as to send a script and hear it.
"""

from typing import Any

from redis.connection import ConnectionPool
from redis.exceptions import RedisError


class Pool(ConnectionPool):
    """As redis-py's, which does whatever needs more than a connection that is at rest."""

    def get_connection(self, *args: Any, **options: Any) -> Any:
        found = self._latest()
        if found is not None and _is_at_rest(found):
            return found
        if found is not None:
            found.disconnect()  # redis-py would lend it with what is left on it.
            super().release(found)
        return super().get_connection(*args, **options)

    def _latest(self) -> Any:
        """The one that came back last; None: all are lent."""
        self._checkpid()  # What a process had opened before it was forked is not the new one's.
        with self._lock:
            if not self._available_connections:
                return None
            found = self._available_connections.pop()
            self._in_use_connections.add(found)
            return found

    def release(self, connection: Any) -> None:
        self._checkpid()
        with self._lock:
            if connection in self._in_use_connections and not connection.should_reconnect():
                self._in_use_connections.remove(connection)
                self._available_connections.append(connection)
                return
        super().release(connection)


def _is_at_rest(connection: Any) -> bool:
    """Whether it can be asked: it is there, and nothing is left on it to be heard, such as that Redis has closed it."""
    try:
        return connection.is_connected and not connection.can_read()
    except (RedisError, OSError):
        return False
