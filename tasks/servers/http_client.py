"""The HTTP client of an event loop: its exchanges, and the connections that are kept for the next.

An exchange is never retried, never redirected, bounded in time and size, and exact about whether the request can have
reached the server.  A kept connection that the server has closed meanwhile is found out before anything leaves by it,
and another is taken.
"""

import asyncio
import math
import re
import socket
import ssl
import time
import zlib
from base64 import b64encode
from collections import defaultdict
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import certifi
import requests
import structlog
from aiohappyeyeballs import start_connection
from requests.utils import get_auth_from_url

from slotkeeper.large_json import AnonymousFile
from tasks.servers import http_connection as connections
from tasks.servers.call import Limits
from tasks.servers.http_connection import HttpConnection, ParseTurns
from tasks.servers.responses import FailureReason, NoResponse, Response
from tasks.servers.stream_reader import StreamReader

log = structlog.get_logger(__name__)

SPOOL_AFTER_BYTES = 4 << 20
"""Bytes.  Parsing more takes longer than other runs may wait."""
_MEMORY_BYTES = 1 << 20  # bytes that stay in memory, for patterns and messages


class ResponseBody:
    """Bytes that come piece by piece.  Where no file can be written, they stay in memory."""

    __slots__ = ("_file", "_keeps_in_memory", "_memory", "size")

    def __init__(self) -> None:
        self.size = 0
        self._memory = bytearray()  # all of it, or the beginning of what is in the file
        self._file: AnonymousFile | None = None
        self._keeps_in_memory = False  # in memory

    def add(self, piece: bytes) -> None:
        if self._file is None:
            self._memory += piece
            if len(self._memory) > SPOOL_AFTER_BYTES and not self._keeps_in_memory:
                self._move_to_file()
        else:
            try:
                self._file.append(piece)
            except OSError as error:
                self._move_to_memory(error)
                self._memory += piece
        self.size += len(piece)

    def whole(self) -> tuple[bytes, AnonymousFile | None]:
        """Return it, or its beginning and the file that has all of it."""
        return bytes(self._memory), self._file

    def _move_to_file(self) -> None:
        try:
            self._file = AnonymousFile()
            self._file.append(self._memory)
        except OSError as error:
            self._move_to_memory(error)
        else:
            del self._memory[_MEMORY_BYTES:]

    def _move_to_memory(self, error: OSError) -> None:
        log.warning("large_answer_in_memory", because=str(error))
        if self._file is not None and self._file.size:
            self._memory = bytearray(self._file.read(0, self.size))
        self._file, self._keeps_in_memory = None, True


_STREAM_GRACE_S = 0.5
"""How long after its end a stream's connection may take to come to its own, and be used again."""
_CHECKS_PER_LIMIT = 4  # times within `read_s` it is looked whether anything has moved
_HAPPY_EYEBALLS_DELAY_S = 0.25  # after which a name's next address is tried beside one that does not answer
_ABANDONED_MAX_BYTES = 64 * 1024  # bytes of an answer that nobody waits for
_BODILESS = frozenset({"GET", "HEAD"})
_OWN_HEADERS = {"User-Agent": "slotkeeper", "Accept": "*/*", "Accept-Encoding": "identity"}
_DEFAULT_PORTS = {"http": 80, "https": 443}
# An address whose path is sent as it stands.  Many are one run's alone, so what is remembered is who is asked.
_PLAIN_URL = re.compile(r"(https?://[^/?#\\]+)((?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+)")
_GZIP = 16 + zlib.MAX_WBITS

Origin: TypeAlias = tuple[str, str, int]
"""Whom a connection leads to: scheme, host and port."""


class _Target(NamedTuple):
    """An address as a request names it: who is asked, and the head's end of it."""

    origin: Origin
    path: str
    fields: tuple[str, ...]
    """Of the head: the lines that follow from the address."""


class HttpExchange:
    """One question under way.  `reply` is a future for an Answer, or for how it broke."""

    __slots__ = (
        "_body",
        "_connection",
        "_deadline",
        "_decompressor",
        "_has_body",
        "_headers",
        "_http",
        "_last_progress",
        "_limits",
        "_progress_timer",
        "_reader",
        "_silence_timer",
        "_size",
        "_status",
        "connecting",
        "is_abandoned",
        "reply",
    )

    def __init__(self, http: "HttpClient", limits: Limits, reader: StreamReader | None = None) -> None:
        self.reply: asyncio.Future[Response | NoResponse] = http.loop.create_future()
        self._http, self._limits, self._reader = http, limits, reader
        self.connecting: asyncio.Task[None] | None = None
        self._connection: HttpConnection | None = None  # From when there is one, the request may have left.
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._has_body = False  # Some of the body has come.
        self.is_abandoned = False  # Only its end matters.
        self._decompressor: Any = None  # of a body that the server has packed, though it was not asked to
        self._body = ResponseBody()
        self._size = 0
        self._last_progress = (-1, -1)  # bytes heard, and bytes not sent, when it was last looked
        self._progress_timer: asyncio.TimerHandle | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        self._deadline = http.loop.call_later(limits.deadline - time.monotonic(), self._on_deadline)

    def cut_off(self) -> None:
        """Nobody waits for the answer any more.  What the server makes of that is its own affair."""
        self.fail(self._reason(FailureReason.RESET))

    def abandon(self, reason: FailureReason) -> None:
        """Answer now that no reply came, and observe the end of the exchange for `listen_s` of its limits.

        `reply` is then a future for that end: an Answer with the beginning of its body, or how the connection broke.
        """
        if not self._limits.listen_s or self._connection is None or self.reply.done():
            self.fail(self._reason(reason))
            return
        waiting, self.reply = self.reply, self._http.loop.create_future()
        self.is_abandoned, self._reader = True, None
        self._cancel_progress_check()
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._deadline.cancel()
        self._deadline = self._http.loop.call_later(self._limits.listen_s, self.fail, FailureReason.TIMEOUT)
        waiting.set_result(NoResponse(reason))

    def send(self, connection: HttpConnection, request: "_EncodedRequest") -> None:
        """The request leaves by this connection."""
        self._connection = connection
        connection.send_request(self, request.head, request.body, is_bodiless=request.is_bodiless)
        if self._limits.read_s < self._limits.deadline - time.monotonic():
            self._schedule_progress_check(0)

    def fail(self, reason: FailureReason) -> None:
        if self._connection is not None:
            self._connection.close()
        if self.connecting is not None:
            self.connecting.cancel()
        self._finish(NoResponse(reason))

    # -- called by the connection ----------------------------------------------------------------------------

    def on_headers(self, status: int, headers: Mapping[str, str]) -> None:
        self._status, self._headers = status, headers
        if int(headers.get("Content-Length") or 0) > self._limits.max_bytes and not self.is_abandoned:
            self.fail(FailureReason.TOO_LARGE)
        elif self._reader is not None and self._reader.accepts(status, headers):
            self._check_silence(self._reader)

    def on_body(self, piece: bytes) -> None:
        if self.is_abandoned and (self._decompressor is not None or self._size > _ABANDONED_MAX_BYTES):
            return
        if not self._has_body:
            self._has_body, self._decompressor = True, _make_decompressor(self._headers.get("Content-Encoding"))
        if self._decompressor is not None:
            try:
                piece = self._decompressor.decompress(piece, self._limits.max_bytes - self._size + 1)
                if self._decompressor.unused_data:
                    raise zlib.error("it goes on behind its end")
            except zlib.error:
                self.fail(FailureReason.DAMAGED)
                return
        self._size += len(piece)
        if self._size > self._limits.max_bytes:
            self.fail(FailureReason.TOO_LARGE)
        elif self._reader is not None and self._reader.is_stream:
            self._feed_reader(self._reader, piece)
        else:
            self._body.add(piece)

    def on_complete(self) -> None:
        if self._decompressor is not None and not self._decompressor.eof and not self.is_abandoned:
            self.fail(FailureReason.DAMAGED)
        else:
            self._finish(Response(self._status, self._headers, *self._body.whole()))

    def on_failure(self) -> None:
        self.fail(FailureReason.RESET)

    def on_too_many_pieces(self) -> None:
        self.fail(FailureReason.TOO_MANY_PIECES)

    # -- its bounds ------------------------------------------------------------------------------------------

    def _reason(self, sent: FailureReason) -> FailureReason:
        """How it breaks: as `sent` says, or as where nothing can have left."""
        return FailureReason.CONNECT if self._connection is None else sent

    def _on_deadline(self) -> None:
        self.abandon(FailureReason.TIMEOUT)

    def _feed_reader(self, reader: StreamReader, piece: bytes) -> None:
        was_over = reader.is_finished
        reader.feed(piece)
        if reader.is_aborted:
            self.fail(FailureReason.RESET)
        elif reader.is_finished and not was_over:
            self._cancel_progress_check()
            self._progress_timer = self._http.loop.call_later(_STREAM_GRACE_S, self.fail, FailureReason.RESET)

    def _check_silence(self, reader: StreamReader) -> None:
        """Give up when only signs of life come."""
        if reader.is_silent:
            self.fail(FailureReason.TIMEOUT)
        elif not self.reply.done() and not reader.is_finished and reader.max_silence_s < math.inf:
            pause_s = reader.max_silence_s / _CHECKS_PER_LIMIT
            self._silence_timer = self._http.loop.call_later(pause_s, self._check_silence, reader)

    def _schedule_progress_check(self, still: int) -> None:
        self._progress_timer = self._http.loop.call_later(
            self._limits.read_s / _CHECKS_PER_LIMIT, self._check_progress, still
        )

    def _check_progress(self, still: int) -> None:
        """Give up when nothing has moved for `read_s`."""
        assert self._connection is not None
        progress = self._connection.bytes_received, self._connection.bytes_unsent
        still, self._last_progress = (still + 1 if progress == self._last_progress else 1), progress
        if still > _CHECKS_PER_LIMIT - 1:
            self.fail(FailureReason.TIMEOUT)
        else:
            self._schedule_progress_check(still)

    def _cancel_progress_check(self) -> None:
        if self._progress_timer is not None:
            self._progress_timer.cancel()

    def _finish(self, reply: Response | NoResponse) -> None:
        self._connection = None  # It may be another's from now on.
        self._deadline.cancel()
        self._cancel_progress_check()
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._http.forget(self)
        if not self.reply.done():
            self.reply.set_result(reply)


class _EncodedRequest(NamedTuple):
    """What is sent."""

    head: bytes
    body: bytes
    is_bodiless: bool
    """Whether its answer is a head alone."""


class HttpClient:
    """All connections of one event loop, to be used by its thread alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._exchanges: set[HttpExchange] = set()
        self._open: set[HttpConnection] = set()
        self._turns = ParseTurns()
        self._idle: dict[Origin, list[HttpConnection]] = defaultdict(list)  # that which was used last is the last
        self._cleanup_timer: asyncio.TimerHandle | None = None
        self.large_response_lock = asyncio.Lock()  # of a large answer: together they would take the memory of all

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        limits: Limits,
        reader: StreamReader | None = None,
    ) -> HttpExchange:
        """Ask once.  The request has left, or is waiting for its connection, when this returns.

        A stream is given to `hearing` as it comes.
        """
        exchange = HttpExchange(self, limits, reader)
        self._exchanges.add(exchange)
        if limits.deadline <= time.monotonic():
            exchange.fail(FailureReason.CONNECT)
            return exchange
        try:
            target = _find_target(url)
            request = _EncodedRequest(_encode_head(method, target, headers, body), body or b"", method == "HEAD")
        except (ValueError, requests.RequestException):
            exchange.fail(FailureReason.UNSENDABLE)
            return exchange
        kept = self._reusable_connection(target.origin)
        if kept is not None:
            exchange.send(kept, request)
        else:
            exchange.connecting = self.loop.create_task(
                self._connect_and_send(exchange, target.origin, request, limits)
            )
        return exchange

    def forget(self, exchange: HttpExchange) -> None:
        """It is over."""
        self._exchanges.discard(exchange)

    def close(self) -> None:
        for exchange in list(self._exchanges):
            exchange.cut_off()
        if self._cleanup_timer is not None:
            self._cleanup_timer.cancel()
        for connection in list(self._open):
            connection.close()

    # -- connections -----------------------------------------------------------------------------------------

    async def _connect_and_send(
        self, exchange: HttpExchange, origin: Origin, request: _EncodedRequest, limits: Limits
    ) -> None:
        try:
            async with asyncio.timeout(limits.connect_s):
                connection = await self._connect(origin)
        except OSError:  # a time-out and what TLS finds wrong among them
            exchange.fail(FailureReason.CONNECT)
        except ValueError:  # a name that cannot be one
            exchange.fail(FailureReason.UNSENDABLE)
        else:
            exchange.connecting = None
            exchange.send(connection, request)

    async def _connect(self, origin: Origin) -> HttpConnection:
        scheme, host, port = origin
        found = await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        connected = await start_connection(found, happy_eyeballs_delay=_HAPPY_EYEBALLS_DELAY_S, loop=self.loop)
        callbacks = partial(self._return, origin), partial(self._remove, origin)
        make = partial(HttpConnection, connected, *callbacks, self._turns)
        tls, name = (_tls_context(), host) if scheme == "https" else (None, None)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _, connection = await self.loop.create_connection(make, sock=connected, ssl=tls, server_hostname=name)
        except BaseException:
            connected.close()
            raise
        if connection.is_closed:  # already, by its other end
            raise ConnectionAbortedError
        self._open.add(connection)
        return connection

    def _reusable_connection(self, origin: Origin) -> HttpConnection | None:
        """One that a request may leave by; those that are not fit any more are closed."""
        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if connection.is_reusable:
                return connection
            connection.close()
        return None

    def _return(self, origin: Origin, connection: HttpConnection) -> None:
        self._idle[origin].append(connection)
        if self._cleanup_timer is None:
            self._cleanup_timer = self.loop.call_later(connections.MAX_IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        """Close what has been idle for too long."""
        self._cleanup_timer = None
        for origin, idle in list(self._idle.items()):
            for connection in [kept for kept in idle if kept.is_idle_too_long]:
                connection.close()
            if not idle:
                del self._idle[origin]
        if self._idle:
            self._cleanup_timer = self.loop.call_later(connections.MAX_IDLE_S, self._close_idle)

    def _remove(self, origin: Origin, connection: HttpConnection) -> None:
        """It is closed."""
        self._open.discard(connection)
        if connection in self._idle.get(origin, ()):
            self._idle[origin].remove(connection)


@cache
def _tls_context() -> ssl.SSLContext:
    """Of all loops of this process: to load the authorities takes longer than a handshake."""
    context = ssl.create_default_context(cafile=certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


@lru_cache(maxsize=256)
def _find_target(url: str) -> _Target:
    """Raises ValueError and requests' errors."""
    plain = _PLAIN_URL.fullmatch(url)
    if plain is None:
        return _parse_target(url)
    at, path = plain.groups()
    origin, _, fields = _parse_target(at)
    return _Target(origin, path, fields)


@lru_cache(maxsize=4096)
def _parse_target(url: str) -> _Target:
    prepared = requests.PreparedRequest()
    prepared.prepare_url(url, None)
    assert prepared.url is not None
    parts = urlsplit(prepared.url)
    if parts.scheme not in _DEFAULT_PORTS or parts.hostname is None:
        raise ValueError("only servers that speak HTTP can be asked")
    usual = _DEFAULT_PORTS[parts.scheme]
    port = parts.port or usual
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    fields = [f"Host: {name if port == usual else f'{name}:{port}'}"]
    user, password = get_auth_from_url(prepared.url)
    if user or password:
        fields.append(f"Authorization: Basic {b64encode(f'{user}:{password}'.encode('latin-1')).decode()}")
    return _Target((parts.scheme, parts.hostname, port), prepared.path_url, tuple(fields))


def _encode_head(method: str, target: _Target, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Raises ValueError: they cannot be written as a header."""
    if not "".join(headers.values()).isprintable():
        raise ValueError("this cannot be written as a header")
    length = len(body or b"") if body is not None or method not in _BODILESS else None
    form = _head_template(target.fields, tuple(headers), length is not None)
    values = headers.values() if length is None else (length, *headers.values())
    return f"{method} {target.path} HTTP/1.1\r\n{form % tuple(values)}".encode("latin-1")


@lru_cache(maxsize=1024)
def _head_template(fields: tuple[str, ...], names: tuple[str, ...], has_length: bool) -> str:
    """A head behind its first line, with places for its length, if it has one, and for the values of headers of these
    names, in this order.  Addresses are not remembered: many are one run's alone, and may hold what its payload says.

    Raises ValueError: one of them is none.
    """
    if not all(names) or not "".join(names).isprintable() or any(":" in name for name in names):
        raise ValueError("this cannot be the name of a header")
    given_names = {name.lower() for name in names}
    own = [f"{name}: {value}" for name, value in _OWN_HEADERS.items() if name.lower() not in given_names]
    fixed = [line.replace("%", "%%") for line in (*fields, *own)]
    given = [f"{name.replace('%', '%%')}: %s" for name in names]
    return "\r\n".join([*fixed, *["Content-Length: %d"] * has_length, *given, "", ""])


def _make_decompressor(coding: str | None) -> Any:
    """Of a body that is packed so; None: it is taken as it comes."""
    match (coding or "").lower():
        case "gzip" | "x-gzip":
            return zlib.decompressobj(_GZIP)
        case "deflate":
            return zlib.decompressobj()
        case _:
            return None
