"""HTTP/1.1 by the standard library's http.server: keep-alive, one thread per connection.

A thread per connection, not a pool: a health check never waits for a thread that a run has taken.
"""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from slotkeeper.serve.logs import log_failure

IDLE_S = 600.0  # long: a client that reuses a connection just as it is closed cannot tell whether its job runs
_LINGER_S = 2.0
_POLL_S = 0.1  # until a server that is closed stops to accept
_ONCE = ("Content-Length", "Host", "Origin", "Content-Type")


@dataclass(slots=True)
class Request:
    """`path` is without the query, still percent-encoded; names of `headers` are in small letters.

    `takes_chunks`: its answer may come in pieces.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    takes_chunks: bool = True


@dataclass(slots=True)
class Response:
    """`body` is JSON.  `events`: in its place, server-sent events, sent as they come."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    events: Iterator[bytes] | None = None


Handler = Callable[[Request], Response]
Refusal = Callable[[int, str], Response]


class HttpServer(ThreadingHTTPServer):
    """Listens from the start on; answers after `start()`.  Raises OSError when the address cannot be had."""

    request_queue_size = 1024

    def __init__(self, host: str, port: int, handle: Handler, refuse: Refusal, max_body_bytes: int) -> None:
        self.handle, self.refuse, self.max_body_bytes = handle, refuse, max_body_bytes
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connections: set[Any] = set()
        self._answered = threading.Condition()
        self._under_way = 0
        super().__init__((host, port), _Connection)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="accept", daemon=True).start()

    def wait_answered(self, timeout_s: float) -> bool:
        """Wait until no request is under way; False when one still is after `timeout_s`."""
        with self._answered:
            return self._answered.wait_for(lambda: not self._under_way, max(0.0, timeout_s))

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count a request, from the last byte of it to the last byte of its answer."""
        with self._answered:
            self._under_way += 1
        try:
            yield
        finally:
            with self._answered:
                self._under_way -= 1
                self._answered.notify_all()

    def close(self) -> None:
        """Take no more connections and hang up on those there are."""
        self.shutdown()
        self.server_close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong, unless the client went away: what it started goes on, and can be asked for again."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            log_failure("a connection", error)


class _Connection(BaseHTTPRequestHandler):
    """One client, one request after the other."""

    server: HttpServer
    protocol_version = default_request_version = "HTTP/1.1"
    server_version, sys_version = "slotkeeper.serve", ""
    timeout = IDLE_S
    disable_nagle_algorithm = True
    wbufsize = -1  # An answer leaves in one packet.

    def handle_expect_100(self) -> bool:
        goes_on = super().handle_expect_100()
        self.wfile.flush()
        return goes_on

    def do_GET(self) -> None:
        if any(len(self.headers.get_all(name, ())) > 1 for name in _ONCE) or self.headers.defects:
            self.send_error(HTTPStatus.BAD_REQUEST, "the headers can be read in two ways")
        elif "Transfer-Encoding" in self.headers:
            self.send_error(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length; Transfer-Encoding is not read here")
        elif not (length := self.headers.get("Content-Length", "0")).isascii() or not length.isdigit():
            self.send_error(HTTPStatus.BAD_REQUEST, "Content-Length must be a number of bytes")
        elif len(length) > 15 or int(length) > self.server.max_body_bytes:
            error = f"the body is larger than {self.server.max_body_bytes} bytes"
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error)
        else:
            self._answer(self.rfile.read(int(length)))

    do_POST = do_PUT = do_DELETE = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request that this server reads, in JSON; the connection ends with the answer."""
        self.close_connection = True
        self._send(self.server.refuse(int(code), message or HTTPStatus(code).description))
        self._linger()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _answer(self, body: bytes) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        takes_chunks = self.request_version == "HTTP/1.1"
        request = Request(self.command, self.path.partition("?")[0], headers, body, takes_chunks)
        with self.server.under_way():
            try:
                response = self.server.handle(request)
            except Exception as error:
                log_failure(f"{request.method!r} {request.path!r}", error)
                response = self.server.refuse(500, "the server has a bug; its log says more")
            self._send(response)

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        for name, value in response.headers:
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        if response.events is None:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)
        else:
            self._send_events(response.events)
        self.wfile.flush()

    def _send_events(self, events: Iterator[bytes]) -> None:
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for event in events:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _linger(self) -> None:
        """Read what the client is still sending, or the system resets the connection and our answer is lost."""
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(_LINGER_S)
        deadline = time.monotonic() + _LINGER_S
        with suppress(OSError):
            while self.connection.recv(1 << 20) and time.monotonic() < deadline:
                pass
