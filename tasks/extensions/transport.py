"""kombu's Redis transport, made robust against malformed messages, and bounded decompression for every broker.

kombu decodes messages in the worker's event loop, where an error ends the worker.  The broker then delivers the message
to the next worker, and ends that one too.  So a message that cannot be decoded is dropped with one log line.  kombu has
no hook for this: test_private_names.py lists the private methods that are overridden here.
"""

import bz2
import lzma
import time
import zlib
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import Any, cast

import structlog
from kombu import compression
from kombu.transport import redis
from redis import Redis
from redis.exceptions import DataError

from slotkeeper.redis.connections import OomTolerantRedis
from slotkeeper.registry.model_config import MAX_PAYLOAD_BYTES

log = structlog.get_logger(__name__)

_LONG_HELD_S = 15.0  # Messages are acknowledged within milliseconds.
# kombu counts these as connection errors.  While a message is read, they mean that a part of it is missing.
_READ_ERRORS = (DataError, KeyError)


def count_unacknowledged(client: Redis) -> int:
    """Return how many messages were delivered long ago and never acknowledged, such as those of a worker that died."""
    return int(client.zcount(Channel.unacked_index_key, 0, time.time() - _LONG_HELD_S))


def count_receivers(channel: Any) -> int | None:
    """Return how many clients received the last message that `channel` published to a fanout exchange.

    None: unknown, because none was published or the broker does not count them.
    """
    return channel.receivers if isinstance(channel, Channel) else None


class QoS(redis.QoS):
    """Returns unacknowledged messages to their queues, if the connection is open."""

    def restore_unacked(self, client: Any = None) -> Any:
        if self.channel.connection.client is None:
            # The connection was closed before its channel: kombu would raise.  The visibility timeout restores them.
            self._delivered.clear()  # type: ignore[union-attr]
            return None
        return super().restore_unacked(client)


class Channel(redis.Channel):
    """A channel on which only the connection can fail: a message that cannot be decoded is dropped."""

    QoS = QoS
    receivers: int | None = None

    def _get_client(self) -> Any:
        """Return what makes clients: they write messages and bindings even if Redis has no free memory."""
        return partial(_Client, self)

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
        """Log a dropped message, if it caused `error`; otherwise raise `error` again."""
        connection_errors: tuple[type[BaseException], ...] = (
            Empty,
            *self.connection.connection_errors,
            *self.connection.channel_errors,
        )
        if isinstance(error, connection_errors) and not isinstance(error, _READ_ERRORS):
            raise error
        log.warning("malformed_message_dropped", error=type(error).__name__)


class _Client(OomTolerantRedis):
    """Stores on its channel how many clients have received a published message."""

    def __init__(self, channel: Channel, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._channel = channel

    def publish(self, channel: Any, message: Any, **options: Any) -> Any:
        self._channel.receivers = receivers = super().publish(channel, message, **options)
        return receivers


class Transport(redis.Transport):
    """kombu's Redis transport with this channel; celeryconfig.py names it."""

    Channel = Channel


_GROWTH = 3  # kombu escapes to ASCII: a character of two to four bytes in UTF-8 becomes six or twelve bytes.
_HEADERS_BYTES = 1 << 20
MAX_DECOMPRESSED_BYTES = _GROWTH * MAX_PAYLOAD_BYTES + _HEADERS_BYTES
"""Maximum size of a decompressed message: the largest payload of a model, as kombu writes it, and the headers."""

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "application/x-gzip": zlib.decompressobj,
    "application/x-bz2": bz2.BZ2Decompressor,
    "application/x-lzma": lzma.LZMADecompressor,
}


class DecompressedTooLarge(ValueError):
    """The decompressed message is larger than any message that a client can need."""


def limit_decompression() -> None:
    """Bound the decompression of messages in this process, and refuse the formats whose output cannot be bounded."""
    for kind in compression.encoders():
        compress = cast(Any, compression).get_encoder(kind)[0]
        compression.register(compress, _bounded(_DECOMPRESSORS[kind]) if kind in _DECOMPRESSORS else _refuse, kind)


def _bounded(make_decompressor: Callable[[], Any]) -> Callable[[bytes], bytes]:
    def decompress(packed: bytes) -> bytes:
        one = make_decompressor()
        text: bytes = one.decompress(packed, MAX_DECOMPRESSED_BYTES + 1)
        if len(text) > MAX_DECOMPRESSED_BYTES or not one.eof:
            raise DecompressedTooLarge(f"a message may have {MAX_DECOMPRESSED_BYTES} bytes when it is unpacked")
        return text

    return decompress


def _refuse(packed: bytes) -> bytes:
    raise DecompressedTooLarge("messages may be packed by gzip, bzip2 or lzma")
