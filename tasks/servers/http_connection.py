"""An HTTP/1.1 connection to a server, in an event loop: it carries one exchange after another.

httptools parses the responses, and a ResponseHandler receives their parts.  A connection is closed and never reused if
the server sends data that was not requested, or if the end of a response is uncertain.

A server may send megabytes in pieces of two bytes, and each piece takes as long as a large one.  So two things are
bounded: the time that one connection occupies the event loop (ParseTurns), and the number of pieces of a body.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from tasks.servers.responses import has_explicit_length

# A server may close an idle connection at the moment when a request is sent on it.  Whether it has read the request is
# then unknown, and an UNKNOWN outcome holds the slot.  `is_reusable` detects a connection that is closed already.  The
# limit avoids the rest of the race: it is below the idle time that common servers allow (gunicorn 2 s, uvicorn and node
# 5 s).
MAX_IDLE_S = 1.5
# uvicorn, and so every FastAPI, closes the connection a moment after a 500 and does not announce it.  The slot's next
# request would be sent at that moment.
_CLOSE_AFTER_STATUS = 500
_MAX_HEAD_BYTES = 256 * 1024  # bytes of a head, of all that stands between two pieces of a body, and of its trailers
_LARGE_BODY_BYTES = 64 * 1024  # bytes: the body of a request from this size on is not copied behind its head
_PEEK_FLAGS = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_TCP_INFO = getattr(socket, "TCP_INFO", None)  # Linux: the first byte is the state of the connection
_ESTABLISHED = b"\x01"
_SO_MEMINFO = 55  # Linux: the first four bytes are the memory that received, unread data take
_SLICE_BYTES = 2 << 10  # bytes that are parsed at once; they may contain hundreds of pieces
_TURN_S = 0.002  # seconds that a connection may occupy the event loop
_MAX_PIECES = 1_000_000  # of one body
_SWITCHING_PROTOCOLS = 101  # What follows this head is not HTTP.


class ResponseHandler(Protocol):
    """Receives a response while the connection reads it.  The last call is one of the last three."""

    def on_headers(self, status: int, headers: Mapping[str, str]) -> None:
        """Handle the head of the response.  `headers`: by names in lower case."""

    def on_body(self, piece: bytes) -> None:
        """Handle a piece of its body."""

    def on_complete(self) -> None:
        """Handle the end of a complete response."""

    def on_failure(self) -> None:
        """Handle the end of the connection before the response was complete."""

    def on_too_many_pieces(self) -> None:
        """Close the connection: the body has more than _MAX_PIECES pieces."""


class ParseTurns:
    """Shares an event loop between connections whose data take long to parse, such as bodies in tiny pieces.

    Such a connection stops reading and waits for its turn.  One connection parses at a time, for _TURN_S; then the loop
    has as much time for everything else.
    """

    def __init__(self) -> None:
        self._waiting: deque[HttpConnection] = deque()
        self._is_scheduled = False

    def add(self, connection: "HttpConnection", after_s: float) -> None:
        """Queue a connection: it parses its data when its turn comes, in `after_s` at the earliest."""
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
    """A connection of an HttpClient.

    on_reusable: called when it can carry another exchange.  on_closed: called when it was closed.
    """

    _transport: asyncio.Transport

    def __init__(
        self,
        sock: socket.socket,
        on_reusable: Callable[["HttpConnection"], object],
        on_closed: Callable[["HttpConnection"], object],
        turns: ParseTurns,
    ) -> None:
        self._socket, self._on_reusable, self._on_closed = sock, on_reusable, on_closed
        self._turns = turns
        self._unparsed = bytearray()  # received data that wait for the connection's turn
        self._is_slow = False  # The current response takes long to parse.
        self._handler: ResponseHandler | None = None
        self._is_bodiless = False  # The response has no body, whatever its headers say.
        self.is_closed = False
        self._idle_since_s = 0.0  # monotonic
        self.last_received_s = 0.0  # monotonic; when the request was sent, if nothing was received since
        self.bytes_received = 0  # without those that are not parsed yet
        self._received_at_body = 0  # `bytes_received` at the last piece of a body, or when the request was sent
        self._headers: dict[str, str] = {}  # by names in lower case
        self._reset_response()
        self._parser = HttpResponseParser(self)
        # Faults that have only one meaning are accepted: no proxy parses this connection in another way.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_chunked_length=True,
            lenient_data_after_close=True,
            lenient_optional_cr_before_lf=True,
        )

    def _reset_response(self) -> None:
        self._status = 0  # of the final head; 0: it was not received
        self._pieces = 0  # of the body
        self._is_slow = False
        self._is_complete = self._is_malformed = self._keep_alive = False

    @property
    def bytes_unsent(self) -> int:
        """Return the number of bytes of the request that the operating system has not accepted yet."""
        return self._transport.get_write_buffer_size()

    @property
    def is_idle_too_long(self) -> bool:
        """Return whether it was idle for so long that its server may be about to close it."""
        return time.monotonic() - self._idle_since_s >= MAX_IDLE_S

    @property
    def is_reusable(self) -> bool:
        """Return whether it can carry a request: it was not idle for long, and its server is connected and silent."""
        # Unrequested data would be read as the next response, also data that wait for their turn.
        if self.is_closed or self.is_idle_too_long or self._unparsed:
            return False
        return _is_open_and_silent(self._socket)

    def send_request(self, handler: ResponseHandler, head: bytes, body: bytes, *, is_bodiless: bool) -> None:
        """Send a request; `handler` receives the response.

        is_bodiless: the response has no body, whatever its headers say.
        """
        self._handler, self._is_bodiless = handler, is_bodiless
        self._received_at_body, self.last_received_s = self.bytes_received, time.monotonic()
        self._reset_response()
        if len(body) < _LARGE_BODY_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    def close(self) -> None:
        """Close the connection.  Its handler is not called again."""
        self._handler = None
        if not self.is_closed:
            self.is_closed = True
            self._transport.abort()

    # -- called by the event loop ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._unparsed:  # Reading is paused, but TLS passes on what it had read before.
            self._unparsed += data
        elif self._is_slow:
            self._wait_for_turn(data, 0.0)
        elif len(data) <= _SLICE_BYTES:
            self._parse_slice(data)
        else:
            self._parse(data)

    def parse_unparsed(self) -> bool:
        """Parse waiting data for _TURN_S.  Return True if none is left; then reading is resumed."""
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
        """Parse for _TURN_S, at least one slice.  Return the number of parsed bytes and the seconds that it took."""
        began_s, parsed, took_s = time.monotonic(), 0, 0.0
        while not self.is_closed and (not parsed or (parsed < len(data) and took_s < _TURN_S)):
            self._parse_slice(data[parsed : parsed + _SLICE_BYTES])
            parsed, took_s = parsed + _SLICE_BYTES, time.monotonic() - began_s
        return parsed, took_s

    def _parse_slice(self, data: bytes) -> None:
        self.bytes_received += len(data)
        self.last_received_s = time.monotonic()
        if self._handler is None:  # The server sends data without a request.
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
        if unparsed and not self.is_closed:  # They may contain the end of the response.
            self._parse_slice(unparsed)
        self.is_closed = True
        self._on_closed(self)
        if error is None and self._status and not has_explicit_length(self._headers):
            self._complete()  # A response without a length ends with its connection.
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
        if is_reusable:  # The connection returns to the client first, so that the next request can use it.
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
        self._headers = {}
        self._is_malformed |= self._is_complete  # The server sends a second response.

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._status:  # Fields after the body (trailers) are not headers.
            self._headers[name.decode("latin-1").strip().lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        # An interim response (1xx) is followed by the final one.
        if self._handler is None or (status < 200 and status != _SWITCHING_PROTOCOLS):
            return
        self._status = status
        self._handler.on_headers(status, self._headers)
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
        if not self._status:  # An interim response must not close the connection: the final one follows.
            self._is_malformed |= not self._parser.should_keep_alive()
        elif not self._is_complete:
            self._is_complete, self._keep_alive = True, self._parser.should_keep_alive()


def _is_open_and_silent(sock: socket.socket) -> bool:
    """Return whether the server has not closed the connection, and no received data are unread.

    By socket options where the system has them: recv releases the interpreter's lock, and another thread then keeps it
    for longer than the rest of the check takes.
    """
    try:
        if _TCP_INFO is not None:
            state = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)
            return state == _ESTABLISHED and not any(sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4))
    except OSError:  # The system does not have these options.
        pass
    try:
        sock.recv(1, _PEEK_FLAGS)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
