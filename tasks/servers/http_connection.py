"""A connection to a server in an event loop: HTTP/1.1, one exchange after another.

httptools parses the responses; a ResponseHandler gets them piece by piece.  A connection that has sent what was not
requested, or on which the end of a response is uncertain, is closed, and never used again.

A server may send megabytes in pieces of two bytes, each of which costs as much as a large one.  So the time is bounded
for which one connection keeps the loop (ParseTurns), and the number of pieces of a body.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

# A server that closes an idle connection may do so in the very moment in which we send on it, and
# then nobody can tell whether it has read the request.  What is closed already is found out before;
# the rest is avoided by not reusing a connection that has been idle for about as long as common
# servers allow (gunicorn 2 s, uvicorn and node 5 s).  What is left of the race is UNKNOWN.
MAX_IDLE_S = 1.5
# So does a server whose code has failed (uvicorn, under every FastAPI: a moment after a 500 that announces nothing),
# and the slot's next job comes in that very moment.
_CLOSE_AFTER_STATUS = 500
_MAX_HEAD_BYTES = 256 * 1024  # bytes; as much may be said between pieces of a body, and behind it
_LARGE_BODY_BYTES = 64 * 1024  # bytes of a request's body that are not copied behind its head
_PEEK_FLAGS = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_TCP_INFO = getattr(socket, "TCP_INFO", None)  # Linux: its first byte is the connection's state
_ESTABLISHED = b"\x01"
_SO_MEMINFO = 55  # Linux: first, what is taken by that which has come and was not read, in four bytes
_SLICE_BYTES = 2 << 10  # parsed at once: a slice may hold hundreds of pieces
_TURN_S = 0.002  # for which a connection may keep the event loop
_MAX_PIECES = 1_000_000  # of one body
_SWITCHING_PROTOCOLS = 101  # protocols: the last head that is HTTP's


class ResponseHandler(Protocol):
    """Who waits for an answer.  Each is called while the connection reads, and last `answered` or `broken`."""

    def on_headers(self, status: int, headers: Mapping[str, str]) -> None:
        """An answer begins."""

    def on_body(self, piece: bytes) -> None:
        """More of its body has come."""

    def on_complete(self) -> None:
        """It is whole."""

    def on_failure(self) -> None:
        """It will not be."""

    def on_too_many_pieces(self) -> None:
        """Its body came in more than _MAX_PIECES pieces; the connection is to be closed."""


class ParseTurns:
    """Shares an event loop between the connections whose data take long to parse, such as bodies in tiny pieces.

    Such a connection stops reading.  All of them together have one turn of _TURN_S at a time, and after it everything
    else has the loop for as long.
    """

    def __init__(self) -> None:
        self._waiting: deque[HttpConnection] = deque()
        self._is_scheduled = False

    def add(self, connection: "HttpConnection", after_s: float) -> None:
        """Let a connection parse its next data when its turn comes, not before `after_s`."""
        self._waiting.append(connection)
        self._schedule(after_s)

    def _schedule(self, after_s: float) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(after_s, self._take_turn)

    def _take_turn(self) -> None:
        self._is_scheduled = False
        connection = self._waiting.popleft()
        began_s = time.monotonic()
        if not connection.parse_unparsed():
            self._waiting.append(connection)
        if self._waiting:
            self._schedule(time.monotonic() - began_s)


class HttpConnection(asyncio.Protocol):
    """`keep` is called when it has done with an exchange and may be used for another, `ended` when it is closed."""

    _transport: asyncio.Transport

    def __init__(
        self,
        connected: socket.socket,
        on_reusable: Callable[["HttpConnection"], object],
        on_closed: Callable[["HttpConnection"], object],
        turns: ParseTurns,
    ) -> None:
        self._socket, self._on_reusable, self._on_closed = connected, on_reusable, on_closed
        self._turns = turns
        self._unparsed = bytearray()  # what has come and waits for its turn
        self._is_slow = False  # The response that is being read takes long to parse.
        self._handler: ResponseHandler | None = None
        self._is_bodiless = False  # what is asked for is answered by a head alone
        self.is_closed = False
        self._idle_since_s = 0.0  # monotonic
        self.bytes_received = 0  # and parsed
        self._received_at_body = 0  # of these, when the last of a body had come, or a request left
        self._fields: dict[bytes, bytes] = {}
        self._reset_response()
        self._parser = HttpResponseParser(self)
        # What is odd in an answer and means but one thing is understood: nobody else reads this connection.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_chunked_length=True,
            lenient_data_after_close=True,
            lenient_optional_cr_before_lf=True,
        )

    def _reset_response(self) -> None:
        self._status = 0  # of its last head; 0: none has come
        self._pieces = 0  # of its body
        self._is_slow = False
        self._is_complete = self._is_malformed = self._keep_alive = False

    @property
    def bytes_unsent(self) -> int:
        """Bytes of the request that the system has not taken yet."""
        return self._transport.get_write_buffer_size()

    @property
    def is_idle_too_long(self) -> bool:
        """Whether it has been idle for as long as a server may take to close it."""
        return time.monotonic() - self._idle_since_s >= MAX_IDLE_S

    @property
    def is_reusable(self) -> bool:
        """Whether a request may leave by it: it has not been idle for long, and its other end is open and silent."""
        return not self.is_closed and not self.is_idle_too_long and _is_open_and_silent(self._socket)

    def send_request(self, handler: ResponseHandler, head: bytes, body: bytes, *, is_bodiless: bool) -> None:
        """Send a request; `handler` hears of its answer.  `is_bodiless`: that will have no body, whatever it says."""
        self._handler, self._is_bodiless = handler, is_bodiless
        self._received_at_body = self.bytes_received
        self._reset_response()
        if len(body) < _LARGE_BODY_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    def close(self) -> None:
        """Whoever asks hears no more."""
        self._handler = None
        if not self.is_closed:
            self.is_closed = True
            self._transport.abort()

    # -- called by the loop ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._unparsed:  # TLS gives what it had read before reading was paused.
            self._unparsed += data
        elif self._is_slow:
            self._wait_for_turn(data, 0.0)
        elif len(data) <= _SLICE_BYTES:
            self._parse_slice(data)
        else:
            self._parse(data)

    def parse_unparsed(self) -> bool:
        """Parse what waits, for _TURN_S.  Returns True if nothing is left, and reading goes on."""
        data, self._unparsed = bytes(self._unparsed), bytearray()
        parsed, _ = self._parse_for_a_turn(data)
        if parsed < len(data) and not self.is_closed:
            self._unparsed += data[parsed:]
            return False
        if not self.is_closed:
            self._transport.resume_reading()
        return True

    def _parse(self, data: bytes) -> None:
        parsed, took_s = self._parse_for_a_turn(data)
        if parsed < len(data) and not self.is_closed:
            self._wait_for_turn(data[parsed:], took_s)

    def _wait_for_turn(self, data: bytes, after_s: float) -> None:
        self._is_slow = True
        self._unparsed += data
        self._transport.pause_reading()
        self._turns.add(self, after_s)

    def _parse_for_a_turn(self, data: bytes) -> tuple[int, float]:
        """Parse at least a slice, for _TURN_S.  Returns how many bytes were parsed, and how long (s) that took."""
        began_s, parsed, took_s = time.monotonic(), 0, 0.0
        while not self.is_closed and (not parsed or (parsed < len(data) and took_s < _TURN_S)):
            self._parse_slice(data[parsed : parsed + _SLICE_BYTES])
            parsed, took_s = parsed + _SLICE_BYTES, time.monotonic() - began_s
        return parsed, took_s

    def _parse_slice(self, data: bytes) -> None:
        self.bytes_received += len(data)
        if self._handler is None:  # Nobody has asked.
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self._is_malformed = True
        if self._is_complete:
            self._complete()
        elif self._is_malformed or self.bytes_received - self._received_at_body > _MAX_HEAD_BYTES:
            self._fail()

    def connection_lost(self, error: Exception | None) -> None:
        unparsed, self._unparsed = bytes(self._unparsed), bytearray()
        if unparsed and not self.is_closed:  # Its end may stand there.
            self._parse_slice(unparsed)
        self.is_closed = True
        self._on_closed(self)
        if error is None and self._status and not _has_length(self._fields):
            self._complete()  # Where it says nothing else, an answer ends with its connection.
        else:
            self._fail()

    def _complete(self) -> None:
        handler, self._handler = self._handler, None
        is_reusable = (
            self._keep_alive
            and not self._is_malformed
            and not self.bytes_unsent
            and self._status != _CLOSE_AFTER_STATUS
        )
        if not is_reusable:
            self.close()
        if handler is None:
            return
        if is_reusable:
            self._idle_since_s = time.monotonic()
            self._on_reusable(self)
        handler.on_complete()

    def _fail(self) -> None:
        handler = self._handler
        self.close()
        if handler is not None:
            handler.on_failure()

    # -- called by the parser --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._fields = {}
        self._is_malformed |= self._is_complete  # More has come than was asked for.

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._status:  # What follows a body is not of its head.
            self._fields[name.strip().lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._handler is None or (
            status < 200 and status != _SWITCHING_PROTOCOLS
        ):  # Others are on the way to the last.
            return
        self._status = status
        self._handler.on_headers(status, ResponseHeaders(self._fields))
        if self._is_bodiless or status == _SWITCHING_PROTOCOLS:
            self._is_complete = self._is_malformed = True

    def on_body(self, piece: bytes) -> None:
        self._received_at_body = self.bytes_received
        self._pieces += 1
        if self._handler is None or self._is_complete:
            return
        if self._pieces > _MAX_PIECES:
            self._handler.on_too_many_pieces()
        else:
            self._handler.on_body(piece)

    def on_message_complete(self) -> None:
        if not self._status:  # What is on the way to an answer cannot be the last that comes.
            self._is_malformed |= not self._parser.should_keep_alive()
        elif not self._is_complete:
            self._is_complete, self._keep_alive = True, self._parser.should_keep_alive()


class ResponseHeaders(Mapping[str, str]):
    """Headers by their names, however those are written.  Few of them are ever asked for."""

    def __init__(self, fields: Mapping[bytes, bytes]) -> None:
        """`fields`: their names in small letters."""
        self._fields = fields

    def __getitem__(self, name: str) -> str:
        return self._fields[_header_key(name)].decode("latin-1").strip()

    def get(self, name: str, default: Any = None) -> Any:
        found = self._fields.get(_header_key(name))
        return default if found is None else found.decode("latin-1").strip()

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self._fields)

    def __len__(self) -> int:
        return len(self._fields)


@lru_cache(maxsize=256)
def _header_key(name: str) -> bytes:
    return name.lower().encode("latin-1")


def _is_open_and_silent(connected: socket.socket) -> bool:
    """Whether its other end is open, and has said nothing that was not read.

    To read ahead lets go of the interpreter's lock, which another thread then keeps for longer than all of it takes.
    """
    try:
        if _TCP_INFO is not None:
            state = connected.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)
            return state == _ESTABLISHED and not any(connected.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4))
    except OSError:  # This system does not tell.
        pass
    try:
        connected.recv(1, _PEEK_FLAGS)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _has_length(fields: Mapping[bytes, bytes]) -> bool:
    headers = ResponseHeaders(fields)
    return "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
