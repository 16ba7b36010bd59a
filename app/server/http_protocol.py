"""uvicorn's HTTP protocol with timeouts and limits, for clients that send too much, too slowly, or do not read.

If there are too many connections, the one that has been idle for the longest time is closed; connections with a
complete request are kept if possible.  So a client that holds idle connections loses them to active clients.  Half of
the connections are reserved for clients that have sent a valid key.  If the limit of buffered bytes is reached, a
connection of the owner with the most bytes is closed.
"""

import asyncio
import re
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
from app.server.wsgi import LARGE_HEAD, MAX_HEAD_BYTES, Refusal, validate_head

EXTENSION = "slotkeeper"
"""Key of the extension in an ASGI scope that holds the LimitedHttpProtocol, as "connection"."""
_SHARE = 4  # An owner may hold one fourth of all buffered bytes.
_PARSE_BYTES = 1 << 10  # bytes parsed at once: few bytes may hold many requests, and each uses much more memory
_MAX_UNPARSED_BYTES = 64 << 10  # bytes read ahead from the network
_UNPAUSED_BYTES = 4 << 10  # of responses that the network has not taken
_MAX_FRAMING_BYTES = 64 << 10  # bytes of a chunked body between two pieces of content
DISCARD_S = 5.0  # how long the rest of a refused request is read: else the client may not read the response
# Many clients send a head, and its body just after it.  Both together take less time than one after the other.
_HEAD_END = b"\r\n\r\n"
_HAS_BODY = re.compile(rb"\r\ncontent-length:[ \t]*[1-9]", re.IGNORECASE)
_BODY_FOLLOWS_S = 0.005
_UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})


class ConnectionLimits:
    """Limits the connections and the buffered bytes of this process."""

    def __init__(self, settings: AppSettings, most_connections: int, stop: Callable[[], None]) -> None:
        """`stop` is called when the process begins to stop."""
        self.settings, self.most_connections, self.stop = settings, most_connections, stop
        self.most_bytes = settings.max_buffered_bytes
        self.now: Callable[[], float] = time.monotonic
        # In order of their last activity, the longest idle first.
        self._anonymous: dict[LimitedHttpProtocol, None] = {}
        self._trusted: dict[LimitedHttpProtocol, None] = {}
        self._held: Counter[str] = Counter()
        self.evicted = 0

    def connections(self) -> "list[LimitedHttpProtocol]":
        return [*self._anonymous, *self._trusted]

    def admit(self, connection: "LimitedHttpProtocol") -> None:
        """Add a connection.  If there are too many, another is closed."""
        if len(self._anonymous) + len(self._trusted) >= self.most_connections:
            parts = [self._trusted, self._anonymous]
            candidates = list(
                chain(*(reversed(parts) if len(self._anonymous) >= self.most_connections // 2 else parts))
            )
            self._close(
                next((candidate for candidate in candidates if not candidate.has_complete_request), candidates[0])
            )
        self._anonymous[connection] = None

    def mark_active(self, connection: "LimitedHttpProtocol", *, trusted: bool = False) -> None:
        """Record that the client has just sent data.  `trusted`: it has sent a valid key."""
        if connection in self._trusted or (trusted and connection in self._anonymous):
            self._anonymous.pop(connection, None)
            self._trusted.pop(connection, None)
            self._trusted[connection] = None
        elif connection in self._anonymous:
            del self._anonymous[connection]
            self._anonymous[connection] = None

    def remove(self, connection: "LimitedHttpProtocol") -> None:
        self._anonymous.pop(connection, None)
        self._trusted.pop(connection, None)
        self.release_bytes(connection)

    def reserve_bytes(
        self, connection: "LimitedHttpProtocol", account: str, size: int, *, unlimited: bool = False
    ) -> bool:
        """Reserve `size` more bytes.  Return False if the owner would exceed its share, unless that is `unlimited`."""
        if self._held[account] + size > (self.most_bytes if unlimited else self.most_bytes // _SHARE):
            return False
        connection.account = account
        connection.bytes_held += size
        self._held[account] += size
        while self._held.total() > self.most_bytes:
            largest_owner = self._held.most_common(1)[0][0]
            candidates = [
                other for other in self.connections() if other.account == largest_owner and other is not connection
            ]
            candidates = [other for other in candidates if other.bytes_held and not other.has_complete_request]
            if not candidates:
                break
            self._close(max(candidates, key=lambda other: other.bytes_held))
        return True

    def release_bytes(self, connection: "LimitedHttpProtocol") -> None:
        """Release all bytes that are reserved for a connection."""
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
    """httptools' parser, which ignores a request to upgrade: it parses the request again without those headers.

    A server may ignore an upgrade (RFC 9110, 7.8), but llhttp ends such a message after its head, without the body.
    Data after the message is not read: it may not be HTTP.
    """

    def __init__(self, protocol: HttpToolsProtocol, parser: HttpRequestParser) -> None:
        self._protocol, self._parser = protocol, parser

    @property
    def is_upgrade(self) -> bool:
        """Whether the head that was just parsed must be parsed again."""
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
    """uvicorn's setting `http` names this class.  A request that is refused here never reaches the application."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser: Any = _Parser(self, self.parser)
        application: Any = config.app
        self.limits: ConnectionLimits = application.limits
        self.account, self.bytes_held = "", 0
        self.has_disconnected = self._served_any = False
        self._cycles: deque[Any] = deque()  # requests without a complete response; the first is in progress
        self._unparsed = bytearray()  # received bytes that are not parsed yet
        self._missing = 0  # bytes of the body that are still missing, by its Content-Length
        self._framing = 0  # bytes since the last content
        self._reads_head = self._reads_body = False
        self._since = self.limits.now()  # start of the current phase
        self._unsent = 0  # unsent bytes of the response at the last check
        self._refused: float | None = None  # the time of the refusal
        self._refusal: Refusal | None = None

    @property
    def has_complete_request(self) -> bool:
        """Whether a whole request waits for its response."""
        return bool(self._cycles) and not self._reads_body and not self.flow.write_paused

    @property
    def is_refused(self) -> bool:
        return self._refused is not None

    # -- the transport ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A small response leaves in one write; after more, writing is paused until all data is sent.
        transport.set_write_buffer_limits(high=_UNPAUSED_BYTES, low=0)
        self.limits.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_disconnected = True
        self.limits.remove(self)
        for cycle in self._cycles:  # uvicorn notifies only the last.
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.limits.mark_active(self)
        if self._refused is None:
            is_idle = not self._unparsed and not self._cycles
            self._unparsed += data
            if is_idle and data.find(_HEAD_END) == len(data) - len(_HEAD_END) and _HAS_BODY.search(data):
                self.loop.call_later(_BODY_FOLLOWS_S, self._parse_received)
            else:
                self._parse_received()
        if len(self._unparsed) > _MAX_UNPARSED_BYTES:
            self.flow.pause_reading()

    def resume_writing(self) -> None:
        self._unsent = 0
        super().resume_writing()

    def abort(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        super().shutdown()
        self.limits.stop()

    # -- reading ---------------------------------------------------------------------------------------------------

    def _parse_received(self) -> None:
        """Parse the received bytes, but not beyond a request that waits for its turn."""
        while self._unparsed and not self.pipeline and self._refused is None and not self.transport.is_closing():
            piece = bytes(self._unparsed[: max(_PARSE_BYTES, self._missing)])
            del self._unparsed[: len(piece)]
            self._framing += len(piece)
            super().data_received(piece)
            if self._reads_head and self._framing > MAX_HEAD_BYTES:
                self._refuse(*LARGE_HEAD)
            elif self._reads_body and self._framing > _MAX_FRAMING_BYTES:
                self._refuse(400, "malformed_request", "The chunks of the body have too little content.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"connection": self}}
        self._since, self._framing, self._reads_head = self.limits.now(), 0, True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_head:  # After the body it is a trailer.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.is_upgrade:
            return
        version = self.parser.get_http_version()
        try:
            self._missing = validate_head(version, self.url, self.headers)
        except Refusal as refusal:
            self._refusal = refusal
            raise  # The parser stops here, and uvicorn calls `send_400_response`.
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
        self._since, self._served_any = self.limits.now(), True
        self._parse_received()

    # -- refusing --------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, code: str, detail: str) -> None:
        self._refusal = Refusal(status, code, detail)
        self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Refuse the request that is being read, and read nothing more.

        If earlier requests wait for their responses, the connection is closed after those.
        """
        if self._refused is not None:
            return
        self._refused = self.limits.now()
        self._unparsed.clear()
        if self._cycles:
            if self.pipeline or self.cycle.response_started or not self._reads_body:
                self.cycle.keep_alive = False
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        refusal = self._refusal or Refusal(400, "malformed_request", "This is not a request of HTTP/1.1.")
        self.transport.write(refusal.as_http())
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    # -- time ------------------------------------------------------------------------------------------------------

    def check_timeouts(self, now_s: float) -> None:
        """Close the connection if a phase takes too long.  Called about once a second."""
        settings = self.limits.settings
        if self.flow.write_paused:
            left = self.transport.get_write_buffer_size()
            if not self._unsent or left <= self._unsent - settings.body_min_rate:
                self._unsent, self._since = left, now_s
            elif now_s - self._since > settings.send_timeout_s:
                self.abort()
        elif self._cycles:
            return  # The application limits the time of a request.
        elif self._refused is not None:
            if now_s - self._refused > DISCARD_S:
                self.abort()
        elif now_s - self._since > (
            settings.keep_alive_s if self._served_any and not self._reads_head else settings.head_timeout_s
        ):
            if self._reads_head:
                self._refuse(408, "request_too_slow", "The request did not arrive in time; nothing was done.")
            else:
                self.abort()
