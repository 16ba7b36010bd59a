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
from tasks.servers.curl import Exchange
from tasks.servers.wire import Limits


class Timer:
    """One call that a loop is to make later."""

    def __init__(self, at_s: float, act: Callable[[], None]) -> None:
        self.at_s, self.act = at_s, act

    def cancel(self) -> None:
        self.at_s = math.inf


class Loop:
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


class Handle:
    """In place of libcurl's: counts what the test says has come."""

    def __init__(self) -> None:
        self.come = 0

    def setopt(self, *_: object) -> None:
        pass

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
    exchange._may_send("there", "here", 80, 50_000)
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
