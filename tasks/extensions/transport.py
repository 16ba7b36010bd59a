"""The Redis broker: what is no message, or could not be decoded, is dropped in one line; it ends nobody.

kombu decodes what it takes from a list or a channel in the loop of the worker; an error there would end the worker,
and with a list that is read again, each worker after it.  So would a connection that is cut while it is being closed.
"""

import bz2
import lzma
import time
import zlib
from collections.abc import Callable
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

_LONG_HELD_S = 15.0  # Messages are acknowledged in milliseconds.
# kombu counts them among errors of connections; where a message is read, they say that something is missing from it.
_READ_ERRORS = (DataError, KeyError)


def count_unacknowledged(client: Redis) -> int:
    """Return how many messages of this broker were taken long ago and not acknowledged, as by a worker that died."""
    return int(client.zcount(Channel.unacked_index_key, 0, time.time() - _LONG_HELD_S))


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


_GROWTH = 3  # kombu writes ASCII: of each letter's two to four bytes in UTF-8 it makes six or twelve.
_HEADERS_BYTES = 1 << 20
MAX_DECOMPRESSED_BYTES = _GROWTH * MAX_PAYLOAD_BYTES + _HEADERS_BYTES
"""Of an unpacked message: the largest payload that a model may take, as kombu writes it, and what stands around it."""

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "application/x-gzip": zlib.decompressobj,
    "application/x-bz2": bz2.BZ2Decompressor,
    "application/x-lzma": lzma.LZMADecompressor,
}


class DecompressedTooLarge(ValueError):
    """What is packed in this message is more than any of ours holds."""


def limit_decompression() -> None:
    """From now on no message of this process is unpacked beyond the bound, nor by what knows none."""
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
