"""One HTTP exchange: never retried, never redirected, bounded in time and size, and exact about one thing:
whether the request can have reached the server.

requests and urllib3 do the work.  Our connection class adds what they cannot tell or limit: when the
first byte of the request was about to leave, a total deadline (a read time-out starts anew with every
byte, so that a trickle defeats it), and the age of an idle connection.
"""

import http.client
import io
import os
import socket
import threading
import time
from http.cookiejar import DefaultCookiePolicy
from typing import Any, NamedTuple

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

from tasks.servers.answers import Answer, Break, Broken
from tasks.servers.stream import Hearing

# A server that closes an idle connection may do so in the very moment in which we send on it, and
# then nobody can tell whether it has read the request.  urllib3 sees connections that are closed
# already; the rest is avoided by not reusing one that has been idle for about as long as common
# servers allow (gunicorn 2 s, uvicorn and node 5 s).  What is left of the race is UNKNOWN.
MAX_IDLE_S = 1.5
# So does a server whose code has failed (uvicorn, under every FastAPI: a moment after a 500 that announces nothing),
# and the slot's next job comes in that very moment.
FAILED_INSIDE = 500
STREAM_GRACE_S = 0.5
"""How long after its end a stream's connection may take to come to its own, and be used again."""
_CHUNK = 256 * 1024  # bytes read at a time
_SOON_S = 0.001  # a time-out of zero would mean "do not block"

MAX_ANSWER_BYTES = 64 << 20
"""Of one answer of a server."""
MESSAGES = {
    Break.CONNECT: "no connection to the server could be made",
    Break.TIMEOUT: "the server gave no whole answer in time",
    Break.RESET: "the connection broke before the whole answer was there",
    Break.TOO_LARGE: f"the server's answer is larger than {MAX_ANSWER_BYTES >> 20} MiB: have the server store large "
    "results, and answer with their URL",
    Break.UNSENDABLE: "no HTTP request can be made of the address or the headers",
}
_WHAT_CAN_HAPPEN = (
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
    ValueError,  # what cannot be written as a header or an address
)


class Limits(NamedTuple):
    """Bounds of one exchange."""

    connect_s: float
    read_s: float  # between two pieces of the answer; may be infinite
    deadline: float  # time.monotonic() at which it all ends
    max_bytes: int  # of the answer's body
    listen_s: float = 0.0  # for how long the end of an exchange is observed that is given up (wires.py alone)


class _State(threading.local):
    """The exchange this thread is in.  A connection is only ever used by one thread at a time."""

    deadline: float | None = None
    read_s: float = float("inf")
    may_have_sent: bool = False

    def left_s(self) -> float:
        return min(self.read_s, (self.deadline or 0.0) - time.monotonic())


_state = _State()


class _Watched:
    """Mixed into urllib3's connections; see the module's docstring."""

    response_class: Any
    sock: Any
    _answered_at = 0.0

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self._about_to_send()

    def send(self, data: Any) -> None:
        if self.sock is not None:  # otherwise it connects first
            self._about_to_send()
        super().send(data)  # type: ignore[misc]

    def getresponse(self) -> Any:
        response = super().getresponse()  # type: ignore[misc]
        self._answered_at = time.monotonic()
        return response

    @property
    def is_connected(self) -> bool:
        """Whether the pool may hand this connection out again."""
        return time.monotonic() - self._answered_at < MAX_IDLE_S and super().is_connected  # type: ignore[misc]

    def _about_to_send(self) -> None:
        _state.may_have_sent = True
        if _state.deadline is not None:  # a server that does not read must not hold us up either
            self.sock.settimeout(max(_state.deadline - time.monotonic(), _SOON_S))


class _DeadlineReader(io.RawIOBase):
    """A socket's bytes, each read bounded by what is left of the exchange's time."""

    def __init__(self, sock: Any) -> None:
        self._sock, self._raw = sock, sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if _state.deadline is not None:
            left = _state.left_s()
            if left <= 0:
                raise TimeoutError("the exchange's deadline has passed")
            self._sock.settimeout(left)
        got: int | None = self._raw.readinto(buffer)
        return got

    def close(self) -> None:
        self._raw.close()
        super().close()


class _DeadlineFile:
    """Looks to http.client like a socket, of which it only wants a file."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def makefile(self, _mode: str) -> io.BufferedReader:
        return _AnswerFile(_DeadlineReader(self._sock), 16 * 1024)


class _AnswerFile(io.BufferedReader):
    """Tells an answer that ends in its head from a whole one; http.client takes both for whole."""

    in_head = True

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if self.in_head and not line.endswith(b"\n"):
            raise http.client.RemoteDisconnected("the connection ended within the head of the answer")
        return line


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_DeadlineFile(sock), *args, **kwargs)  # type: ignore[arg-type]

    def begin(self) -> None:
        super().begin()
        if isinstance(self.fp, _AnswerFile):
            self.fp.in_head = False


class _Connection(_Watched, HTTPConnection):
    response_class = _Response


class _SecureConnection(_Watched, HTTPSConnection):
    response_class = _Response


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}


class _Session(requests.Session):
    def get_redirect_target(self, resp: requests.Response) -> None:
        """None, always.  Otherwise requests reads a redirect's body whole, however long it is."""


def new_session(pool_size: int, servers: int = 1024) -> requests.Session:
    """A session to share between threads, with up to `pool_size` kept connections to each server.

    It takes nothing from the environment (no proxies, no .netrc), keeps no cookies, follows no
    redirects and repeats no request.  `servers`: to how many servers connections are kept.
    """
    session = _Session()
    session.trust_env = False
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    # No compression: it costs more than the local network does, and unpacks to any size.
    session.headers = requests.structures.CaseInsensitiveDict(
        {"User-Agent": "slotkeeper", "Accept": "*/*", "Accept-Encoding": "identity"}
    )
    adapter = _Adapter(pool_connections=servers, pool_maxsize=pool_size, max_retries=0)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session


_shared: requests.Session | None = None
_shared_lock = threading.Lock()
SHARED_POOL_SIZE = 64


def shared_session() -> requests.Session:
    """This process's own session, made at the first use."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = new_session(SHARED_POOL_SIZE)
        return _shared


def _forget_shared_session() -> None:
    # Two processes writing to one kept connection would read each other's answers.
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_shared_session)


def exchange(
    session: requests.Session,
    method: str,
    url: str,
    headers: dict[str, str],
    body: bytes | None,
    limits: Limits,
    hearing: Hearing | None = None,
) -> Answer | Broken:
    """Ask once.  Never raises for what a server or a network can do.  A stream is given to `hearing` as it comes.

    Name resolution is the one thing the deadline does not bound.
    """
    left_s = limits.deadline - time.monotonic()
    if left_s <= 0:
        return Broken(Break.CONNECT, "there was no time left to ask")
    _state.deadline, _state.read_s = limits.deadline, limits.read_s
    # A session that is not ours cannot tell when it sends: assume the worst.
    _state.may_have_sent = not isinstance(session, _Session)
    timeout = (min(limits.connect_s, left_s), min(limits.read_s, left_s))
    try:
        response = session.request(
            method, url, headers=headers, data=body, timeout=timeout, stream=True, allow_redirects=False
        )
        return _answer(response, limits.max_bytes, hearing)
    except _WHAT_CAN_HAPPEN as error:
        how = _how_it_broke(error)
        return Broken(how, MESSAGES[how])
    finally:
        _state.deadline = None


def _how_it_broke(error: Exception) -> Break:
    if not _state.may_have_sent:
        return Break.UNSENDABLE if isinstance(error, ValueError) else Break.CONNECT
    is_late = _state.deadline is not None and time.monotonic() >= _state.deadline
    if is_late or isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
        return Break.TIMEOUT
    return Break.RESET


def _answer(response: requests.Response, max_bytes: int, hearing: Hearing | None) -> Answer | Broken:
    raw = response.raw
    connection = raw.connection
    try:
        if hearing is not None and hearing.opens(response.status_code, response.headers):
            return _heard(raw, response, max_bytes, hearing)
        body = _bounded_body(raw, max_bytes)
    except BaseException:
        raw.close()
        raise
    if body is None:
        raw.close()  # half-read, so not to be used again
        return Broken(Break.TOO_LARGE, MESSAGES[Break.TOO_LARGE])
    raw.release_conn()
    if connection is not None and response.status_code == FAILED_INSIDE:
        connection.close()
    return Answer(response.status_code, response.headers, body)


def _heard(raw: urllib3.HTTPResponse, response: requests.Response, max_bytes: int, hearing: Hearing) -> Answer | Broken:
    """A stream, until nothing that comes would change what came of it; its connection is not used again."""
    pieces, size = list[bytes](), 0
    try:
        for piece in raw.stream(_CHUNK, decode_content=True):
            hearing.take(piece)
            pieces.append(piece)
            size += len(piece)
            if size > max_bytes:
                return Broken(Break.TOO_LARGE, MESSAGES[Break.TOO_LARGE])
            if hearing.is_silent:
                return Broken(Break.TIMEOUT, MESSAGES[Break.TIMEOUT])
            if hearing.is_over:
                break
        return Answer(response.status_code, response.headers, b"".join(pieces))
    finally:
        raw.close()


def _bounded_body(raw: urllib3.HTTPResponse, max_bytes: int) -> bytes | None:
    """The body, decoded if the server has encoded it all the same; None if it is too large."""
    announced = raw.length_remaining
    if announced is not None and announced > max_bytes:
        return None
    if announced is not None and "Content-Encoding" not in raw.headers:
        return raw.read(decode_content=False)
    pieces, size = [], 0
    for piece in raw.stream(_CHUNK, decode_content=True):
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            return None
    return b"".join(pieces)
