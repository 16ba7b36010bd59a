"""The HTTP client of an event loop.  It never sends a request again that may have left, and never follows a redirect:
either could run a job a second time, and the slot is free only if it is certain that no server has the request.

So each exchange ends with a response, or with a reason that says whether the request may have left.  Common clients do
not offer that: aiohttp repeats a PUT whose kept connection breaks (docs/adr/0008-own-http-client-for-servers.md).

Each exchange is bounded in time and size.  Connections are kept for the next request; one that the server has closed is
detected before a request is written to it, and another is used.
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
from tasks.servers import http_connection
from tasks.servers.call import Limits
from tasks.servers.http_connection import HttpConnection, ParseTurns
from tasks.servers.responses import FailureReason, NoResponse, Response
from tasks.servers.stream_reader import StreamReader

log = structlog.get_logger(__name__)

SPOOL_AFTER_BYTES = 4 << 20
"""Bytes.  A larger response is kept in a file: parsing it takes longer than other runs may wait."""
_MEMORY_BYTES = 1 << 20  # bytes of a spooled response that stay in memory, for patterns and messages


class ResponseBody:
    """The body of a response: in memory, or in a file if it is large.

    If no file can be written, it stays in memory.  Not tempfile.SpooledTemporaryFile: that fails if the disk is full,
    and the parser of large responses needs a file descriptor.
    """

    __slots__ = ("_file", "_keeps_in_memory", "_memory", "size")

    def __init__(self) -> None:
        self.size = 0
        self._memory = bytearray()  # the body, or its beginning if it is in the file
        self._file: AnonymousFile | None = None
        self._keeps_in_memory = False  # No file could be written.

    def add(self, piece: bytes) -> None:
        """Append a piece of the body."""
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
        """Return the body and None, or its beginning and the file that contains all of it."""
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
"""After a stream's end mark, the response has this long to end as well, so that its connection can be reused."""
_CHECKS_PER_LIMIT = 4  # checks for progress within `read_s`, and for silence within `max_silence_s`
_HAPPY_EYEBALLS_DELAY_S = 0.25  # then the next address of a host is tried, while the first has not accepted
_ABANDONED_MAX_BYTES = 64 * 1024  # bytes that are kept of the response in an abandoned exchange
_METHODS_WITHOUT_BODY = frozenset({"GET", "HEAD"})
_OWN_HEADERS = {"User-Agent": "slotkeeper", "Accept": "*/*", "Accept-Encoding": "identity"}
_DEFAULT_PORTS = {"http": 80, "https": 443}
# A URL whose path is sent unchanged.  Many of these URLs belong to one run each, so only their origins are cached.
_PLAIN_URL = re.compile(r"(https?://[^/?#\\]+)((?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+)")
_GZIP = 16 + zlib.MAX_WBITS

Origin: TypeAlias = tuple[str, str, int]
"""Scheme, host and port of a server."""


class _Target(NamedTuple):
    """A URL, split into the parts of a request."""

    origin: Origin
    path: str
    """The path and the query, quoted."""
    fields: tuple[str, ...]
    """The header lines that follow from the URL: Host, and Authorization if it contains a user."""


class HttpExchange:
    """One request and its response.  `reply` is a future for the Response, or for the reason why there is none."""

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
        self._connection: HttpConnection | None = None  # Once it is set, the request may have left.
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._has_body = False  # A piece of the body was received.
        self.is_abandoned = False  # The caller was given a NoResponse, and may wait for the end of the exchange.
        self._decompressor: Any = None  # of a body that the server compresses although the request excludes that
        self._body = ResponseBody()
        self._size = 0
        self._last_progress = (-1, -1)  # bytes received and bytes unsent, at the last check
        self._progress_timer: asyncio.TimerHandle | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        self._deadline = http.loop.call_later(limits.deadline - time.monotonic(), self._on_deadline)

    def cut_off(self) -> None:
        """End the exchange at once and close its connection.  The server may continue to process the request."""
        self.fail(self._reason(FailureReason.RESET))

    def abandon(self, reason: FailureReason) -> None:
        """Resolve `reply` to a NoResponse now, and observe the exchange for another `listen_s` of its limits.

        `reply` becomes a new future for the end of the exchange: a Response with the beginning of its body, or a
        NoResponse.  If `listen_s` is 0, or the request has not left, the exchange fails at once.
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
        """Send the request over this connection."""
        self._connection = connection
        connection.send_request(self, request.head, request.body, is_bodiless=request.is_bodiless)
        if self._limits.read_s < self._limits.deadline - time.monotonic():
            self._schedule_progress_check(0)

    def fail(self, reason: FailureReason) -> None:
        """End the exchange without a response, and close its connection."""
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
                    raise zlib.error("data follows the end of the compressed body")
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

    # -- limits ----------------------------------------------------------------------------------------------

    def _reason(self, reason_if_sent: FailureReason) -> FailureReason:
        """Return the given reason, or CONNECT if the request certainly has not left."""
        return FailureReason.CONNECT if self._connection is None else reason_if_sent

    def _on_deadline(self) -> None:
        self.abandon(FailureReason.TIMEOUT)

    def _feed_reader(self, reader: StreamReader, piece: bytes) -> None:
        was_finished = reader.is_finished
        reader.feed(piece)
        if reader.is_aborted:
            self.fail(FailureReason.RESET)
        elif reader.is_finished and not was_finished:
            self._cancel_progress_check()
            self._progress_timer = self._http.loop.call_later(_STREAM_GRACE_S, self.fail, FailureReason.RESET)

    def _check_silence(self, reader: StreamReader) -> None:
        """Fail if the server has sent nothing but heartbeats for `max_silence_s`; else check again later."""
        if reader.is_silent:
            self.fail(FailureReason.TIMEOUT)
        elif not self.reply.done() and not reader.is_finished and reader.max_silence_s < math.inf:
            pause_s = reader.max_silence_s / _CHECKS_PER_LIMIT
            self._silence_timer = self._http.loop.call_later(pause_s, self._check_silence, reader)

    def _schedule_progress_check(self, idle_checks: int) -> None:
        self._progress_timer = self._http.loop.call_later(
            self._limits.read_s / _CHECKS_PER_LIMIT, self._check_progress, idle_checks
        )

    def _check_progress(self, idle_checks: int) -> None:
        """Fail if no byte was received or sent for `read_s`.  `idle_checks`: checks in a row without progress."""
        assert self._connection is not None
        progress = self._connection.bytes_received, self._connection.bytes_unsent
        idle_checks, self._last_progress = (idle_checks + 1 if progress == self._last_progress else 1), progress
        if idle_checks > _CHECKS_PER_LIMIT - 1:
            self.fail(FailureReason.TIMEOUT)
        else:
            self._schedule_progress_check(idle_checks)

    def _cancel_progress_check(self) -> None:
        if self._progress_timer is not None:
            self._progress_timer.cancel()

    def _finish(self, reply: Response | NoResponse) -> None:
        self._connection = None  # It may already carry another exchange, which must not lose it.
        self._deadline.cancel()
        self._cancel_progress_check()
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._http.forget(self)
        if not self.reply.done():
            self.reply.set_result(reply)


class _EncodedRequest(NamedTuple):
    """A request, as bytes."""

    head: bytes
    body: bytes
    is_bodiless: bool
    """Whether the response has no body, whatever its headers say."""


class HttpClient:
    """The connections and exchanges of one event loop.  Only the loop's thread may use it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._exchanges: set[HttpExchange] = set()
        self._open: set[HttpConnection] = set()
        self._turns = ParseTurns()
        self._idle: dict[Origin, list[HttpConnection]] = defaultdict(list)  # The one used last is last.
        self._cleanup_timer: asyncio.TimerHandle | None = None
        # One large response is parsed at a time: several together could take all memory.
        self.large_response_lock = asyncio.Lock()

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        limits: Limits,
        reader: StreamReader | None = None,
    ) -> HttpExchange:
        """Send a request once.  On return it has left, or waits for its connection.

        reader: receives the body in pieces, if the response is a stream.
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
        """Remove an exchange that has ended."""
        self._exchanges.discard(exchange)

    def close(self) -> None:
        """End all exchanges and close all connections."""
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
        except OSError:  # also a timeout, and an error of TLS
            exchange.fail(FailureReason.CONNECT)
        except ValueError:  # The host name is not valid.
            exchange.fail(FailureReason.UNSENDABLE)
        else:
            exchange.connecting = None
            exchange.send(connection, request)

    async def _connect(self, origin: Origin) -> HttpConnection:
        scheme, host, port = origin
        addresses = await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        sock = await start_connection(addresses, happy_eyeballs_delay=_HAPPY_EYEBALLS_DELAY_S, loop=self.loop)
        callbacks = partial(self._return, origin), partial(self._remove, origin)
        factory = partial(HttpConnection, sock, *callbacks, self._turns)
        tls, name = (_tls_context(), host) if scheme == "https" else (None, None)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _, connection = await self.loop.create_connection(factory, sock=sock, ssl=tls, server_hostname=name)
        except BaseException:
            sock.close()
            raise
        if connection.is_closed:  # The server has closed it already.
            raise ConnectionAbortedError
        self._open.add(connection)
        return connection

    def _reusable_connection(self, origin: Origin) -> HttpConnection | None:
        """Return an idle connection that can carry a request; close those that cannot."""
        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if connection.is_reusable:
                return connection
            connection.close()
        return None

    def _return(self, origin: Origin, connection: HttpConnection) -> None:
        """Keep a connection for the next request to its origin."""
        self._idle[origin].append(connection)
        if self._cleanup_timer is None:
            self._cleanup_timer = self.loop.call_later(http_connection.MAX_IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        """Close the connections that were idle for too long."""
        self._cleanup_timer = None
        for origin, idle in list(self._idle.items()):
            for connection in [one for one in idle if one.is_idle_too_long]:
                connection.close()
            if not idle:
                del self._idle[origin]
        if self._idle:
            self._cleanup_timer = self.loop.call_later(http_connection.MAX_IDLE_S, self._close_idle)

    def _remove(self, origin: Origin, connection: HttpConnection) -> None:
        """Remove a connection that was closed."""
        self._open.discard(connection)
        if connection in self._idle.get(origin, ()):
            self._idle[origin].remove(connection)


@cache
def _tls_context() -> ssl.SSLContext:
    """Return the TLS context of all event loops of this process: its certificates load slower than a handshake runs."""
    context = ssl.create_default_context(cafile=certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


@lru_cache(maxsize=256)
def _find_target(url: str) -> _Target:
    """Split a URL.  Raises ValueError, requests.RequestException."""
    plain_url = _PLAIN_URL.fullmatch(url)
    if plain_url is None:
        return _parse_target(url)
    base_url, path = plain_url.groups()
    origin, _, fields = _parse_target(base_url)
    return _Target(origin, path, fields)


@lru_cache(maxsize=4096)
def _parse_target(url: str) -> _Target:
    prepared = requests.PreparedRequest()
    prepared.prepare_url(url, None)
    assert prepared.url is not None
    parts = urlsplit(prepared.url)
    if parts.scheme not in _DEFAULT_PORTS or parts.hostname is None:
        raise ValueError("the URL has no host, or its scheme is neither http nor https")
    default_port = _DEFAULT_PORTS[parts.scheme]
    port = parts.port or default_port
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    fields = [f"Host: {host if port == default_port else f'{host}:{port}'}"]
    user, password = get_auth_from_url(prepared.url)
    if user or password:
        fields.append(f"Authorization: Basic {b64encode(f'{user}:{password}'.encode('latin-1')).decode()}")
    return _Target((parts.scheme, parts.hostname, port), prepared.path_url, tuple(fields))


def _encode_head(method: str, target: _Target, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Return the head of a request.  Raises ValueError for a header that could contain another, or is not Latin-1."""
    if not "".join(headers.values()).isprintable():
        raise ValueError("the value of a header has a character that cannot be printed")
    length = len(body or b"") if body is not None or method not in _METHODS_WITHOUT_BODY else None
    template = _head_template(target.fields, tuple(headers), length is not None)
    values = headers.values() if length is None else (length, *headers.values())
    return f"{method} {target.path} HTTP/1.1\r\n{template % tuple(values)}".encode("latin-1")


@lru_cache(maxsize=1024)
def _head_template(fields: tuple[str, ...], names: tuple[str, ...], has_length: bool) -> str:
    """Return the format string of a head after its first line: for the length, if it has one, and the headers' values.

    names: the names of the headers, in the order of their values.  Neither URLs nor values are cached: many belong to
    one run, and may contain parts of its payload.  Raises ValueError for a name that is not valid.
    """
    if not all(names) or not "".join(names).isprintable() or any(":" in name for name in names):
        raise ValueError("the name of a header is empty, or has a character that it must not have")
    given_names = {name.lower() for name in names}
    defaults = [f"{name}: {value}" for name, value in _OWN_HEADERS.items() if name.lower() not in given_names]
    fixed = [line.replace("%", "%%") for line in (*fields, *defaults)]
    variable = [f"{name.replace('%', '%%')}: %s" for name in names]
    return "\r\n".join([*fixed, *["Content-Length: %d"] * has_length, *variable, "", ""])


def _make_decompressor(coding: str | None) -> Any:
    """Return a decompressor for this Content-Encoding; None: the body is read unchanged."""
    match (coding or "").lower():
        case "gzip" | "x-gzip":
            return zlib.decompressobj(_GZIP)
        case "deflate":
            return zlib.decompressobj()
        case _:
            return None
