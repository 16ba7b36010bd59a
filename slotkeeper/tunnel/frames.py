"""Frames: the units of the tunnel.  A WebSocket message contains one or more whole frames."""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import orjson

SUBPROTOCOL = "slotkeeper-node.v1"
MAX_MESSAGE_BYTES = 128 << 10
MAX_DATA_BYTES = 64 << 10
MAX_JSON_BYTES = 64 << 10
_FIRST_IGNORED_TYPE = 128
_HEADER = struct.Struct("!IBI")
HEADER_BYTES = _HEADER.size


class TunnelError(Exception):
    """The other side has broken the protocol: the connection must be closed with CLOSE_PROTOCOL."""


class FrameType(IntEnum):
    """The type of a frame.  Types from 128 on are ignored by a side that does not implement them."""

    CONTROL = 0  # JSON, on stream 0
    OPEN = 1  # JSON: a request begins
    DATA = 2  # a part of a body
    END = 3  # empty: the body is complete
    HEAD = 4  # JSON: a response begins
    RESET = 5  # JSON: the stream is over
    WINDOW = 6  # u32: as many more bytes of DATA may be sent on this stream


_JSON_TYPES = frozenset({FrameType.CONTROL, FrameType.OPEN, FrameType.HEAD, FrameType.RESET})


class Frame(NamedTuple):
    """One frame.  `stream` is 0 for CONTROL."""

    type: FrameType
    stream: int
    body: bytes

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object.  Raises TunnelError."""
        try:
            value = orjson.loads(self.body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise TunnelError(f"the body of a frame of type {self.type.name} is not a JSON object")
        return value

    def window(self) -> int:
        """Return the number of a WINDOW frame.  Raises TunnelError."""
        if len(self.body) != 4 or not (size := int.from_bytes(self.body)):
            raise TunnelError("the body of a frame of type WINDOW is not a positive number of 4 bytes")
        return size


def encode_frame(type_: FrameType, stream: int, body: bytes = b"") -> bytes:
    """Return a frame as bytes."""
    return _HEADER.pack(len(body), type_, stream) + body


def encode_json_frame(type_: FrameType, stream: int, value: dict[str, Any]) -> bytes:
    """Return a frame whose body is JSON.  Raises ValueError if it is longer than MAX_JSON_BYTES."""
    body = orjson.dumps(value)
    if len(body) > MAX_JSON_BYTES:
        raise ValueError(f"a frame of type {type_.name} has {len(body)} bytes of JSON; at most {MAX_JSON_BYTES}")
    return encode_frame(type_, stream, body)


def decode_control(message: str | bytes) -> dict[str, Any]:
    """Return the control message that is alone in a WebSocket message.  Raises TunnelError."""
    frames = list(decode_message(message))
    if len(frames) != 1 or frames[0].type is not FrameType.CONTROL:
        raise TunnelError("the first message is not one control message")
    return frames[0].json()


def decode_message(message: str | bytes) -> Iterator[Frame]:
    """Yield the frames of a WebSocket message.  Raises TunnelError."""
    if isinstance(message, str):
        raise TunnelError("a message is text")
    if len(message) > MAX_MESSAGE_BYTES:
        raise TunnelError(f"a message has {len(message)} bytes; at most {MAX_MESSAGE_BYTES}")
    at = 0
    while at < len(message):
        if len(message) - at < HEADER_BYTES:
            raise TunnelError("a message ends within the header of a frame")
        length, number, stream = _HEADER.unpack_from(message, at)
        body = message[at + HEADER_BYTES : at + HEADER_BYTES + length]
        if len(body) < length:
            raise TunnelError("a message ends within the body of a frame")
        at += HEADER_BYTES + length
        if number >= _FIRST_IGNORED_TYPE:
            continue
        yield _checked(number, stream, body)


def _checked(number: int, stream: int, body: bytes) -> Frame:
    try:
        type_ = FrameType(number)
    except ValueError:
        raise TunnelError(f"a frame has the unknown type {number}") from None
    if (stream == 0) != (type_ is FrameType.CONTROL):
        raise TunnelError(f"a frame of type {type_.name} has stream {stream}")
    most = MAX_JSON_BYTES if type_ in _JSON_TYPES else MAX_DATA_BYTES
    if len(body) > most:
        raise TunnelError(f"a frame of type {type_.name} has {len(body)} bytes; at most {most}")
    if type_ is FrameType.DATA and not body:
        raise TunnelError("a frame of type DATA is empty")
    return Frame(type_, stream, body)
