"""Exchanges of one event loop: what `wire` does in a thread, by libcurl, for as many servers at once as there are.

What is promised is the same: never retried, never redirected, bounded in time and size, and exact about whether the
request can have reached the server.  libcurl asks us before it sends.  We say no where the connection is a kept one
that the server has closed meanwhile, and try once more on a new one, for nothing was sent; and we say no where it
asks a second time, to send again what may have been received.
"""

import asyncio
import socket
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import certifi
import pycurl
import requests

from tasks.servers import wire
from tasks.servers.answers import Answer, Break, Broken
from tasks.servers.wire import MESSAGES, Limits

_MOST_KEPT = 4096  # connections, and handles for exchanges
_LOOK_EVERY = 4  # times within `read_s` it is looked whether anything has moved
_Address = tuple[str, int]
_BODILESS = frozenset({"GET", "HEAD"})
_UNSENDABLE = frozenset({pycurl.E_URL_MALFORMAT, pycurl.E_UNSUPPORTED_PROTOCOL})
_OURS = {"User-Agent": "slotkeeper", "Accept": "*/*"}
_NOT_CURLS = ["Expect:", "Content-Type:"]  # without a value: what curl would say by itself is not said


class Exchange:
    """One question under way.  `reply` is a future for what `wire.exchange` answers."""

    __slots__ = (
        "_body",
        "_handle",
        "_head",
        "_is_stale",
        "_limits",
        "_moved",
        "_sent",
        "_size",
        "_timer",
        "_wires",
        "reply",
    )

    def __init__(self, wires: "Wires", limits: Limits) -> None:
        self.reply: asyncio.Future[Answer | Broken] = wires.loop.create_future()
        self._wires = wires
        self._limits = limits
        self._handle: Any = None
        self._sent = False
        self._is_stale = False  # It would have left by a connection that was closed at the other end.
        self._head: list[bytes] = []
        self._body: list[bytes] = []
        self._size = 0
        self._moved = -1  # bytes, when it was last looked; -1: it was not yet
        self._timer: asyncio.TimerHandle | None = None

    def cut(self) -> None:
        """Nobody waits for the answer any more.  What the server makes of that is its own affair."""
        self.break_off(Break.RESET if self._sent else Break.CONNECT)

    def begin(self, handle: Any) -> None:
        """Called once more if nothing has left yet: what was seen of the first try says nothing of the second."""
        self._stop_looking()
        self._handle, self._moved = handle, -1
        limits = self._limits
        left_s = limits.deadline - time.monotonic()
        handle.setopt(pycurl.TIMEOUT_MS, _ms(left_s))
        handle.setopt(pycurl.CONNECTTIMEOUT_MS, _ms(min(limits.connect_s, left_s)))
        handle.setopt(pycurl.MAXFILESIZE_LARGE, limits.max_bytes)
        handle.setopt(pycurl.PREREQFUNCTION, self._may_send)
        handle.setopt(pycurl.HEADERFUNCTION, self._head.append)
        handle.setopt(pycurl.WRITEFUNCTION, self._take)
        if limits.read_s < left_s:
            self._timer = self._wires.loop.call_later(limits.read_s / _LOOK_EVERY, self._look, 0)

    def end(self, error: int) -> None:
        """libcurl has done with it; `error` 0: there is a whole answer."""
        if error == 0:
            self._answered()
        elif self._is_stale and not self._sent:
            self._is_stale = False
            self._wires.send_anew(self._handle, self)
        elif error == pycurl.E_FILESIZE_EXCEEDED or self._size > self._limits.max_bytes:
            self.break_off(Break.TOO_LARGE)
        elif not self._sent:
            self.break_off(Break.UNSENDABLE if error in _UNSENDABLE else Break.CONNECT)
        else:
            self.break_off(Break.TIMEOUT if error == pycurl.E_OPERATION_TIMEDOUT else Break.RESET)

    def _answered(self) -> None:
        head = _headers(self._head)
        if head is None:  # The connection ended within the head; libcurl takes that for a whole answer.
            self.break_off(Break.RESET)
        else:
            status = self._handle.getinfo(pycurl.RESPONSE_CODE)
            if status == wire.FAILED_INSIDE:
                self._wires.doubt(self._handle.getinfo(pycurl.LOCAL_IP), self._handle.getinfo(pycurl.LOCAL_PORT))
            self._finish(Answer(status, head, b"".join(self._body)))

    def break_off(self, how: Break) -> None:
        self._finish(Broken(how, MESSAGES[how]))

    def _finish(self, reply: Answer | Broken) -> None:
        self._stop_looking()
        handle, self._handle = self._handle, None
        if handle is not None:
            self._wires.give_back(handle)
        if not self.reply.done():
            self.reply.set_result(reply)

    def _may_send(self, _there: str, here: str, _their_port: int, our_port: int) -> int:
        self._is_stale = self._wires.is_stale(here, our_port)
        if self._sent or self._is_stale:
            return pycurl.PREREQFUNC_ABORT
        self._sent = True
        return pycurl.PREREQFUNC_OK

    def _take(self, piece: bytes) -> int | None:
        self._size += len(piece)
        if self._size > self._limits.max_bytes:
            return 0  # Not what it is long: libcurl gives up.
        self._body.append(piece)
        return None

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, still: int) -> None:
        """Give up when nothing has moved for `read_s`."""
        moved = sum(map(self._handle.getinfo, (pycurl.SIZE_UPLOAD_T, pycurl.SIZE_DOWNLOAD_T, pycurl.HEADER_SIZE)))
        still, self._moved = (still + 1 if moved == self._moved else 1), moved
        if still > _LOOK_EVERY - 1:
            self.break_off(Break.TIMEOUT if self._sent else Break.CONNECT)
        else:
            self._timer = self._wires.loop.call_later(self._limits.read_s / _LOOK_EVERY, self._look, still)


class Wires:
    """All connections of one event loop, to be used by its thread alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._multi.setopt(pycurl.M_MAXCONNECTS, _MOST_KEPT)
        self._timer: asyncio.TimerHandle | None = None
        self._idle: list[Any] = []
        self._under_way: dict[Any, Exchange] = {}
        self._connections: dict[_Address, socket.socket] = {}  # by our end's address; it is libcurl that closes them
        self._ends: dict[int, _Address] = {}  # by file descriptor
        self._doubted: set[_Address] = set()
        self._new: set[_Address] = set()  # connections of which the file descriptor is not known yet

    def begin(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, limits: Limits) -> Exchange:
        """Ask once, as `wire.exchange`.  The request has left, or is waiting for its connection, when this returns."""
        exchange = Exchange(self, limits)
        if limits.deadline <= time.monotonic():
            exchange.reply.set_result(Broken(Break.CONNECT, "there was no time left to ask"))
            return exchange
        handle = self._idle.pop() if self._idle else _new_handle()
        try:
            handle.setopt(pycurl.URL, _address(url))
            handle.setopt(pycurl.HTTPHEADER, _lines(headers))
            _set_body(handle, method, body)
        except (ValueError, requests.RequestException):
            handle.close()
            exchange.break_off(Break.UNSENDABLE)
            return exchange
        handle.setopt(pycurl.MAXAGE_CONN, max(int(wire.MAX_IDLE_S), 1))
        handle.setopt(pycurl.FRESH_CONNECT, wire.MAX_IDLE_S <= 0)
        exchange.begin(handle)
        self._send(handle, exchange)
        return exchange

    def send_anew(self, handle: Any, exchange: Exchange) -> None:
        """Nothing has left yet: once more, by a new connection.  Its time goes on."""
        self._under_way.pop(handle)
        self._multi.remove_handle(handle)
        handle.setopt(pycurl.FRESH_CONNECT, 1)
        exchange.begin(handle)
        self._send(handle, exchange)

    def is_stale(self, here: str, port: int) -> bool:
        """Whether the other end of a connection is closed, or about to be, or has said what nobody asked for."""
        end = (here, port)
        if end in self._doubted:
            self._doubted.discard(end)
            return True
        known = self._connections.get(end)
        if known is not None and _end_of(known) == end:
            return _has_something_to_say(known)
        self._new.add(end)
        return False

    def doubt(self, here: str, port: int) -> None:
        """This connection is not used again: its server is about to close it."""
        self._doubted.add((here, port))

    def give_back(self, handle: Any) -> None:
        """Its exchange is over; one that has not come to its end breaks off with its connection."""
        if self._under_way.pop(handle, None) is not None:
            self._multi.remove_handle(handle)
        handle.reset()
        if len(self._idle) < _MOST_KEPT:
            _prepare(handle)
            self._idle.append(handle)

    def close(self) -> None:
        for exchange in list(self._under_way.values()):
            exchange.cut()
        if self._timer is not None:
            self._timer.cancel()
        self._multi.close()
        for end in list(self._connections):
            self._forget(end)

    def _send(self, handle: Any, exchange: Exchange) -> None:
        self._under_way[handle] = exchange
        self._multi.add_handle(handle)
        self._act(pycurl.SOCKET_TIMEOUT, 0)

    def _note_connection(self, fd: int) -> None:
        try:
            found = socket.socket(fileno=fd)
        except OSError:  # libcurl has also other things watched than connections
            return
        end = _end_of(found)
        if end not in self._new:
            found.detach()
            return
        self._new.discard(end)
        self._forget(end)
        self._forget(self._ends.get(fd))
        self._connections[end], self._ends[fd] = found, end

    def _forget(self, end: _Address | None) -> None:
        """The file descriptor may be another's by now: it is not closed here."""
        if end in self._connections:
            self._connections.pop(end).detach()

    def _watch(self, event: int, fd: int, *_: object) -> None:
        if self._new:
            self._note_connection(fd)
        self.loop.remove_reader(fd)
        self.loop.remove_writer(fd)
        if event in (pycurl.POLL_IN, pycurl.POLL_INOUT):
            self.loop.add_reader(fd, self._act, fd, pycurl.CSELECT_IN)
        if event in (pycurl.POLL_OUT, pycurl.POLL_INOUT):
            self.loop.add_writer(fd, self._act, fd, pycurl.CSELECT_OUT)

    def _set_timer(self, ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if ms < 0 else self.loop.call_later(ms / 1000, self._act, pycurl.SOCKET_TIMEOUT, 0)

    def _act(self, fd: int, what: int) -> None:
        self._multi.socket_action(fd, what)
        while True:
            left, done, failed = self._multi.info_read()
            for handle in done:
                self._under_way[handle].end(0)
            for handle, error, _ in failed:
                self._under_way[handle].end(error)
            if not left:
                return


def _end_of(connection: socket.socket) -> _Address | None:
    """Our end's address; None: it was closed."""
    try:
        return connection.getsockname()[:2]
    except OSError:
        return None


def _has_something_to_say(connection: socket.socket) -> bool:
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _new_handle() -> Any:
    handle = pycurl.Curl()
    _prepare(handle)
    return handle


def _prepare(handle: Any) -> None:
    """What is the same for all exchanges: nothing is taken from the environment, followed or kept."""
    for option, value in _ALWAYS:
        handle.setopt(option, value)


_ALWAYS = (
    (pycurl.NOSIGNAL, 1),
    (pycurl.PROXY, ""),
    (pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1),
    (pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS),
    (pycurl.CAINFO, certifi.where()),
    # No compression is asked for: it costs more than the local network does; but it is understood.
    (pycurl.ACCEPT_ENCODING, "identity"),
    (pycurl.PATH_AS_IS, 1),
    (pycurl.TCP_NODELAY, 1),
)


def _set_body(handle: Any, method: str, body: bytes | None) -> None:
    if method == "HEAD":
        handle.setopt(pycurl.NOBODY, 1)
    elif body is not None or method not in _BODILESS:
        handle.setopt(pycurl.POST, 1)
        handle.setopt(pycurl.POSTFIELDS, body or b"")
    handle.setopt(pycurl.CUSTOMREQUEST, method)


def _lines(headers: Mapping[str, str]) -> list[bytes]:
    """Raises ValueError: they cannot be written as a header."""
    given = [_line(name, value) for name, value in {**_OURS, **headers}.items()]
    said = {name.lower() for name in headers}
    return [*given, *(line.encode() for line in _NOT_CURLS if line[:-1].lower() not in said)]


@lru_cache(maxsize=4096)
def _line(name: str, value: str) -> bytes:
    line = f"{name}: {value}" if value else f"{name};"
    if not line.isprintable() or ":" in name or not name:
        raise ValueError("this cannot be written as a header")
    return line.encode("latin-1")


@lru_cache(maxsize=4096)
def _address(url: str) -> str:
    """As requests would write it.  Raises ValueError and requests' errors."""
    prepared = requests.PreparedRequest()
    prepared.prepare_url(url, None)
    assert prepared.url is not None
    return prepared.url


class _Head(dict[str, str]):
    """Headers by their names, however those are written."""

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


def _headers(lines: list[bytes]) -> Mapping[str, str] | None:
    """Of the last head that came, for others were only on the way to it; None: it is not whole."""
    found, is_whole = _Head(), False
    for line in lines:
        if line.startswith(b"HTTP/"):
            found, is_whole = _Head(), False
        elif not line.strip():
            is_whole = True
        elif not is_whole:  # What follows the body is no head.
            name, _, value = line.partition(b":")
            found[name.decode("latin-1").strip().lower()] = value.decode("latin-1").strip()
    return found if is_whole else None


def _ms(seconds: float) -> int:
    return max(int(seconds * 1000), 1)
