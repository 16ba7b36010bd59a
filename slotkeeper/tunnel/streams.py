"""The streams of one connection: requests from the gateway to the agent, and their responses.

Both sides use a Tunnel.  It keeps what is to be sent, and decides what is sent next:

WINDOW-1 a side never sends more DATA of a stream than the other side has admitted, so memory is bounded by the number
         of streams
TURN-1   control messages, heads and ends are sent before waiting DATA, and DATA of several streams in turn, so a large
         body delays no other request by more than one message
STREAM-1 the number of a stream is used once on a connection
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from slotkeeper.tunnel.frames import (
    HEADER_BYTES,
    MAX_DATA_BYTES,
    MAX_MESSAGE_BYTES,
    Frame,
    FrameType,
    TunnelError,
    decode_message,
    encode_frame,
    encode_json_frame,
)

TO_AGENT_WINDOW = 256 << 10
"""Bytes of a request's body that may be on the way."""
TO_GATEWAY_WINDOW = 1 << 20
"""Bytes of a response's body that may be on the way: 10 MiB/s at a round trip of 100 ms."""


class Side(Enum):
    """One side of a connection: the gateway opens streams, the agent answers them."""

    GATEWAY = "gateway"
    AGENT = "agent"


class ControlReceived(NamedTuple):
    """A control message.  Its member `type` is a string."""

    message: dict[str, Any]


class RequestReceived(NamedTuple):
    """A request begins (agent).  `head` has the members of the frame OPEN."""

    stream: int
    head: dict[str, Any]


class ResponseReceived(NamedTuple):
    """A response begins (gateway).  `head` has the members of the frame HEAD."""

    stream: int
    head: dict[str, Any]


class DataReceived(NamedTuple):
    """A part of a body.  Call `consumed` when it has been passed on."""

    stream: int
    data: bytes


class BodyEnded(NamedTuple):
    """The body that the other side sends is complete."""

    stream: int


class StreamReset(NamedTuple):
    """The stream is over before its end.

    was_sent: the request may have left; False: it certainly has not.
    """

    stream: int
    code: str
    was_sent: bool = True


class WindowOpened(NamedTuple):
    """More bytes of this stream can be sent."""

    stream: int


Event = ControlReceived | RequestReceived | ResponseReceived | DataReceived | BodyEnded | StreamReset | WindowOpened


@dataclass(slots=True)
class _Stream:
    can_send: int
    """Bytes that the other side admits beyond those in `waiting`."""
    can_receive: int
    """Bytes that this side still admits."""
    waiting: deque[bytes] = field(default_factory=deque)
    """DATA that is to be sent."""
    unreported: int = 0  # bytes that were consumed, and not admitted again
    is_opened: bool = False  # Its first frame was taken by `next_message`.
    has_head: bool = False  # The response has begun.
    ends: bool = False  # No more will be sent after `waiting`.
    end_is_sent: bool = False
    end_is_received: bool = False


class Tunnel:
    """The streams of one side of a connection.  Not thread-safe.

    max_streams: at the same time; the gateway opens no more, and an agent accepts no more.
    """

    def __init__(self, side: Side, max_streams: int) -> None:
        self.max_streams = max_streams
        self._side = side
        self._streams: dict[int, _Stream] = {}
        self._last_stream = 0
        # Short lists: an empty deque would take 700 bytes of each idle connection.
        self._urgent: list[tuple[int, bytes]] = []  # stream and frame
        self._with_data: list[int] = []  # streams with DATA that is to be sent, in turn
        is_gateway = side is Side.GATEWAY
        self._send_window = TO_AGENT_WINDOW if is_gateway else TO_GATEWAY_WINDOW
        self._receive_window = TO_GATEWAY_WINDOW if is_gateway else TO_AGENT_WINDOW

    @property
    def stream_count(self) -> int:
        """Return how many streams are open."""
        return len(self._streams)

    @property
    def has_room(self) -> bool:
        """Return whether one more stream can be opened."""
        return len(self._streams) < self.max_streams

    # -- sending ---------------------------------------------------------------------------------------------

    def send_control(self, message: dict[str, Any]) -> None:
        """Send a control message.  Raises ValueError if it is too long."""
        self._urgent.append((0, encode_json_frame(FrameType.CONTROL, 0, message)))

    def open(self, head: dict[str, Any]) -> int:
        """Begin a request and return its stream (gateway).  Raises ValueError if its head is too long."""
        stream = self._last_stream + 1
        frame = encode_json_frame(FrameType.OPEN, stream, head)
        self._last_stream = stream
        self._streams[stream] = _Stream(self._send_window, self._receive_window)
        self._urgent.append((stream, frame))
        return stream

    def respond(self, stream: int, head: dict[str, Any]) -> None:
        """Begin a response (agent).  Does nothing if the stream is over.  Raises ValueError if its head is too long."""
        found = self._streams.get(stream)
        if found is not None and not found.has_head:
            self._urgent.append((stream, encode_json_frame(FrameType.HEAD, stream, head)))
            found.has_head = True

    def send(self, stream: int, data: bytes) -> int:
        """Send the beginning of `data`, and return how many bytes that are; 0: wait for WindowOpened.

        Accepts all of it if the stream is over.
        """
        found = self._streams.get(stream)
        if found is None or found.ends:
            return len(data)
        accepted = data[: found.can_send]
        if accepted and not found.waiting:
            self._with_data.append(stream)
        for at in range(0, len(accepted), MAX_DATA_BYTES):
            found.waiting.append(accepted[at : at + MAX_DATA_BYTES])
        found.can_send -= len(accepted)
        return len(accepted)

    def end(self, stream: int) -> None:
        """End the body that this side sends."""
        found = self._streams.get(stream)
        if found is None or found.ends:
            return
        found.ends = True
        if not found.waiting:
            self._send_end(stream, found)

    def reset(self, stream: int, code: str) -> None:
        """End a stream at once.  `code`: abandoned, too_large, refused or internal."""
        found = self._streams.get(stream)
        if found is None:
            return
        self._remove(stream)
        if self._side is Side.GATEWAY and not found.is_opened:  # The agent does not know it.
            self._urgent = [entry for entry in self._urgent if entry[0] != stream]
        else:
            self._urgent.append((stream, encode_json_frame(FrameType.RESET, stream, {"code": code})))

    def consumed(self, stream: int, size: int) -> None:
        """Admit as many more bytes as have been passed on."""
        found = self._streams.get(stream)
        if found is None or found.end_is_received:
            return
        found.unreported += size
        if found.unreported * 2 >= self._receive_window:
            self._urgent.append((stream, encode_frame(FrameType.WINDOW, stream, found.unreported.to_bytes(4))))
            found.can_receive += found.unreported
            found.unreported = 0

    def next_message(self) -> bytes | None:
        """Return the next message that is to be sent; None: there is none.

        Take a message when the one before has left, so that urgent frames pass waiting bodies.
        """
        parts: list[bytes] = []
        room = MAX_MESSAGE_BYTES
        while self._urgent and len(self._urgent[0][1]) <= room:
            stream, frame = self._urgent.pop(0)
            if stream in self._streams:
                self._streams[stream].is_opened = True
            parts.append(frame)
            room -= len(frame)
        while not self._urgent and self._with_data:
            stream = self._with_data[0]
            found = self._streams[stream]
            if len(found.waiting[0]) + 2 * HEADER_BYTES > room:
                break
            del self._with_data[0]
            frame = encode_frame(FrameType.DATA, stream, found.waiting.popleft())
            if found.waiting:
                self._with_data.append(stream)
            elif found.ends:
                frame += self._end_frame(stream, found)
            parts.append(frame)
            room -= len(frame)
        return b"".join(parts) if parts else None

    # -- receiving -------------------------------------------------------------------------------------------

    def receive(self, message: str | bytes) -> list[Event]:
        """Return what a message means.  Raises TunnelError."""
        return [event for frame in decode_message(message) if (event := self._receive_frame(frame)) is not None]

    def lose(self) -> list[StreamReset]:
        """End all streams, because the connection is over, and return them."""
        lost = [StreamReset(stream, "cut", found.is_opened) for stream, found in self._streams.items()]
        self._streams.clear()
        self._urgent.clear()
        self._with_data.clear()
        return lost

    def _receive_frame(self, frame: Frame) -> Event | None:
        if frame.type is FrameType.CONTROL:
            message = frame.json()
            if not isinstance(message.get("type"), str):
                raise TunnelError("a control message has no type")
            return ControlReceived(message)
        if frame.type is FrameType.OPEN:
            return self._receive_open(frame)
        found = self._streams.get(frame.stream)
        if found is None:
            if frame.stream > self._last_stream:
                raise TunnelError(
                    f"a frame of type {frame.type.name} is on stream {frame.stream}, which was not opened"
                )
            return None  # This side has ended the stream while the frame was on its way.
        match frame.type:
            case FrameType.HEAD:
                return self._receive_head(frame, found)
            case FrameType.DATA:
                return self._receive_data(frame, found)
            case FrameType.END:
                return self._receive_end(frame, found)
            case FrameType.WINDOW:
                found.can_send += frame.window()
                if found.can_send > self._send_window:
                    raise TunnelError(f"stream {frame.stream} admits more data than its window")
                return WindowOpened(frame.stream)
            case _:
                self._remove(frame.stream)
                return StreamReset(frame.stream, str(frame.json().get("code", "")))

    def _receive_open(self, frame: Frame) -> Event:
        if self._side is Side.GATEWAY:
            raise TunnelError("an agent must not open a stream")
        if frame.stream <= self._last_stream:  # STREAM-1
            raise TunnelError(f"stream {frame.stream} was opened before")
        if not self.has_room:
            raise TunnelError(f"more than {self.max_streams} streams are open")
        self._last_stream = frame.stream
        self._streams[frame.stream] = _Stream(self._send_window, self._receive_window, is_opened=True)
        return RequestReceived(frame.stream, frame.json())

    def _receive_head(self, frame: Frame, found: _Stream) -> Event:
        if self._side is Side.AGENT or found.has_head:
            raise TunnelError(f"the response on stream {frame.stream} may not begin here")
        found.has_head = True
        return ResponseReceived(frame.stream, frame.json())

    def _receive_data(self, frame: Frame, found: _Stream) -> Event:
        self._check_body(frame, found)
        found.can_receive -= len(frame.body)
        if found.can_receive < 0:  # WINDOW-1
            raise TunnelError(f"stream {frame.stream} has more data than its window admits")
        return DataReceived(frame.stream, frame.body)

    def _receive_end(self, frame: Frame, found: _Stream) -> Event:
        self._check_body(frame, found)
        found.end_is_received = True
        if self._side is Side.GATEWAY:
            if found.end_is_sent:
                self._remove(frame.stream)
            else:  # The agent needs no more of the request.
                self.reset(frame.stream, "abandoned")
        elif found.end_is_sent:
            self._remove(frame.stream)
        return BodyEnded(frame.stream)

    def _check_body(self, frame: Frame, found: _Stream) -> None:
        if found.end_is_received or (self._side is Side.GATEWAY and not found.has_head):
            raise TunnelError(f"stream {frame.stream} may have no {frame.type.name} here")

    def _send_end(self, stream: int, found: _Stream) -> None:
        self._urgent.append((stream, self._end_frame(stream, found)))

    def _end_frame(self, stream: int, found: _Stream) -> bytes:
        found.end_is_sent = True
        if found.end_is_received:
            self._remove(stream)
        return encode_frame(FrameType.END, stream)

    def _remove(self, stream: int) -> None:
        found = self._streams.pop(stream)
        if found.waiting and stream in self._with_data:
            self._with_data.remove(stream)
