"""One exchange in a loop, and the connections that are kept for the next."""

import asyncio
import gzip
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.servers import HealthKind, ServerAdapter, ServerSession, call_server, http_connection
from tasks.servers.call import Limits
from tasks.servers.http_client import HttpExchange, _encode_head, _find_target, _head_template, _parse_target
from tasks.servers.http_connection import _MAX_HEAD_BYTES
from tasks.servers.responses import FailureReason, NoResponse, Response
from tests.support.scripted import always, answer, hang_up

READ_S = 4.0


class Timer:
    """One call that a loop is to make later."""

    def __init__(self, at_s: float, act: Callable[[], None]) -> None:
        self.at_s, self.act = at_s, act

    def cancel(self) -> None:
        self.at_s = math.inf


class Clock:
    """An event loop whose clock the test sets."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._timers: list[Timer] = []

    def create_future(self) -> Future[Any]:
        return Future()

    def call_later(self, seconds: float, act: Callable[..., None], *args: Any) -> Timer:
        self._timers.append(Timer(self._now_s + seconds, lambda: act(*args)))
        return self._timers[-1]

    def pass_by(self, seconds: float) -> None:
        self._now_s += seconds
        due = [timer for timer in self._timers if timer.at_s <= self._now_s]
        self._timers = [timer for timer in self._timers if timer not in due]
        for timer in due:
            timer.act()


class Counted:
    """In place of a connection: counts what the test says has come, and has left."""

    def __init__(self) -> None:
        self.bytes_received, self.bytes_unsent, self.is_closed = 0, 0, False

    def send_request(self, *_: object, **__: object) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sent(clock: Clock) -> tuple[HttpExchange, Counted]:
    """An exchange whose request has left."""
    http: Any = SimpleNamespace(loop=clock, forget=lambda _: None)
    exchange, connection = HttpExchange(http, Limits(1.0, READ_S, time.monotonic() + 3600, 1000)), Counted()
    words: Any = SimpleNamespace(head=b"", body=b"", is_bodiless=False)
    exchange.send(connection, words)  # type: ignore[arg-type]
    return exchange, connection


# -- when it is given up ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moves", ["bytes_received", "bytes_unsent"])
def test_an_exchange_that_moves_is_waited_for(clock, sent, moves):
    exchange, connection = sent
    for tick in range(200):
        setattr(connection, moves, tick // 20)  # a byte each fifth of READ_S
        clock.pass_by(READ_S / 100)
    assert not exchange.reply.done()


def test_an_exchange_that_does_not_move_is_given_up_in_time(clock, sent):
    exchange, connection = sent
    for _ in range(4):
        assert not exchange.reply.done()
        clock.pass_by(READ_S / 4)
    reply = exchange.reply.result(0)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.TIMEOUT and connection.is_closed


def test_an_exchange_that_is_over_leaves_no_timer(clock, sent):
    exchange, _ = sent
    exchange.on_complete()
    clock.pass_by(2 * 3600)
    assert isinstance(exchange.reply.result(0), Response)


# -- heads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("a", "b\nc: d"), ("a", "b\x00"), ("a:b", "c"), ("", "c"), ("a\n", "c"), ("a", "ż")]
)
def test_no_header_can_hold_another(name, value):
    with pytest.raises(ValueError, match=r"header|codec"):
        _encode_head("POST", _find_target("http://a/"), {"x": "y", name: value}, b"")


def test_of_a_head_nothing_is_remembered_that_only_one_run_says():
    _head_template.cache_clear()
    for n in range(3):
        head = _encode_head("GET", _find_target(f"http://a/status/{n}%20?prompt=p{n}"), {"X-Job-Id": f"job{n}%s"}, None)
        assert head.startswith(f"GET /status/{n}%20?prompt=p{n} HTTP/1.1\r\nHost: a\r\n".encode())
        assert f"X-Job-Id: job{n}%s\r\n".encode() in head
    assert _head_template.cache_info().currsize == 1


def test_headers_are_written_beside_those_that_are_always_said():
    lines = _encode_head(
        "POST", _find_target("http://a:81/x%20y?z#f"), {"X-A": "1", "user-agent": "mine"}, b"12"
    ).split(b"\r\n")
    assert lines == [
        *(b"POST /x%20y?z HTTP/1.1", b"Host: a:81", b"Accept: */*", b"Accept-Encoding: identity"),
        *(b"Content-Length: 2", b"X-A: 1", b"user-agent: mine", b"", b""),
    ]


def test_what_looks_like_a_place_for_a_value_is_written_as_it_is():
    lines = _encode_head("GET", _find_target("http://a/x%2Fy"), {"X-%s": "%s"}, None).split(b"\r\n")
    assert lines[0] == b"GET /x%2Fy HTTP/1.1" and b"X-%s: %s" in lines


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://a/", b"a"), ("http://a:80/", b"a"), ("https://a:80/", b"a:80"), ("http://[::1]:9/", b"[::1]:9")],
)
def test_a_host_is_named_with_a_port_that_is_not_its_schemes(url, host):
    assert b"\r\nHost: " + host + b"\r\n" in _encode_head("GET", _find_target(url), {}, None)


def test_many_addresses_of_one_server_are_remembered_as_one() -> None:
    _find_target("http://of-many/status/0")
    before = _parse_target.cache_info()
    for n in range(300):
        assert _find_target(f"http://of-many/status/job-{n}").path == f"/status/job-{n}"
    assert _parse_target.cache_info().misses == before.misses


@pytest.mark.parametrize(
    "path", ["", "/", "/a/b-1_2~3.4", "/a/", "//a", "/a//b", "/./a", "/a/../b", "/a b", "/a%2fb", "/ä", "/a?b", "/a#b"]
)
@pytest.mark.parametrize("at", ["http://a", "https://u:p@a:81", "http://[::1]:80", "http://A.example", "HTTP://a"])
def test_an_address_means_the_same_whether_it_is_remembered_or_not(at: str, path: str) -> None:
    assert _find_target(at + path) == _parse_target(at + path)


def test_who_stands_in_an_address_is_told_in_a_header():
    assert b"\r\nAuthorization: Basic dTpw\r\n" in _encode_head("GET", _find_target("http://u:p@a/"), {}, None)


def test_only_a_request_that_may_have_a_body_tells_its_length():
    target = _find_target("http://a/")
    assert b"Content-Length" not in _encode_head("GET", target, {}, None)
    assert b"Content-Length: 0" in _encode_head("POST", target, {}, None)
    assert b"Content-Length: 1" in _encode_head("GET", target, {}, b"1")


# -- answers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ask(loop):
    """Asks a server once, by the wires of a loop in a thread of its own."""

    def ask(url: str, method: str = "POST", *, connect_s: float = 5.0, max_bytes: int = 10_000, body: bytes = b"1"):
        async def asked() -> Response | NoResponse:
            limits = Limits(connect_s, math.inf, time.monotonic() + 10, max_bytes)
            sends = None if method in ("GET", "HEAD") else body
            return await loop.http.send(method, f"{url}/x", {"a": "b"}, sends, limits).reply

        return loop.wait_for(asked())

    return ask


def test_what_is_on_the_way_to_an_answer_is_none(scripted, ask):
    server = scripted(
        always(b"HTTP/1.1 100 Continue\r\nA: 1\r\n\r\nHTTP/1.1 103 Hints\r\n\r\n" + answer(b"x", b=" 2 "))
    )
    for _ in range(2):
        reply = ask(server.url)
        assert (reply.status, reply.body) == (200, b"x")
        assert reply.headers.get("B") == "2" and reply.headers.get("A") is None and "b" in reply.headers
    assert server.connections == 1


@pytest.mark.parametrize(
    "said",
    [
        answer(b"x") + b"HTTP/1.1 200 OK\r\n\r\n",
        answer(b"x") + b"garbage",
        answer(b"x", 500),
        answer(b"x", Connection="close"),
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
    ],
    ids=["another answer", "garbage", "it has failed inside", "it says so", "old"],
)
def test_after_such_an_answer_a_connection_is_not_used_again(scripted, ask, said):
    server = scripted(always(said))
    assert ask(server.url).body == ask(server.url).body == b"x"
    assert server.connections == 2


def test_what_comes_unasked_is_nobodys_answer(scripted, ask, loop):
    said, may_go_on = threading.Event(), threading.Event()

    def act(sock: socket.socket) -> None:
        sock.sendall(answer(b"first"))
        may_go_on.wait(10)
        sock.sendall(answer(b"unasked"))
        said.set()

    server = scripted(lambda seen: act if seen.connection == 1 else answer(b"second"))
    assert ask(server.url).body == b"first"
    may_go_on.set()
    assert said.wait(10)
    assert ask(server.url).body == b"second" and server.connections == 2


@pytest.mark.parametrize("system", ["tells", "has to be read ahead"])
@pytest.mark.parametrize("end", [hang_up, lambda sock: sock.sendall(answer(b"unasked"))], ids=["closed", "said more"])
def test_a_connection_whose_other_end_did_this_in_this_very_moment_is_not_used(
    scripted, ask, loop, end, system, monkeypatch
):
    if system != "tells":
        monkeypatch.setattr(http_connection, "_TCP_INFO", None)
    closed, may_close = threading.Event(), threading.Event()

    def act(sock: socket.socket) -> None:
        sock.sendall(answer(b"first"))
        may_close.wait(10)
        end(sock)
        closed.set()

    server = scripted(lambda seen: act if seen.connection == 1 else answer(b"second"))
    assert ask(server.url).body == b"first"

    async def at_once() -> Response | NoResponse:
        may_close.set()
        assert closed.wait(10)  # The loop stands still, and has not heard of it.
        limits = Limits(5.0, math.inf, time.monotonic() + 10, 1000)
        return await loop.http.send("POST", f"{server.url}/x", {}, b"1", limits).reply

    assert loop.wait_for(at_once()).body == b"second"


def test_an_answer_without_a_length_ends_with_its_connection(scripted, ask):
    def act(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        hang_up(sock)

    assert ask(scripted(always(act)).url).body == b"all of it"


@pytest.mark.parametrize("head", [b"", b"Content-Length: 10\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_an_answer_that_is_cut_is_none(scripted, ask, head):
    def act(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n" + head + (b"\r\n5\r\nhalf" if head else b""))
        hang_up(sock)

    reply = ask(scripted(always(act)).url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET


@pytest.mark.parametrize("said", [b"100 Continue\r\nConnection: close", b"000 What\r\nConnection: close"])
def test_what_is_on_the_way_to_an_answer_and_the_last_that_comes_is_none(scripted, ask, said):
    reply = ask(scripted(always(b"HTTP/1.1 " + said + b"\r\nContent-Length: 0\r\n\r\n")).url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET


def test_a_packed_answer_of_nothing_is_nothing(scripted, ask):
    assert ask(scripted(always(answer(b"", Content_Encoding="gzip"))).url).body == b""


def test_a_head_is_answered_without_a_body(scripted, ask):
    server = scripted(always(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"))
    assert ask(server.url, "HEAD").body == b"" and ask(server.url, "HEAD").status == 200


def test_an_endless_head_is_no_answer(scripted, ask):
    server = scripted(always(b"HTTP/1.1 200 OK\r\nA: " + b"x" * (_MAX_HEAD_BYTES + 1)))
    reply = ask(server.url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET


def test_what_follows_a_body_is_bounded_and_not_of_its_head(scripted, ask):
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nA: "
    reply = ask(scripted(always(head + b"1\r\n\r\n")).url)
    assert reply.body == b"x" and "a" not in reply.headers
    reply = ask(scripted(always(head + b"x" * 2 * _MAX_HEAD_BYTES)).url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET


TINY = b"2\r\nab\r\n"


def chunked(count: int, piece: bytes = TINY) -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + piece * count + b"0\r\n\r\n"


def test_a_body_in_tiny_pieces_leaves_the_loop_to_others_after_each_turn(scripted, loop, monkeypatch):
    """With a turn of no time at all, between two turns of the loop no more than two slices are parsed."""
    monkeypatch.setattr(http_connection, "_TURN_S", 0.0)
    server = scripted(always(chunked(60_000)))

    async def largest_step() -> tuple[Response | NoResponse, int]:
        exchange = loop.http.send(
            "GET", f"{server.url}/x", {}, None, Limits(5.0, math.inf, time.monotonic() + 60, 1 << 20)
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

    async def all_of_them() -> list[Response | NoResponse]:
        limits = Limits(5.0, math.inf, time.monotonic() + 60, 1 << 20)
        sent = [loop.http.send("GET", f"{server.url}/x", {}, None, limits) for _ in range(4)]
        return [await exchange.reply for exchange in sent]

    assert [reply.body for reply in loop.wait_for(all_of_them())] == [b"ab" * 20_000] * 4


def test_the_end_of_a_body_that_waits_for_its_turn_is_not_lost_with_the_connection(scripted, loop, monkeypatch):
    monkeypatch.setattr(http_connection, "_TURN_S", 0.0)

    def act(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000)
        hang_up(sock)

    async def asked() -> Response | NoResponse:
        limits = Limits(5.0, math.inf, time.monotonic() + 60, 1 << 20)
        return await loop.http.send("GET", f"{scripted(always(act)).url}/x", {}, None, limits).reply

    assert loop.wait_for(asked()).body == b"x" * 100_000


def test_a_body_of_too_many_pieces_is_no_answer(scripted, ask, monkeypatch):
    monkeypatch.setattr(http_connection, "_MAX_PIECES", 1000)
    assert ask(scripted(always(chunked(1000))).url).body == b"ab" * 1000
    reply = ask(scripted(always(chunked(1001))).url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.TOO_MANY_PIECES


def test_what_is_packed_is_bounded_as_it_is_unpacked(scripted, ask):
    server = scripted(always(answer(gzip.compress(b"x" * 1000), Content_Encoding="gzip")))
    assert ask(server.url, max_bytes=1000).body == b"x" * 1000
    reply = ask(server.url, max_bytes=999)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.TOO_LARGE


_PACKED = gzip.compress(b"x" * 1000)


@pytest.mark.parametrize(
    "packed",
    [_PACKED[:-9], _PACKED[:5], _PACKED + b"more", _PACKED + _PACKED, b"no gzip"],
    ids=["half", "not all of its head", "with more behind it", "twice", "not packed"],
)
def test_what_cannot_be_unpacked_is_no_answer(scripted, ask, packed):
    reply = ask(scripted(always(answer(packed, Content_Encoding="gzip"))).url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.DAMAGED


def test_a_large_request_arrives_whole(scripted, ask):
    server = scripted(always(answer(b"x")))
    assert ask(server.url, body=bytes(1 << 20)).body == b"x"
    assert server.seen[0].body == bytes(1 << 20)


# -- connections ------------------------------------------------------------------------------------------------


def test_the_next_address_of_a_name_is_tried_while_one_does_not_answer(
    scripted, ask, loop, monkeypatch, silent_address
):
    server = scripted(always(answer(b"x")))
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")

    async def two(*_: object, **__: object) -> list[Any]:
        return [(*kind, ("127.0.0.2", silent_address)), (*kind, ("127.0.0.1", server.port))]

    monkeypatch.setattr(loop.http.loop, "getaddrinfo", two)
    assert ask(f"http://name.test:{server.port}", connect_s=5.0).body == b"x"


def test_an_exchange_that_is_cut_while_it_connects_sends_nothing(scripted, loop):
    server = scripted(always(answer(b"x")))

    async def cut() -> Response | NoResponse:
        limits = Limits(5.0, math.inf, time.monotonic() + 10, 1000)
        exchange = loop.http.send("POST", server.url, {}, b"1", limits)
        exchange.cut_off()
        return await exchange.reply

    reply = loop.wait_for(cut())
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.CONNECT and server.seen == []


def test_a_connection_that_is_closed_before_the_request_leaves_by_it_carries_none(scripted, ask, loop, monkeypatch):
    connect = loop.http.loop.create_connection

    async def too_late(*args: Any, **more: Any) -> Any:
        transport, connection = await connect(*args, **more)
        transport.abort()
        while not connection.is_closed:
            await asyncio.sleep(0)
        return transport, connection

    monkeypatch.setattr(loop.http.loop, "create_connection", too_late)
    reply = ask(scripted(always(answer(b"x"))).url)
    assert isinstance(reply, NoResponse) and reply.reason is FailureReason.CONNECT and not loop.http._open


def test_an_exchange_that_is_cut_after_its_answer_leaves_the_next_its_connection(scripted, ask, loop):
    server = scripted(always(answer(b"x")))

    async def cut() -> Response | NoResponse:
        limits = Limits(5.0, math.inf, time.monotonic() + 10, 1000)
        first = loop.http.send("POST", server.url, {}, b"1", limits)
        await first.reply
        second = loop.http.send("POST", server.url, {}, b"2", limits)
        first.cut_off()
        return await second.reply

    assert loop.wait_for(cut()).body == b"x" and server.connections == 1


def test_connections_that_have_been_idle_for_long_are_closed(scripted, ask, loop, monkeypatch):
    closed = threading.Event()

    def act(sock: socket.socket) -> None:
        sock.sendall(answer(b"x"))
        sock.recv(1)
        closed.set()

    monkeypatch.setattr(http_connection, "MAX_IDLE_S", 0.01)
    assert ask(scripted(always(act)).url).body == b"x"
    assert closed.wait(10)


def test_wires_that_are_closed_leave_no_connection(scripted, ask, loop):
    closed = threading.Event()

    def act(sock: socket.socket) -> None:
        sock.sendall(answer(b"x"))
        sock.recv(1)
        closed.set()

    assert ask(scripted(always(act)).url).body == b"x"
    loop.soon(loop.http.close)
    assert closed.wait(10)


def test_a_call_from_a_thread_leaves_no_connection(scripted):
    closed = threading.Event()

    def act(sock: socket.socket) -> None:
        sock.sendall(answer({"active_jobs": 0}))
        sock.recv(1)
        closed.set()

    assert call_server(ServerAdapter(scripted(always(act)).url), ServerSession.health).kind is HealthKind.UP
    assert closed.wait(10)
