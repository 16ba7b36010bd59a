"""The Redis broker: what is no message, or could not be decoded, is dropped in one line; it ends nobody.

kombu decodes what it takes from a list or a channel in the loop of the worker; an error there would end the worker,
and with a list that is read again, each worker after it.  So would a connection that is cut while it is being closed.
"""

from queue import Empty
from typing import Any

import structlog
from kombu.transport import redis
from redis.exceptions import DataError

from slotkeeper.redis.connections import OomTolerantRedis

log = structlog.get_logger(__name__)

# kombu counts them among errors of connections; where a message is read, they say that something is missing from it.
_READ_ERRORS = (DataError, KeyError)


class QoS(redis.QoS):
    """Gives messages back as long as there is a connection to do it through."""

    def restore_unacked(self, client: Any = None) -> Any:
        if self.channel.connection.client is None:
            # The connection was closed before its channel.  The broker brings these messages back by itself, later.
            self._delivered.clear()  # type: ignore[union-attr]
            return None
        return super().restore_unacked(client)


class Channel(redis.Channel):
    """Lets connections fail, but not because of what was read from them."""

    QoS = QoS

    def _get_client(self) -> Any:
        """Return the class of clients: messages and bindings go on when Redis is full."""
        return OomTolerantRedis

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[misc]
        except Exception as error:
            self._drop(error)
            return True

    def _receive_one(self, c: Any) -> Any:
        try:
            return super()._receive_one(c)  # type: ignore[misc]
        except Exception as error:
            self._drop(error)
            raise Empty from None

    def _drop(self, error: Exception) -> None:
        """Called while handling `error`, which is raised again unless what was read is to blame."""
        connection_errors: tuple[type[BaseException], ...] = (
            Empty,
            *self.connection.connection_errors,
            *self.connection.channel_errors,
        )
        if isinstance(error, connection_errors) and not isinstance(error, _READ_ERRORS):
            raise error
        log.warning("no_message_dropped", error=type(error).__name__)


class Transport(redis.Transport):
    """kombu's own with this channel; celeryconfig.py names it."""

    Channel = Channel
