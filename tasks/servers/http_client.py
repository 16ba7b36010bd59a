"""The HTTP client of an event loop.  It never sends a request again that may have left, and never follows a redirect:
either could run a job a second time, and the slot is free only if it is certain that no server has the request.

So each exchange ends with a response, or with a reason that says whether the request may have left.  Common clients do
not offer that: aiohttp repeats a PUT whose kept connection breaks (docs/adr/0008-own-http-client-for-servers.md).

Each exchange is bounded in time and size.  Connections are kept for the next request; one that the server has closed is
detected before a request is written to it, and another is used.
"""

import asyncio
import socket
import ssl
import time
import zlib
from collections import defaultdict
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import certifi
import structlog
from aiohappyeyeballs import start_connection

from slotkeeper.large_json import AnonymousFile
from tasks.servers import http_connection
from tasks.servers.endpoint import Endpoint, Origin
from tasks.servers.http_connection import HttpConnection, ParseTurns
from tasks.servers.node_resolver import NodeResolver, ResolveError
from tasks.servers.responses import FailureReason, NoResponse, Response
from tasks.servers.stream_reader import StreamReader
from tasks.servers.values import Limits

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
_HAPPY_EYEBALLS_DELAY_S = 0.25  # then the next address of a host is tried, while the first has not accepted
_ABANDONED_MAX_BYTES = 64 * 1024  # bytes that are kept of the response in an abandoned exchange
_METHODS_WITHOUT_BODY = frozenset({"GET", "HEAD"})
_OWN_HEADERS = {"User-Agent": "slotkeeper", "Accept": "*/*", "Accept-Encoding": "identity"}
_NOT_REACHED = frozenset({421, 502, 503, 504})
_GZIP = 16 + zlib.MAX_WBITS


class HttpExchange:
    """One request and its response.  `reply` is a future for the Response, or for the reason why there is none."""

    def __init__(self, http: "HttpClient", limits: Limits, reader: StreamReader | None = None) -> None:
        self.reply: asyncio.Future[Response | NoResponse] = http.loop.create_future()
        self._http, self.limits, self._reader = http, limits, reader
        self.connecting: asyncio.Task[None] | None = None
        self._connection: HttpConnection | None = None  # Once it is set, the request may have left.
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._has_body = False  # A piece of the body was received.
        self.is_abandoned = False  # The caller was given a NoResponse, and may wait for the end of the exchange.
        self._decompressor: Any = None  # of a body that the server compresses although the request excludes that
        self._body = ResponseBody()
        self._size = 0
        self._unsent, self._last_sent_s = 0, 0.0  # bytes of the request at the last check, and when they were fewer
        self._idle_timer: asyncio.TimerHandle | None = None
        self._deadline = http.loop.call_later(limits.deadline - time.monotonic(), self._on_deadline)

    def cut_off(self) -> None:
        """End the exchange at once and close its connection.  The server may continue to process the request."""
        self.fail(self._reason(FailureReason.RESET))

    def abandon(self, reason: FailureReason) -> None:
        """Resolve `reply` to a NoResponse now, and observe the exchange for another `listen_s` of its limits.

        `reply` becomes a new future for the end of the exchange: a Response with the beginning of its body, or a
        NoResponse.  If `listen_s` is 0, or the request has not left, the exchange fails at once.
        """
        if not self.limits.listen_s or self._connection is None or self.reply.done():
            self.fail(self._reason(reason))
            return
        waiting, self.reply = self.reply, self._http.loop.create_future()
        self.is_abandoned, self._reader = True, None
        self._cancel_idle_check()
        self._deadline.cancel()
        self._deadline = self._http.loop.call_later(self.limits.listen_s, self.fail, FailureReason.TIMEOUT)
        waiting.set_result(NoResponse(reason))

    def send(self, connection: HttpConnection, request: "_EncodedRequest") -> None:
        """Send the request over this connection."""
        self._connection = connection
        connection.send_request(self, request.head, request.body, is_bodiless=request.is_bodiless)
        self._check_idle()

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
        if int(headers.get("content-length") or 0) > self.limits.max_bytes and not self.is_abandoned:
            self.fail(FailureReason.TOO_LARGE)
        elif self._reader is not None and self._reader.accepts(status, headers):
            self._check_idle()

    def on_body(self, piece: bytes) -> None:
        if self.is_abandoned and (self._decompressor is not None or self._size > _ABANDONED_MAX_BYTES):
            return
        if not self._has_body:
            self._has_body, self._decompressor = True, _make_decompressor(self._headers.get("content-encoding"))
        if self._decompressor is not None:
            try:
                piece = self._decompressor.decompress(piece, self.limits.max_bytes - self._size + 1)
                if self._decompressor.unused_data:
                    raise zlib.error("data follows the end of the compressed body")
            except zlib.error:
                self.fail(FailureReason.DAMAGED)
                return
        self._size += len(piece)
        if self._size > self.limits.max_bytes:
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
            self._cancel_idle_check()
            self._idle_timer = self._http.loop.call_later(_STREAM_GRACE_S, self.fail, FailureReason.RESET)

    def _check_idle(self) -> None:
        """Fail if the server has been idle for too long; else check again when it may have been."""
        self._cancel_idle_check()
        now_s = time.monotonic()
        idle_ends_s = self._idle_ends_s()
        if idle_ends_s <= now_s:
            self.fail(FailureReason.TIMEOUT)
        elif idle_ends_s < self.limits.deadline:
            self._idle_timer = self._http.loop.call_later(idle_ends_s - now_s, self._check_idle)

    def _idle_ends_s(self) -> float:
        """Return the monotonic time until which the server may be idle, as far as is known.

        It is idle if no byte is received or sent for `read_s`, or if a stream contains nothing but heartbeats for as
        long as its description says.  When bytes were sent is known only as well as the checks are frequent.
        """
        assert self._connection is not None
        if self._connection.bytes_unsent != self._unsent:
            self._unsent, self._last_sent_s = self._connection.bytes_unsent, time.monotonic()
        ends_s = max(self._connection.last_received_s, self._last_sent_s) + self.limits.read_s
        return ends_s if self._reader is None else min(ends_s, self._reader.silence_ends_s)

    def _cancel_idle_check(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def _finish(self, reply: Response | NoResponse) -> None:
        self._connection = None  # It may already carry another exchange, which must not lose it.
        self._deadline.cancel()
        self._cancel_idle_check()
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
        endpoint: Endpoint,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None,
        limits: Limits,
        reader: StreamReader | None = None,
        nodes: NodeResolver | None = None,
    ) -> HttpExchange:
        """Send a request once.  On return it has left, or waits for its connection.

        target: the path and the query, quoted.
        reader: receives the body in pieces, if the response is a stream.
        nodes: finds the gateway of a node.
        """
        exchange = HttpExchange(self, limits, reader)
        self._exchanges.add(exchange)
        if limits.deadline <= time.monotonic():
            exchange.fail(FailureReason.CONNECT)
        elif endpoint.node is None:
            self._send_to(exchange, method, endpoint, target, headers, body)
        else:
            exchange.connecting = self.loop.create_task(
                self._resolve_and_send(exchange, nodes, endpoint.node, method, target, headers, body)
            )
        return exchange

    def _send_to(
        self,
        exchange: HttpExchange,
        method: str,
        endpoint: Endpoint,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None,
    ) -> None:
        """Send over an idle connection, or begin to connect."""
        try:
            head = _encode_head(method, endpoint, target, headers, body)
        except ValueError:
            exchange.fail(FailureReason.UNSENDABLE)
            return
        request = _EncodedRequest(head, body or b"", method == "HEAD")
        kept = self._reusable_connection(endpoint.origin)
        if kept is not None:
            exchange.send(kept, request)
        else:
            exchange.connecting = self.loop.create_task(self._connect_and_send(exchange, endpoint.origin, request))

    async def _resolve_and_send(
        self,
        exchange: HttpExchange,
        nodes: NodeResolver | None,
        node: str,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None,
    ) -> None:
        """Send to the gateway of a node.  Without a gateway, certainly nothing is sent."""
        address = None
        if nodes is not None:
            try:
                async with asyncio.timeout(exchange.limits.connect_s):
                    address = await nodes.resolve(node)
            except (ResolveError, TimeoutError) as error:
                log.warning("gateway_not_found", node=node, error=str(error))
            except Exception:  # Without an end of the exchange the run would wait for its deadline.
                log.exception("gateway_not_found", node=node)
        if nodes is None or address is None:
            exchange.fail(FailureReason.CONNECT)
            return
        exchange.reply.add_done_callback(partial(_forget_if_moved, nodes, node))
        exchange.connecting = None
        self._send_to(exchange, method, address.endpoint, f"/n/{node}/{address.number}{target}", headers, body)

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

    async def _connect_and_send(self, exchange: HttpExchange, origin: Origin, request: _EncodedRequest) -> None:
        try:
            async with asyncio.timeout(exchange.limits.connect_s):
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


def _forget_if_moved(nodes: NodeResolver, node: str, reply: "asyncio.Future[Response | NoResponse]") -> None:
    """Look a node's gateway up again after a request that did not reach the node."""
    result = reply.result()
    if isinstance(result, NoResponse) or result.status in _NOT_REACHED:
        nodes.forget(node)


@cache
def _tls_context() -> ssl.SSLContext:
    """Return the TLS context of all event loops of this process: its certificates load slower than a handshake runs."""
    context = ssl.create_default_context(cafile=certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


def _encode_head(method: str, endpoint: Endpoint, target: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Return the head of a request.  Raises ValueError for a header that could contain another, or is not Latin-1."""
    if not "".join((*headers, *headers.values())).isprintable():
        raise ValueError("a header has a character that cannot be printed")
    if not all(headers) or any(":" in name for name in headers):
        raise ValueError("the name of a header is empty, or contains a colon")
    given_names = {name.lower() for name in headers}
    lines = [f"{method} {target} HTTP/1.1", *endpoint.header_lines]
    lines += [f"{name}: {value}" for name, value in _OWN_HEADERS.items() if name.lower() not in given_names]
    if body is not None or method not in _METHODS_WITHOUT_BODY:
        lines.append(f"Content-Length: {len(body or b'')}")
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _make_decompressor(coding: str | None) -> Any:
    """Return a decompressor for this Content-Encoding; None: the body is read unchanged."""
    match (coding or "").lower():
        case "gzip" | "x-gzip":
            return zlib.decompressobj(_GZIP)
        case "deflate":
            return zlib.decompressobj()
        case _:
            return None
