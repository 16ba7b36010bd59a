"""The Redis broker for a worker that reads what strangers write: what is no message is dropped, and ends nobody.

kombu decodes what it takes from a list or a channel in the loop of the worker; an error there would end the worker,
and with a list that is read again, each worker after it.  So would a connection that is cut while it is being closed.

A wake-up may be lost, so no copy of it is kept at the broker while a worker has it: to keep one, and to take it away
again, costs two more round trips in which the worker's consumer does nothing else.
"""

from queue import Empty
from typing import Any

import structlog
from kombu.transport import redis, virtual
from redis.exceptions import DataError

from scripting.full import FullClient
from tasks.wake_up import is_wake_up

log = structlog.get_logger(__name__)

# kombu counts them among errors of connections; where a message is read, they say that something is missing from it.
_OF_WHAT_WAS_READ = (DataError, KeyError)


class QoS(redis.QoS):
    """Gives messages back as long as there is a connection to do it through; wake-ups, of which it alone has a copy."""

    def append(self, message: Any, delivery_tag: str) -> None:
        if _wakes_up(message):
            _whence(message)  # Else it would keep the others from being given back.
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        if _wakes_up(self._delivered.get(delivery_tag)):  # type: ignore[union-attr]
            virtual.QoS.ack(self, delivery_tag)
        else:
            super().ack(delivery_tag)

    def restore_by_tag(self, tag: str, client: Any = None, leftmost: bool = False) -> None:
        message: Any = self._delivered.get(tag)  # type: ignore[union-attr]
        if not _wakes_up(message):
            super().restore_by_tag(tag, client, leftmost)
            return
        channel: Any = self.channel
        with channel.conn_or_acquire(client) as connection:
            channel._do_restore_message(message._raw, *_whence(message), connection, leftmost)

    def restore_unacked(self, client: Any = None) -> Any:
        if self.channel.connection.client is None:
            # The connection was closed before its channel.  The broker brings these messages back by itself, later;
            # wake-ups are lost, and their offers found by those who look for work.
            self._delivered.clear()  # type: ignore[union-attr]
            return None
        return super().restore_unacked(client)


def _wakes_up(message: Any) -> bool:
    return message is not None and isinstance(message.headers, dict) and is_wake_up(message.headers)


def _whence(message: Any) -> tuple[str, str]:
    """Exchange and key by which it came, and goes back.  Raises KeyError or TypeError: it does not say."""
    return message.delivery_info["exchange"], message.delivery_info["routing_key"]


class Channel(redis.Channel):
    """Lets connections fail, but not because of what was read from them."""

    QoS = QoS
    _kept: Any = None

    def _get_client(self) -> Any:
        """Messages and bindings go on when Redis is full."""
        return super()._get_client() if self.global_keyprefix else FullClient  # type: ignore[misc]

    def _create_client(self, asynchronous: bool = False) -> Any:
        """Of those that send, one is kept: to make one costs as much as what is sent by it."""
        if asynchronous:
            return super()._create_client(asynchronous=True)  # type: ignore[misc]
        if self._kept is None or self._kept.connection_pool is not self.pool:
            self._kept = super()._create_client()  # type: ignore[misc]
        return self._kept

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
        about_the_connection: tuple[type[BaseException], ...] = (
            Empty,
            *self.connection.connection_errors,
            *self.connection.channel_errors,
        )
        if isinstance(error, about_the_connection) and not isinstance(error, _OF_WHAT_WAS_READ):
            raise error
        log.warning("no_message_dropped", error=type(error).__name__)


class Transport(redis.Transport):
    Channel = Channel
