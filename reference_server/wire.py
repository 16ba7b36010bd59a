"""HTTP/1.1, as much of it as the protocol needs: keep-alive, Content-Length, one thread per connection.

Why no framework: the CPU of the server per call that only echoes, with one and with eight connections on two cores,
was 140 to 170 µs for Flask on granian, 25 to 70 for bare WSGI on granian, 65 to 90 for http.server (whose headers go
through the e-mail parser) and 20 to 45 for this (28 to 52 with the engine), in one process of half the memory.  One
process also means that a signal, the slots and the journal have one owner.  A thread per connection, not a pool:
a health check never waits for a thread that some run has taken.

What it refuses, in JSON: Transfer-Encoding (411), too large a body (413) or head (431), anything malformed (400).
An answer leaves in one packet with TCP_NODELAY set; in two, Nagle's algorithm and delayed acknowledgement would
cost 40 ms each time.
"""

import contextlib
import logging
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

from reference_server.logs import failed

log = logging.getLogger("reference_server")

MAX_HEAD_BYTES = 32 << 10
IDLE_S = 600.0  # long: a client that reuses a connection just as it is closed cannot tell whether its job runs
READ_S = 30.0  # between two pieces of one request
LINGER_S = 2.0
BACKLOG = 1024
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# A line feed or another control character in a value would be the end of the line for somebody else.
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")
_ONCE = frozenset({"content-length", "transfer-encoding", "host", "origin", "content-type"})
REASONS = {int(status): status.phrase for status in HTTPStatus}


@dataclass(slots=True)
class Request:
    """`path` is without the query, still percent-encoded; names of `headers` are in small letters.

    `takes_chunks`: its answer may come in pieces.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    keep_alive: bool
    takes_chunks: bool = True


@dataclass(slots=True)
class Response:
    """`body` is JSON.  `events`: in its place, server-sent events, sent as they come."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    events: Iterator[bytes] | None = None


class Malformed(Exception):
    """The bytes are no request that this server reads; the connection ends with the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


Handler = Callable[[Request], Response]
Refusal = Callable[[int, str], Response]


class HttpServer:
    """Listens from the start on; answers after `start()`.  Raises OSError when the address cannot be had."""

    def __init__(self, host: str, port: int, handle: Handler, refuse: Refusal, max_body_bytes: int) -> None:
        self.handle, self.refuse, self.max_body_bytes = handle, refuse, max_body_bytes
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._connections: set[Connection] = set()
        self._answered = threading.Condition()
        self.draining = False

    def start(self) -> None:
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def wait_answered(self, timeout_s: float) -> bool:
        """Wait until no request is under way; False when one still is after `timeout_s`."""
        self.draining = True  # before the look below: whoever ends later sees it, and wakes us
        with self._answered:
            return self._answered.wait_for(self._nothing_under_way, max(0.0, timeout_s))

    def close(self) -> None:
        """Take no more connections and hang up on those there are."""
        self._wake.send(b"x")
        for connection in list(self._connections):
            connection.hang_up()

    def ended(self, connection: "Connection") -> None:
        self._connections.discard(connection)

    def answered(self) -> None:
        with self._answered:
            self._answered.notify_all()

    def _nothing_under_way(self) -> bool:
        return not any(connection.busy for connection in list(self._connections))

    def _accept(self) -> None:
        with selectors.DefaultSelector() as ready, self._listener, self._woken:
            ready.register(self._listener, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while True:
                if any(key.fileobj is self._woken for key, _ in ready.select()):
                    return
                self._accept_one()

    def _accept_one(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # the client went away meanwhile
        except OSError as error:  # no file descriptor left: some connection must end first
            log.error("cannot accept: %s", error)
            time.sleep(0.1)
            return
        connection = Connection(sock, self)
        self._connections.add(connection)
        try:
            threading.Thread(target=connection.serve, name="connection", daemon=True).start()
        except RuntimeError:  # no thread left
            self.ended(connection)
            sock.close()


class Connection:
    """One client, one request after the other."""

    def __init__(self, sock: socket.socket, server: HttpServer) -> None:
        self._sock, self._server = sock, server
        self._buffer = b""
        self.busy = False  # from the last byte of a request to the last byte of its answer

    def serve(self) -> None:
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.settimeout(IDLE_S)
            while self._serve_one():
                pass
        except OSError:
            pass  # gone, or silent for too long: what it started goes on, and can be asked for again
        finally:
            self._sock.close()
            self._server.ended(self)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _serve_one(self) -> bool:
        """False: nothing more will come."""
        try:
            request = self._read()
        except Malformed as error:
            self._send(self._server.refuse(error.status, error.message), keep_alive=False)
            self._linger()
            return False
        if request is None:
            return False
        try:
            self._send(self._answer(request), request.keep_alive)
        finally:
            self.busy = False
            if self._server.draining:
                self._server.answered()
        return request.keep_alive

    def _answer(self, request: Request) -> Response:
        try:
            return self._server.handle(request)
        except Exception as error:
            failed(f"{request.method!r} {request.path!r}", error)
            return self._server.refuse(500, "the server has a bug; its log says more")

    def _read(self) -> Request | None:
        head = self._read_head()
        if head is None:
            return None
        method, path, version, headers = parse_head(head)
        length = body_length(headers, self._server.max_body_bytes)
        if headers.get("expect", "").lower() == "100-continue" and len(self._buffer) < length:
            self._sock.sendall(CONTINUE)
        body = self._read_body(length)
        self.busy = True
        keep_alive = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        return Request(method, path.partition("?")[0], headers, body, keep_alive, version == "HTTP/1.1")

    def _read_head(self) -> str | None:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise Malformed(431, "the headers are too long")
            if not self._receive():
                return None
        head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
        if len(head) > MAX_HEAD_BYTES:
            raise Malformed(431, "the headers are too long")
        return head.decode("latin-1")

    def _read_body(self, length: int) -> bytes:
        if len(self._buffer) < length:
            self._receive_rest(length)
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return body

    def _receive(self) -> bool:
        if self._buffer:  # in the middle of a request
            self._sock.settimeout(READ_S)
        piece = self._sock.recv(65536)
        if self._buffer:
            self._sock.settimeout(IDLE_S)
        self._buffer += piece
        return bool(piece)

    def _receive_rest(self, length: int) -> None:
        pieces, missing = [self._buffer], length - len(self._buffer)
        self._sock.settimeout(READ_S)
        while missing > 0:
            piece = self._sock.recv(min(missing, 1 << 20))
            if not piece:
                raise ConnectionError("the client went away in the middle of a body")
            pieces.append(piece)
            missing -= len(piece)
        self._sock.settimeout(IDLE_S)
        self._buffer = b"".join(pieces)

    def _send(self, response: Response, keep_alive: bool) -> None:
        if response.events is None:
            self._sock.sendall(head_of(response, keep_alive) + response.body)
            return
        self._sock.sendall(head_of(response, keep_alive))
        for event in response.events:
            self._sock.sendall(b"%x\r\n%b\r\n" % (len(event), event))
        self._sock.sendall(b"0\r\n\r\n")

    def _linger(self) -> None:
        """Read what the client is still sending, or the system resets the connection and our answer is lost."""
        self._sock.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + LINGER_S
        self._sock.settimeout(LINGER_S)
        with contextlib.suppress(OSError):
            while self._sock.recv(1 << 20) and time.monotonic() < deadline:
                pass


def parse_head(head: str) -> tuple[str, str, str, dict[str, str]]:
    """Method, target, version, headers.  Raises Malformed."""
    lines = head.split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0") or not parts[1].startswith("/"):
        raise Malformed(400, "this is no HTTP/1.1 request")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise Malformed(400, "a header is malformed")
        name = found[1].lower()
        if name in headers and name in _ONCE:
            raise Malformed(400, f"{name} stands there twice")  # two readings of one request: never guess
        headers[name] = found[2].strip(" \t")
    return parts[0], parts[1], parts[2], headers


def body_length(headers: dict[str, str], max_body_bytes: int) -> int:
    """Raises Malformed."""
    if "transfer-encoding" in headers:
        raise Malformed(411, "send a Content-Length; Transfer-Encoding is not read here")
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()):
        raise Malformed(400, "Content-Length must be a number of bytes")
    if len(text) > 15 or int(text) > max_body_bytes:
        raise Malformed(413, f"the body is larger than {max_body_bytes} bytes")
    return int(text)


_date: tuple[int, str] = (0, "")


def http_date() -> str:
    """The Date header of this second."""
    global _date
    now = int(time.time())
    if _date[0] != now:
        _date = (now, formatdate(now, usegmt=True))
    return _date[1]


def head_of(response: Response, keep_alive: bool) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in response.headers) if response.headers else ""
    if not keep_alive:
        more += "Connection: close\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(response.body)}\r\n"
    if response.events is not None:
        kind = "Content-Type: text/event-stream\r\nCache-Control: no-store\r\nTransfer-Encoding: chunked\r\n"
    return (
        f"HTTP/1.1 {response.status} {REASONS.get(response.status, '')}\r\nDate: {http_date()}\r\n{kind}{more}\r\n"
    ).encode("latin-1")
