"""Messages that come packed: unpacked up to a bound, since a few hundred bytes can be gigabytes.

kombu unpacks a message before anybody can look at it, by what its registry names.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any, cast

from kombu import compression

from slotkeeper.registry.model_config import MAX_PAYLOAD_BYTES

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
