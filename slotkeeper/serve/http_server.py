"""HTTP/1.1 server based on the standard library's http.server: keep-alive, one thread per connection.

There is no thread pool, so a health check never waits for a thread in which a run is executed.
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

# Long: a client that reuses a connection while the server closes it does not know whether its job is running.
IDLE_S = 600.0
_DISCARD_S = 2.0  # how long the rest of a refused request is read
_SHUTDOWN_POLL_S = 0.1  # how often the accept loop checks whether the server was closed
_SINGLE_HEADERS = ("Content-Length", "Host", "Origin", "Content-Type")  # headers that a request may have only once


@dataclass(slots=True)
class Request:
    """An HTTP request.

    `path` has no query string and is still percent-encoded.  Header names are in lower case.
    `takes_chunks`: the client understands a chunked response.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    takes_chunks: bool = True


@dataclass(slots=True)
class Response:
    """An HTTP response.  `body` is JSON.  If `events` is set, the server streams these server-sent events instead."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    events: Iterator[bytes] | None = None


Handler = Callable[[Request], Response]
Refusal = Callable[[int, str], Response]


class HttpServer(ThreadingHTTPServer):
    """An HTTP server that listens once it is created, and accepts connections after `start()`.

    Raises OSError if it cannot bind the address.
    """

    request_queue_size = 1024

    def __init__(self, host: str, port: int, handle: Handler, refuse: Refusal, max_body_bytes: int) -> None:
        self.handle, self.refuse, self.max_body_bytes = handle, refuse, max_body_bytes
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connections: set[Any] = set()
        self._answered = threading.Condition()
        self._in_progress = 0
        super().__init__((host, port), _Connection)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(_SHUTDOWN_POLL_S,), name="accept", daemon=True).start()

    def wait_answered(self, timeout_s: float) -> bool:
        """Wait until no request is in progress.  Returns False if one still is after `timeout_s`."""
        with self._answered:
            return self._answered.wait_for(lambda: not self._in_progress, max(0.0, timeout_s))

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count a request as in progress, from the last byte of the request to the last byte of its response."""
        with self._answered:
            self._in_progress += 1
        try:
            yield
        finally:
            with self._answered:
                self._in_progress -= 1
                self._answered.notify_all()

    def close(self) -> None:
        """Stop accepting connections and close the open ones."""
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
        """Log the current exception, unless the client has disconnected.

        A disconnect is no error: the run continues, and the client can request its result later.
        """
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            log_failure("a connection", error)


class _Connection(BaseHTTPRequestHandler):
    """One client connection, which handles one request after the other."""

    server: HttpServer
    protocol_version = default_request_version = "HTTP/1.1"
    server_version, sys_version = "slotkeeper.serve", ""
    timeout = IDLE_S
    disable_nagle_algorithm = True
    wbufsize = -1  # buffered, so that headers and body leave in one packet

    def handle_expect_100(self) -> bool:
        should_continue = super().handle_expect_100()
        self.wfile.flush()  # the client sends the body only after it has received this response
        return should_continue

    def do_GET(self) -> None:
        if any(len(self.headers.get_all(name, ())) > 1 for name in _SINGLE_HEADERS) or self.headers.defects:
            self.send_error(HTTPStatus.BAD_REQUEST, "the headers can be read in two ways")
        elif "Transfer-Encoding" in self.headers:
            self.send_error(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length; Transfer-Encoding is not read here")
        elif not (length := self.headers.get("Content-Length", "0")).isascii() or not length.isdigit():
            self.send_error(HTTPStatus.BAD_REQUEST, "Content-Length must be a number of bytes")
        elif len(length) > 15 or int(length) > self.server.max_body_bytes:
            error = f"the body is larger than {self.server.max_body_bytes} bytes"
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error)
        else:
            self._respond(self.rfile.read(int(length)))

    do_POST = do_PUT = do_DELETE = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error for a request that cannot be read, as JSON, and close the connection."""
        self.close_connection = True
        self._send(self.server.refuse(int(code), message or HTTPStatus(code).description))
        self._discard_input()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, instead of one line per request."""

    def _respond(self, body: bytes) -> None:
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

    def _discard_input(self) -> None:
        """Read and discard the rest of the request before the connection is closed.

        With unread data the system would reset the connection, and the client could lose the response.
        """
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(_DISCARD_S)
        deadline = time.monotonic() + _DISCARD_S
        with suppress(OSError):
            while self.connection.recv(1 << 20) and time.monotonic() < deadline:
                pass
