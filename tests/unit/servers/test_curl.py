"""One exchange in a loop: when it is given up."""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pycurl
import pytest

from tasks.servers.answers import Break, Broken
from tasks.servers.curl import _LARGE, Exchange, Wires, _headers, _lines
from tasks.servers.curl import Handle as RealHandle
from tasks.servers.wire import Limits


class Timer:
    """One call that a loop is to make later."""

    def __init__(self, at_s: float, act: Callable[[], None]) -> None:
        self.at_s, self.act = at_s, act

    def when(self) -> float:
        return self.at_s

    def cancel(self) -> None:
        self.at_s = math.inf


class Loop:
    """An event loop whose clock the test sets."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._timers: list[Timer] = []

    def create_future(self) -> Future[Any]:
        return Future()

    def time(self) -> float:
        return self._now_s

    def call_at(self, at_s: float, act: Callable[..., None], *args: Any) -> Timer:
        self._timers.append(Timer(at_s, lambda: act(*args)))
        return self._timers[-1]

    def call_later(self, seconds: float, act: Callable[..., None], *args: Any) -> Timer:
        return self.call_at(self._now_s + seconds, act, *args)

    def pass_by(self, seconds: float) -> None:
        self._now_s += seconds
        due = [timer for timer in self._timers if timer.at_s <= self._now_s]
        self._timers = [timer for timer in self._timers if timer not in due]
        for timer in due:
            timer.act()


class Handle:
    """In place of libcurl's: counts what the test says has come."""

    def __init__(self) -> None:
        self.come = 0

    def setopt(self, *_: object) -> None:
        pass

    say = setopt

    def getinfo(self, what: int) -> int:
        return self.come if what == pycurl.SIZE_DOWNLOAD_T else 0


READ_S = 4.0


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def anew(loop: Loop) -> tuple[Exchange, Handle]:
    """An exchange that was sent anew a moment after its first look, for its connection was found closed."""
    wires: Any = SimpleNamespace(loop=loop, is_stale=lambda *_: True, give_back=lambda _: None)
    wires.send_anew = lambda handle, exchange: exchange.begin(handle)
    exchange, handle = Exchange(wires, Limits(1.0, READ_S, time.monotonic() + 3600, 1000)), Handle()
    exchange.begin(handle)
    loop.pass_by(READ_S / 4)
    loop.pass_by(READ_S / 100)
    exchange.may_send("there", "here", 80, 50_000)
    exchange.end(pycurl.E_ABORTED_BY_CALLBACK)
    return exchange, handle


def test_an_answer_that_moves_is_waited_for_although_its_request_was_sent_anew(loop, anew):
    exchange, handle = anew
    for tick in range(200):
        handle.come = tick // 20  # a byte each fifth of READ_S
        loop.pass_by(READ_S / 100)
    assert not exchange.reply.done()


def test_an_answer_that_does_not_move_is_given_up_in_time_although_its_request_was_sent_anew(loop, anew):
    exchange, _ = anew
    loop.pass_by(READ_S / 100)
    for _ in range(4):
        assert not exchange.reply.done()
        loop.pass_by(READ_S / 4)
    reply = exchange.reply.result(0)
    assert isinstance(reply, Broken) and reply.how is Break.CONNECT


# -- when libcurl is called -------------------------------------------------------------------------------------


class Rung(Wires):
    """Notes when libcurl would be called."""

    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        self.rung: list[float] = []

    def _act(self, fd: int, what: int) -> None:
        self.rung.append(round(self.loop.time(), 3))


@pytest.mark.parametrize(
    ("wishes", "rung"),
    [
        ([500], [0.5]),
        ([500, 250], [0.25]),
        ([250, 500], [0.5]),
        ([250, 500, 125], [0.125]),
        ([250, -1], []),
        ([-1, 375], [0.375]),
        ([250, -1, 625], [0.625]),
    ],
)
def test_libcurl_is_called_once_and_when_it_last_wanted_to_be(loop, wishes, rung):
    wires = Rung(loop)
    for wish in wishes:
        wires._set_timer(wish)
    for _ in range(8):
        loop.pass_by(0.125)
    assert wires.rung == rung


# -- a handle is used again -------------------------------------------------------------------------------------


class Told(RealHandle):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Any]] = []
        super().__init__(("POST", True))

    def setopt(self, option: int, value: Any) -> None:
        self.told.append((option, value))


def test_a_handle_is_told_again_what_has_changed_and_all_that_goes_with_it():
    handle = Told()
    handle.lead_to("http://a/")
    handle.lead_to("http://a/", anew=True)
    handle.told.clear()
    handle.lead_to("http://a/", anew=True)
    assert handle.told == []
    handle.lead_to("http://a/")
    assert (pycurl.FRESH_CONNECT, 0) in handle.told


def test_what_was_found_closed_is_asked_by_a_new_connection(loop, monkeypatch):
    wires, handle = Wires(loop), Told()
    monkeypatch.setattr(wires, "_multi", SimpleNamespace(remove_handle=lambda _: None))
    monkeypatch.setattr(wires, "_send", lambda *_: None)
    handle.lead_to("http://a/")
    exchange = Exchange(wires, Limits(1.0, READ_S, time.monotonic() + 3600, 1000))
    wires._under_way[handle] = exchange
    handle.told.clear()
    wires.send_anew(handle, exchange)
    assert (pycurl.FRESH_CONNECT, 1) in handle.told and handle.exchange is exchange


def test_a_handle_keeps_nothing_of_what_it_has_carried():
    handle: Any = Told()
    handle.exchange = object()
    handle.carry([b"a: b"], b"x" * (_LARGE + 1))
    handle.head.append(b"HTTP/1.1 200 OK")
    handle.forget()
    assert handle.exchange is None and handle.head == []
    assert handle.told[-1] == (pycurl.POSTFIELDS, b"")
    assert handle._may_send("there", "here", 80, 50_000) == pycurl.PREREQFUNC_ABORT and handle._take(b"late") == 0


# -- heads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("a", "b\nc: d"), ("a", "b\x00"), ("a:b", "c"), ("", "c")])
def test_no_header_can_hold_another(name, value):
    with pytest.raises(ValueError, match="header"):
        _lines({"x": "y", name: value})


def test_headers_are_written_beside_those_that_are_always_said():
    assert _lines({"X-A": "1", "x-b": "", "user-agent": "mine"}) == [
        *(b"X-A: 1", b"x-b;", b"user-agent: mine"),
        *(b"User-Agent: slotkeeper", b"Accept: */*", b"Expect:", b"Content-Type:"),
    ]
    assert b"Content-Type:" not in _lines({"content-type": "application/json"})


def test_the_last_head_counts_and_only_if_it_is_whole():
    early, late = [b"HTTP/1.1 100 Continue\r\n", b"A: 1\r\n", b"\r\n"], [b"HTTP/1.1 200 OK\r\n", b"b : 2\r\n"]
    assert _headers([*early, *late]) is None and _headers([]) is None
    head = _headers([*early, *late, b"\r\n", b"Trailer: 3\r\n"])
    assert head is not None and dict(head) == {"b": "2"}
    assert head.get("B") == "2" and head.get("A") is None and "b" in head
