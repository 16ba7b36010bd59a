"""The HTTP client: limits of an exchange, heads, responses, bodies, and the connections that it keeps."""

import asyncio
import gzip
import math
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from slotkeeper import large_json
from tasks.servers import HealthKind, ServerAdapter, ServerSession, call_server, http_client, http_connection
from tasks.servers.endpoint import parse_endpoint
from tasks.servers.http_client import SPOOL_AFTER_BYTES, HttpExchange, ResponseBody, _encode_head
from tasks.servers.http_connection import _MAX_HEAD_BYTES
from tasks.servers.responses import FailureReason, NoResponse, Response
from tasks.servers.values import Limits
from tests.support.scripted import always, answer, hang_up

READ_S = 4.0


class Timer:
    """One pending `call_later` of a Clock."""

    def __init__(self, at_s: float, callback: Callable[[], None]) -> None:
        self.at_s, self.callback = at_s, callback

    def cancel(self) -> None:
        self.at_s = math.inf


class Clock:
    """Stands in for an event loop, whose time the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[Timer] = []

    def create_future(self) -> Future[Any]:
        return Future()

    def call_later(self, seconds: float, callback: Callable[..., None], *args: Any) -> Timer:
        self._timers.append(Timer(self.now_s + seconds, lambda: callback(*args)))
        return self._timers[-1]

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        due = [timer for timer in self._timers if timer.at_s <= self.now_s]
        self._timers = [timer for timer in self._timers if timer not in due]
        for timer in due:
            timer.callback()


class FakeConnection:
    """Stands in for a connection, whose counters the test sets."""

    def __init__(self) -> None:
        self.last_received_s, self.bytes_unsent, self.is_closed = 0.0, 0, False

    def send_request(self, *_: object, **__: object) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(http_client, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


@pytest.fixture
def sent_exchange(clock: Clock) -> tuple[HttpExchange, FakeConnection]:
    """Return an exchange whose request has left, and its connection."""
    http: Any = SimpleNamespace(loop=clock, forget=lambda _: None)
    exchange, connection = HttpExchange(http, Limits(1.0, READ_S, 3600.0, 1000)), FakeConnection()
    encoded_request: Any = SimpleNamespace(head=b"", body=b"", is_bodiless=False)
    exchange.send(connection, encoded_request)  # type: ignore[arg-type]
    return exchange, connection


# -- limits of an exchange --------------------------------------------------------------------------------------


def test_an_exchange_that_receives_does_not_time_out(clock, sent_exchange):
    exchange, connection = sent_exchange
    for _ in range(20):
        clock.advance(READ_S * 0.9)
        connection.last_received_s = clock.now_s
    clock.advance(READ_S * 0.9)
    assert not exchange.reply.done()
    clock.advance(READ_S * 0.2)
    assert exchange.reply.result(0).reason is FailureReason.TIMEOUT


def test_an_exchange_that_sends_does_not_time_out(clock, sent_exchange):
    exchange, connection = sent_exchange
    for sent in range(20):
        connection.bytes_unsent = 20 - sent
        clock.advance(READ_S)
    assert not exchange.reply.done()
    for _ in range(2):
        clock.advance(READ_S)
    assert exchange.reply.result(0).reason is FailureReason.TIMEOUT


def test_an_exchange_without_progress_times_out_after_read_s(clock, sent_exchange):
    exchange, connection = sent_exchange
    clock.advance(READ_S * 0.99)
    assert not exchange.reply.done()
    clock.advance(READ_S * 0.02)
    reply = exchange.reply.result(0)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.TIMEOUT and connection.is_closed


def test_an_exchange_that_has_ended_has_no_timer(clock, sent_exchange):
    exchange, _ = sent_exchange
    exchange.on_complete()
    clock.advance(2 * 3600)
    assert isinstance(exchange.reply.result(0), Response)


# -- heads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("a", "b\nc: d"), ("a", "b\x00"), ("a:b", "c"), ("", "c"), ("a\n", "c"), ("a", "ż")]
)
def test_no_header_can_hold_another(name, value):
    with pytest.raises(ValueError, match=r"header|codec"):
        _encode_head("POST", parse_endpoint("http://a/"), "/", {"x": "y", name: value}, b"")


def test_given_headers_are_sent_after_the_default_headers():
    endpoint = parse_endpoint("http://u:p@a:81/x%20y?z#f")
    lines = _encode_head("POST", endpoint, endpoint.target, {"X-A": "1", "user-agent": "mine"}, b"12").split(b"\r\n")
    assert lines == [
        *(b"POST /x%20y?z HTTP/1.1", b"Host: a:81", b"Authorization: Basic dTpw", b"Accept: */*"),
        *(b"Accept-Encoding: identity", b"Content-Length: 2", b"X-A: 1", b"user-agent: mine", b"", b""),
    ]


def test_only_a_request_that_may_have_a_body_has_a_content_length():
    endpoint = parse_endpoint("http://a/")
    assert b"Content-Length" not in _encode_head("GET", endpoint, "/", {}, None)
    assert b"Content-Length: 0" in _encode_head("POST", endpoint, "/", {}, None)
    assert b"Content-Length: 1" in _encode_head("GET", endpoint, "/", {}, b"1")


# -- responses --------------------------------------------------------------------------------------------------


@pytest.fixture
def send_request(loop):
    """Return a function that sends one request in the event loop of `loop`, and returns its response."""

    def send(url: str, method: str = "POST", *, connect_s: float = 5.0, max_bytes: int = 10_000, body: bytes = b"1"):
        async def send_and_wait() -> Response | NoResponse:
            limits = Limits(connect_s, math.inf, time.monotonic() + 10, max_bytes)
            sent_body = None if method in ("GET", "HEAD") else body
            return await loop.http.send(method, parse_endpoint(url), "/x", {"a": "b"}, sent_body, limits).reply

        return loop.wait_for(send_and_wait())

    return send


def test_interim_responses_are_skipped(scripted, send_request):
    server = scripted(
        always(b"HTTP/1.1 100 Continue\r\nA: 1\r\n\r\nHTTP/1.1 103 Hints\r\n\r\n" + answer(b"x", b=" 2 "))
    )
    for _ in range(2):
        reply = send_request(server.url)
        assert (reply.status, reply.body) == (200, b"x")
        assert reply.headers["b"] == "2" and "a" not in reply.headers
    assert server.connections == 1


@pytest.mark.parametrize(
    "response",
    [
        answer(b"x") + b"HTTP/1.1 200 OK\r\n\r\n",
        answer(b"x") + b"garbage",
        answer(b"x", 500),
        answer(b"x", Connection="close"),
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
    ],
    ids=["second response", "garbage", "status 500", "connection: close", "http 1.0"],
)
def test_a_connection_is_not_reused_after_an_error_extra_data_or_a_close(scripted, send_request, response):
    server = scripted(always(response))
    assert send_request(server.url).body == send_request(server.url).body == b"x"
    assert server.connections == 2


def test_an_unrequested_response_is_not_the_response_to_the_next_request(scripted, send_request, loop):
    is_sent, may_continue = threading.Event(), threading.Event()

    def act(sock: socket.socket) -> None:
        sock.sendall(answer(b"first"))
        may_continue.wait(10)
        sock.sendall(answer(b"unrequested"))
        is_sent.set()

    server = scripted(lambda seen: act if seen.connection == 1 else answer(b"second"))
    assert send_request(server.url).body == b"first"
    may_continue.set()
    assert is_sent.wait(10)
    assert send_request(server.url).body == b"second" and server.connections == 2


@pytest.mark.parametrize("method", ["socket options", "peek"])
@pytest.mark.parametrize(
    "end", [hang_up, lambda sock: sock.sendall(answer(b"unrequested"))], ids=["closed", "unrequested data"]
)
def test_a_connection_that_the_server_has_just_closed_or_written_to_is_not_reused(
    scripted, send_request, loop, end, method, monkeypatch
):
    if method == "peek":
        monkeypatch.setattr(http_connection, "_TCP_INFO", None)
    has_ended, may_end = threading.Event(), threading.Event()

    def act(sock: socket.socket) -> None:
        sock.sendall(answer(b"first"))
        may_end.wait(10)
        end(sock)
        has_ended.set()

    server = scripted(lambda seen: act if seen.connection == 1 else answer(b"second"))
    assert send_request(server.url).body == b"first"

    async def send_next() -> Response | NoResponse:
        may_end.set()
        assert has_ended.wait(10)  # This blocks the event loop, so that it does not notice the end.
        limits = Limits(5.0, math.inf, time.monotonic() + 10, 1000)
        return await loop.http.send("POST", parse_endpoint(server.url), "/x", {}, b"1", limits).reply

    assert loop.wait_for(send_next()).body == b"second"


def test_a_response_without_a_length_ends_with_its_connection(scripted, send_request):
    def act(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\nthe whole body")
        hang_up(sock)

    assert send_request(scripted(always(act)).url).body == b"the whole body"


@pytest.mark.parametrize("head", [b"", b"Content-Length: 10\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_an_answer_that_is_cut_is_none(scripted, send_request, head):
    def act(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n" + head + (b"\r\n5\r\nhalf" if head else b""))
        hang_up(sock)

    reply = send_request(scripted(always(act)).url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET


@pytest.mark.parametrize("head", [b"100 Continue\r\nConnection: close", b"000 What\r\nConnection: close"])
def test_an_interim_response_that_closes_the_connection_is_no_response(scripted, send_request, head):
    reply = send_request(scripted(always(b"HTTP/1.1 " + head + b"\r\nContent-Length: 0\r\n\r\n")).url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET


def test_an_empty_compressed_body_is_empty(scripted, send_request):
    assert send_request(scripted(always(answer(b"", Content_Encoding="gzip"))).url).body == b""


def test_the_response_to_a_head_request_has_no_body(scripted, send_request):
    server = scripted(always(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"))
    assert send_request(server.url, "HEAD").body == b"" and send_request(server.url, "HEAD").status == 200


def test_the_length_of_a_response_head_is_limited(scripted, send_request):
    server = scripted(always(b"HTTP/1.1 200 OK\r\nA: " + b"x" * (_MAX_HEAD_BYTES + 1)))
    reply = send_request(server.url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET


def test_trailers_are_limited_and_are_not_headers(scripted, send_request):
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nA: "
    reply = send_request(scripted(always(head + b"1\r\n\r\n")).url)
    assert reply.body == b"x" and "a" not in reply.headers
    reply = send_request(scripted(always(head + b"x" * 2 * _MAX_HEAD_BYTES)).url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET


TINY = b"2\r\nab\r\n"


def chunked(count: int, piece: bytes = TINY) -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + piece * count + b"0\r\n\r\n"


def test_a_body_in_tiny_pieces_yields_the_event_loop_after_each_turn(scripted, loop, monkeypatch):
    """If a turn has no time, at most two slices are parsed in one iteration of the event loop."""
    monkeypatch.setattr(http_connection, "_TURN_S", 0.0)
    server = scripted(always(chunked(60_000)))

    async def largest_step() -> tuple[Response | NoResponse, int]:
        exchange = loop.http.send(
            "GET", parse_endpoint(server.url), "/x", {}, None, Limits(5.0, math.inf, time.monotonic() + 60, 1 << 20)
        )
        before = largest = 0
        while not exchange.reply.done():
            await asyncio.sleep(0)
            received = sum(one.bytes_received for one in loop.http._open)
            before, largest = received, max(largest, received - before)
        return exchange.reply.result(), largest

    reply, largest = loop.wait_for(largest_step())
    assert isinstance(reply, Response) and reply.body == b"ab" * 60_000
    assert 0 < largest <= 2 * http_connection._SLICE_BYTES


def test_many_connections_with_tiny_pieces_take_turns(scripted, loop, monkeypatch):
    monkeypatch.setattr(http_connection, "_TURN_S", 0.0)
    server = scripted(always(chunked(20_000)))

    async def send_four() -> list[Response | NoResponse]:
        limits = Limits(5.0, math.inf, time.monotonic() + 60, 1 << 20)
        exchanges = [loop.http.send("GET", parse_endpoint(server.url), "/x", {}, None, limits) for _ in range(4)]
        return [await exchange.reply for exchange in exchanges]

    assert [reply.body for reply in loop.wait_for(send_four())] == [b"ab" * 20_000] * 4


def test_received_data_that_are_not_parsed_yet_are_parsed_when_the_connection_closes(scripted, loop, monkeypatch):
    monkeypatch.setattr(http_connection, "_TURN_S", 0.0)

    def act(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000)
        hang_up(sock)

    async def send_and_wait() -> Response | NoResponse:
        limits = Limits(5.0, math.inf, time.monotonic() + 60, 1 << 20)
        return await loop.http.send("GET", parse_endpoint(scripted(always(act)).url), "/x", {}, None, limits).reply

    assert loop.wait_for(send_and_wait()).body == b"x" * 100_000


def test_a_body_of_too_many_pieces_is_refused(scripted, send_request, monkeypatch):
    monkeypatch.setattr(http_connection, "_MAX_PIECES", 1000)
    assert send_request(scripted(always(chunked(1000))).url).body == b"ab" * 1000
    reply = send_request(scripted(always(chunked(1001))).url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.TOO_MANY_PIECES


def test_the_size_of_a_decompressed_body_is_limited(scripted, send_request):
    server = scripted(always(answer(gzip.compress(b"x" * 1000), Content_Encoding="gzip")))
    assert send_request(server.url, max_bytes=1000).body == b"x" * 1000
    reply = send_request(server.url, max_bytes=999)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.TOO_LARGE


_GZIPPED = gzip.compress(b"x" * 1000)


@pytest.mark.parametrize(
    "body",
    [_GZIPPED[:-9], _GZIPPED[:5], _GZIPPED + b"more", _GZIPPED + _GZIPPED, b"no gzip"],
    ids=["truncated", "truncated header", "data after the end", "two members", "not compressed"],
)
def test_a_body_that_cannot_be_decompressed_is_damaged(scripted, send_request, body):
    reply = send_request(scripted(always(answer(body, Content_Encoding="gzip"))).url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.DAMAGED


def test_a_large_request_body_is_sent_completely(scripted, send_request):
    server = scripted(always(answer(b"x")))
    assert send_request(server.url, body=bytes(1 << 20)).body == b"x"
    assert server.seen[0].body == bytes(1 << 20)


# -- bodies -----------------------------------------------------------------------------------------------------

_BODY_PIECE = bytes(range(256)) * 256


def _body_of(size: int) -> ResponseBody:
    body = ResponseBody()
    while body.size < size:
        body.add(_BODY_PIECE)
    return body


def test_a_small_body_stays_in_memory() -> None:
    assert _body_of(SPOOL_AFTER_BYTES).whole() == (_BODY_PIECE * (SPOOL_AFTER_BYTES // len(_BODY_PIECE)), None)


def test_only_the_beginning_of_a_large_body_stays_in_memory() -> None:
    beginning, file = _body_of(3 * SPOOL_AFTER_BYTES).whole()
    assert file is not None and file.size == 3 * SPOOL_AFTER_BYTES
    assert len(beginning) < SPOOL_AFTER_BYTES and beginning == file.read(0, len(beginning))
    assert file.read(0, file.size) == _BODY_PIECE * (file.size // len(_BODY_PIECE))


@pytest.mark.parametrize("fails_at", [0, 1, 7])
def test_if_the_disk_is_full_a_large_body_stays_in_memory(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    offsets = []
    pwrite = large_json.os.pwrite

    def fail_later(fd: int, piece: Any, offset: int) -> int:
        offsets.append(offset)
        if len(offsets) > fails_at:
            pwrite(fd, piece[:10], offset)
            raise OSError(28, "No space left on device")
        return pwrite(fd, piece, offset)

    monkeypatch.setattr(large_json.os, "pwrite", fail_later)
    body, file = _body_of(3 * SPOOL_AFTER_BYTES).whole()
    assert file is None and body == _BODY_PIECE * (3 * SPOOL_AFTER_BYTES // len(_BODY_PIECE))


def test_if_no_file_can_be_created_a_large_body_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    body, file = _body_of(2 * SPOOL_AFTER_BYTES).whole()
    assert file is None and body == _BODY_PIECE * (2 * SPOOL_AFTER_BYTES // len(_BODY_PIECE))


# -- connections ------------------------------------------------------------------------------------------------


def test_the_next_address_of_a_host_is_tried_while_one_does_not_accept(
    scripted, send_request, loop, monkeypatch, silent_address
):
    server = scripted(always(answer(b"x")))
    tcp = (socket.AF_INET, socket.SOCK_STREAM, 6, "")

    async def two_addresses(*_: object, **__: object) -> list[Any]:
        return [(*tcp, ("127.0.0.2", silent_address)), (*tcp, ("127.0.0.1", server.port))]

    monkeypatch.setattr(loop.http.loop, "getaddrinfo", two_addresses)
    assert send_request(f"http://name.test:{server.port}", connect_s=5.0).body == b"x"


def test_an_exchange_that_is_cut_off_while_it_connects_sends_nothing(scripted, loop):
    server = scripted(always(answer(b"x")))

    async def send_and_cut_off() -> Response | NoResponse:
        limits = Limits(5.0, math.inf, time.monotonic() + 10, 1000)
        exchange = loop.http.send("POST", parse_endpoint(server.url), "/", {}, b"1", limits)
        exchange.cut_off()
        return await exchange.reply

    reply = loop.wait_for(send_and_cut_off())
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.CONNECT and server.seen == []


def test_no_request_is_sent_over_a_new_connection_that_is_already_closed(scripted, send_request, loop, monkeypatch):
    create_connection = loop.http.loop.create_connection

    async def create_and_close(*args: Any, **options: Any) -> Any:
        transport, connection = await create_connection(*args, **options)
        transport.abort()
        while not connection.is_closed:
            await asyncio.sleep(0)
        return transport, connection

    monkeypatch.setattr(loop.http.loop, "create_connection", create_and_close)
    reply = send_request(scripted(always(answer(b"x"))).url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.CONNECT and not loop.http._open


def test_cutting_off_an_ended_exchange_does_not_close_the_connection_of_the_next_one(scripted, send_request, loop):
    server = scripted(always(answer(b"x")))

    async def send_two() -> Response | NoResponse:
        limits = Limits(5.0, math.inf, time.monotonic() + 10, 1000)
        first = loop.http.send("POST", parse_endpoint(server.url), "/", {}, b"1", limits)
        await first.reply
        second = loop.http.send("POST", parse_endpoint(server.url), "/", {}, b"2", limits)
        first.cut_off()
        return await second.reply

    assert loop.wait_for(send_two()).body == b"x" and server.connections == 1


def test_a_connection_that_was_idle_for_too_long_is_closed(scripted, send_request, loop, monkeypatch):
    closed = threading.Event()

    def act(sock: socket.socket) -> None:
        sock.sendall(answer(b"x"))
        sock.recv(1)
        closed.set()

    monkeypatch.setattr(http_connection, "MAX_IDLE_S", 0.01)
    assert send_request(scripted(always(act)).url).body == b"x"
    assert closed.wait(10)


def test_a_closed_client_has_no_open_connection(scripted, send_request, loop):
    closed = threading.Event()

    def act(sock: socket.socket) -> None:
        sock.sendall(answer(b"x"))
        sock.recv(1)
        closed.set()

    assert send_request(scripted(always(act)).url).body == b"x"
    loop.soon(loop.http.close)
    assert closed.wait(10)


def test_a_call_from_a_thread_closes_its_connection(scripted):
    closed = threading.Event()

    def act(sock: socket.socket) -> None:
        sock.sendall(answer({"active_jobs": 0}))
        sock.recv(1)
        closed.set()

    assert call_server(ServerAdapter(scripted(always(act)).url), ServerSession.health).kind is HealthKind.UP
    assert closed.wait(10)
