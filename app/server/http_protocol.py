"""uvicorn's HTTP protocol with deadlines and bounds for what a client sends, and leaves unsent and unread.

Where there is no room for a connection, the one that has been silent for longest is closed; one whose request is being
answered stays.  So a client that holds connections without using them loses them to those that do.  Half of the places
is for connections that have shown a valid key.  Where there is no room for bytes, the owner that holds most gives way.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import chain
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from app.config import AppSettings
from app.server.wsgi import LARGE_HEAD, LONGEST_HEAD, Refusal, validate_head

EXTENSION = "slotkeeper"
"""In a scope's extensions: its Connection, as "connection"."""
_SHARE = 4  # An owner may hold one fourth of all bytes.
_PARSE_BYTES = 1 << 10  # bytes parsed at once: many requests fit into few bytes, and each holds far more
_MAX_UNPARSED_BYTES = 64 << 10  # bytes read from the network before their turn
_LONGEST_FRAMING = 64 << 10  # bytes of a chunked body that are no content, before it goes on
_DISCARD_S = 5.0  # A client whose request is refused may send the rest: else it may never read why.
_UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})
_HALF_CLOSED_S = 5.0  # for which a client that sends no more may wait: that cannot be told from one that has left


class ConnectionLimits:
    """The connections and the bytes that this process holds."""

    def __init__(self, settings: AppSettings, most_connections: int, stop: Callable[[], None]) -> None:
        """`stop` is called when the process begins to stop."""
        self.settings, self.most_connections, self.stop = settings, most_connections, stop
        self.most_bytes = settings.max_buffered_bytes
        self.now: Callable[[], float] = time.monotonic
        # In each the connection that has been silent for longest comes first.
        self._strangers: dict[LimitedHttpProtocol, None] = {}
        self._trusted: dict[LimitedHttpProtocol, None] = {}
        self._held: Counter[str] = Counter()
        self.evicted = 0

    def connections(self) -> "list[LimitedHttpProtocol]":
        return [*self._strangers, *self._trusted]

    def admit(self, new: "LimitedHttpProtocol") -> None:
        """Take a new connection in; another gives way if there is no room."""
        if len(self._strangers) + len(self._trusted) >= self.most_connections:
            parts = [self._trusted, self._strangers]
            there = list(chain(*(reversed(parts) if len(self._strangers) >= self.most_connections // 2 else parts)))
            self._close(next((one for one in there if not one.has_complete_request), there[0]))
        self._strangers[new] = None

    def mark_active(self, connection: "LimitedHttpProtocol", *, trusted: bool = False) -> None:
        """Its client has just sent something, or shown a valid key."""
        if connection in self._trusted or (trusted and connection in self._strangers):
            self._strangers.pop(connection, None)
            self._trusted.pop(connection, None)
            self._trusted[connection] = None
        elif connection in self._strangers:
            del self._strangers[connection]
            self._strangers[connection] = None

    def remove(self, connection: "LimitedHttpProtocol") -> None:
        self._strangers.pop(connection, None)
        self._trusted.pop(connection, None)
        self.release_bytes(connection)

    def reserve_bytes(self, connection: "LimitedHttpProtocol", account: str, size: int, *, whole: bool = False) -> bool:
        """Keep `size` bytes more for it.  Return False where its owner holds its share; `whole`: it may hold all."""
        if self._held[account] + size > (self.most_bytes if whole else self.most_bytes // _SHARE):
            return False
        connection.account = account
        connection.bytes_held += size
        self._held[account] += size
        while self._held.total() > self.most_bytes:
            greediest = self._held.most_common(1)[0][0]
            holding = [it for it in self.connections() if it.account == greediest and it is not connection]
            holding = [it for it in holding if it.bytes_held and not it.has_complete_request]
            if not holding:
                break
            self._close(max(holding, key=lambda it: it.bytes_held))
        return True

    def release_bytes(self, connection: "LimitedHttpProtocol") -> None:
        """Nothing is kept for it any more."""
        if connection.bytes_held:
            self._held[connection.account] -= connection.bytes_held
            connection.bytes_held = 0
            if not self._held[connection.account]:
                del self._held[connection.account]

    def _close(self, connection: "LimitedHttpProtocol") -> None:
        self.evicted += 1
        self.remove(connection)
        connection.abort()


class _Parser:
    """httptools' parser, which reads a request to upgrade once more without that request.

    A server may ignore it (RFC 9110, 7.8); llhttp ends such a message behind its head, and leaves out the body.  What
    follows the message is not read: it may be no HTTP.
    """

    def __init__(self, protocol: HttpToolsProtocol, parser: HttpRequestParser) -> None:
        self._protocol, self._parser = protocol, parser

    @property
    def is_upgrade(self) -> bool:
        """Whether the head that was just read is one to be read again."""
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            if not self.is_upgrade:
                raise
            version = self._parser.get_http_version().encode()
            line = b"%b %b HTTP/%b\r\n" % (self._parser.get_method(), self._protocol.url, version)
            kept = (b"%b: %b\r\n" % header for header in self._protocol.headers if header[0] not in _UPGRADE_HEADERS)
            self._parser = HttpRequestParser(self._protocol)
            self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._parser.feed_data(b"".join((line, *kept, b"connection: close\r\n\r\n")) + data[upgrade.args[0] :])

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return self._parser.should_upgrade()


class LimitedHttpProtocol(HttpToolsProtocol):
    """Given to uvicorn by its setting `http`.  A request that is refused here never reaches the application."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser: Any = _Parser(self, self.parser)
        application: Any = config.app
        self.capacity: ConnectionLimits = application.capacity
        self.account, self.bytes_held = "", 0
        self.waits_for_event = False  # Its request waits for something else than a thread.
        self.half_closed: float | None = None  # since when
        self._gone = self._served_any = False
        self._cycles: deque[Any] = deque()  # requests without a complete response; the first is being answered
        self._ahead = bytearray()  # what has come and is not parsed yet
        self._missing = 0  # bytes of the body that surely are still to come
        self._framing = 0  # bytes since the last that were content
        self._reads_head = self._reads_body = False
        self._since = self.capacity.now()  # of the present phase
        self._unsent = 0  # bytes of the response, when that was looked at last
        self._refused: float | None = None  # since when
        self._refusal: Refusal | None = None

    @property
    def has_complete_request(self) -> bool:
        """Whether a whole request waits for its response."""
        return bool(self._cycles) and not self._reads_body and not self.flow.write_paused

    @property
    def has_disconnected(self) -> bool:
        """Whether nobody waits for the response, as far as can be told."""
        now = self.capacity.now()
        return self._gone or (self.half_closed is not None and now - self.half_closed > _HALF_CLOSED_S)

    @property
    def is_refused(self) -> bool:
        return self._refused is not None

    # -- the transport ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)  # The flow is paused until all is sent.
        self.capacity.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self.capacity.remove(self)
        for cycle in self._cycles:  # uvicorn tells only the last.
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.capacity.mark_active(self)
        if self._refused is None:
            self._ahead += data
            self._read_on()
        if len(self._ahead) > _MAX_UNPARSED_BYTES:
            self.flow.pause_reading()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more.  Keep the connection open for the response, if the request is whole."""
        self.half_closed = self.capacity.now()
        self._end_if_half_closed()
        return not self.waits_for_event and not self.transport.is_closing() and self.scheme == "http"

    def _end_if_half_closed(self) -> None:
        if self.half_closed is not None and not self._ahead:
            if self._reads_head or self._reads_body:
                self._refuse(400, "incomplete_body", "The request broke off; nothing was done.  Send it again.")
            elif not self._cycles:
                self.transport.close()

    def resume_writing(self) -> None:
        self._unsent = 0
        super().resume_writing()

    def abort(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        super().shutdown()
        self.capacity.stop()

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        """Parse what has come, but nothing behind a request that waits for its turn."""
        while self._ahead and not self.pipeline and self._refused is None and not self.transport.is_closing():
            piece = bytes(self._ahead[: max(_PARSE_BYTES, self._missing)])
            del self._ahead[: len(piece)]
            self._framing += len(piece)
            super().data_received(piece)
            if self._reads_head and self._framing > LONGEST_HEAD:
                self._refuse(*LARGE_HEAD)
            elif self._reads_body and self._framing > _LONGEST_FRAMING:
                self._refuse(400, "malformed_request", "Its chunks hold next to nothing.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"connection": self}}
        self._since, self._framing, self._reads_head = self.capacity.now(), 0, True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_head:  # Behind the body it is a trailer.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.is_upgrade:
            return
        version = self.parser.get_http_version()
        try:
            self._missing = validate_head(version, self.url, self.headers)
        except Refusal as refusal:
            self._refusal = refusal
            raise  # The parser stops here, and has `send_400_response` called.
        self._framing, self._reads_head, self._reads_body = 0, False, True
        self.expect_100_continue = self.expect_100_continue and version == "1.1"
        super().on_headers_complete()
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._framing = 0
        self._missing -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.is_upgrade:
            return
        self._framing, self._reads_body = 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._cycles.popleft()
        super().on_response_complete()
        self._since, self._served_any = self.capacity.now(), True
        self._read_on()
        self._end_if_half_closed()

    # -- refusing --------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, code: str, detail: str) -> None:
        self._refusal = Refusal(status, code, detail)
        self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Answer the request that is being read with a refusal, and read nothing more.

        Where requests before it wait for their responses, the connection is closed after them.
        """
        if self._refused is not None:
            return
        self._refused = self.capacity.now()
        self._ahead.clear()
        if self._cycles:
            if self.pipeline or self.cycle.response_started or not self._reads_body:
                self.cycle.keep_alive = False
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        refusal = self._refusal or Refusal(400, "malformed_request", "This is no HTTP/1.1.")
        self.transport.write(refusal.as_http())
        if self.transport.can_write_eof() and self.half_closed is None:
            self.transport.write_eof()
        else:
            self.transport.close()

    # -- time ------------------------------------------------------------------------------------------------------

    def check_timeouts(self, now_s: float) -> None:
        """Close what takes too long.  Called about every second."""
        settings = self.capacity.settings
        if self.flow.write_paused:
            left = self.transport.get_write_buffer_size()
            if not self._unsent or left <= self._unsent - settings.body_min_rate:
                self._unsent, self._since = left, now_s
            elif now_s - self._since > settings.send_timeout_s:
                self.abort()
        elif self._cycles:
            if self.waits_for_event and self.has_disconnected:
                self.abort()
        elif self._refused is not None:
            if now_s - self._refused > _DISCARD_S:
                self.abort()
        elif now_s - self._since > (
            settings.keep_alive_s if self._served_any and not self._reads_head else settings.head_timeout_s
        ):
            if self._reads_head:
                self._refuse(408, "request_too_slow", "The request did not arrive in time; nothing was done.")
            else:
                self.abort()
