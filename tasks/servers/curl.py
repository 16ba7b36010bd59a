"""Exchanges of one event loop: what `wire` does in a thread, by libcurl, for as many servers at once as there are.

What is promised is the same: never retried, never redirected, bounded in time and size, and exact about whether the
request can have reached the server.  libcurl asks us before it sends.  We say no where the connection is a kept one
that the server has closed meanwhile, and try once more on a new one, for nothing was sent; and we say no where it
asks a second time, to send again what may have been received.
"""

import asyncio
import math
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from functools import lru_cache
from typing import Any, TypeAlias

import certifi
import pycurl
import requests

from tasks.servers import wire
from tasks.servers.answers import Answer, Break, Broken
from tasks.servers.stream import Hearing
from tasks.servers.wire import MESSAGES, STREAM_GRACE_S, Limits

_MOST_KEPT = 4096  # connections, and handles for exchanges
_EARLY_S = 0.001  # so much earlier than it wants libcurl may be called: it counts in milliseconds
_LOOK_EVERY = 4  # times within `read_s` it is looked whether anything has moved
_LARGE = 64 * 1024  # bytes of a request that an idle handle does not keep
_Address = tuple[str, int]
Kind: TypeAlias = tuple[str, bool]
"""Of a request: its method, and whether it has a body."""
_LOOK_ONLY = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_BODILESS = frozenset({"GET", "HEAD"})
_UNSENDABLE = frozenset({pycurl.E_URL_MALFORMAT, pycurl.E_UNSUPPORTED_PROTOCOL})
_OURS = {"User-Agent": "slotkeeper", "Accept": "*/*"}
_NOT_CURLS = ["Expect:", "Content-Type:"]  # without a value: what curl would say by itself is not said


class Exchange:
    """One question under way.  `reply` is a future for what `wire.exchange` answers."""

    __slots__ = (
        "_body",
        "_handle",
        "_hearing",
        "_is_stale",
        "_limits",
        "_listening",
        "_moved",
        "_sent",
        "_size",
        "_timer",
        "_wires",
        "reply",
    )

    def __init__(self, wires: "Wires", limits: Limits, hearing: Hearing | None = None) -> None:
        self.reply: asyncio.Future[Answer | Broken] = wires.loop.create_future()
        self._hearing = hearing
        self._listening: asyncio.TimerHandle | None = None
        self._wires = wires
        self._limits = limits
        self._handle: Handle | None = None
        self._sent = False
        self._is_stale = False  # It would have left by a connection that was closed at the other end.
        self._body: list[bytes] = []
        self._size = 0
        self._moved = -1  # bytes, when it was last looked; -1: it was not yet
        self._timer: asyncio.TimerHandle | None = None

    def cut(self) -> None:
        """Nobody waits for the answer any more.  What the server makes of that is its own affair."""
        self.break_off(Break.RESET if self._sent else Break.CONNECT)

    def begin(self, handle: "Handle") -> None:
        """Called once more if nothing has left yet: what was seen of the first try says nothing of the second."""
        self._stop_looking()
        self._handle, self._moved = handle, -1
        limits = self._limits
        left_s = limits.deadline - time.monotonic()
        handle.exchange = self
        handle.setopt(pycurl.TIMEOUT_MS, _ms(left_s))
        handle.say(
            (pycurl.CONNECTTIMEOUT_MS, _ms(min(limits.connect_s, left_s))),
            (pycurl.MAXFILESIZE_LARGE, limits.max_bytes),
        )
        if limits.read_s < left_s:
            self._timer = self._wires.loop.call_later(limits.read_s / _LOOK_EVERY, self._look, 0)

    def end(self, error: int) -> None:
        """libcurl has done with it; `error` 0: there is a whole answer."""
        if error == 0:
            self._answered()
        elif self._is_stale and not self._sent and self._handle is not None:
            self._is_stale = False
            self._wires.send_anew(self._handle, self)
        elif error == pycurl.E_FILESIZE_EXCEEDED or self._size > self._limits.max_bytes:
            self.break_off(Break.TOO_LARGE)
        elif not self._sent:
            self.break_off(Break.UNSENDABLE if error in _UNSENDABLE else Break.CONNECT)
        else:
            self.break_off(Break.TIMEOUT if error == pycurl.E_OPERATION_TIMEDOUT else Break.RESET)

    def _answered(self) -> None:
        assert self._handle is not None
        head = _headers(self._handle.head)
        if head is None:  # The connection ended within the head; libcurl takes that for a whole answer.
            self.break_off(Break.RESET)
        else:
            status = self._handle.getinfo(pycurl.RESPONSE_CODE)
            if status == wire.FAILED_INSIDE:
                self._wires.doubt(self._handle.getinfo(pycurl.LOCAL_IP), self._handle.getinfo(pycurl.LOCAL_PORT))
            if self._hearing is not None and not self._body and not self._hearing.is_stream:
                self._hearing.opens(status, head)  # It was a stream of nothing.
            self._finish(Answer(status, head, b"".join(self._body)))

    def break_off(self, how: Break) -> None:
        self._finish(Broken(how, MESSAGES[how]))

    def _finish(self, reply: Answer | Broken) -> None:
        self._stop_looking()
        if self._listening is not None:
            self._listening.cancel()
        handle, self._handle = self._handle, None
        if handle is not None:
            self._wires.give_back(handle)
        if not self.reply.done():
            self.reply.set_result(reply)

    def may_send(self, _there: str, here: str, _their_port: int, our_port: int) -> int:
        self._is_stale = self._wires.is_stale(here, our_port)
        if self._sent or self._is_stale:
            return pycurl.PREREQFUNC_ABORT
        self._sent = True
        return pycurl.PREREQFUNC_OK

    def take(self, piece: bytes) -> int | None:
        self._size += len(piece)
        if self._size > self._limits.max_bytes:
            return 0  # Not what it is long: libcurl gives up.
        if self._hearing is None or not self._listens(self._hearing):
            self._body.append(piece)
            return None
        was_over = self._hearing.is_over
        self._hearing.take(piece)
        if self._hearing.is_broken_off:
            return 0
        if self._hearing.is_over and not was_over:
            self._stop_looking()
            self._timer = self._wires.loop.call_later(STREAM_GRACE_S, self.break_off, Break.RESET)
        return None

    def _listens(self, hearing: Hearing) -> bool:
        """Whether the answer is a stream, which its head tells when the first of its body is here."""
        if self._size and not self._body and not hearing.is_stream:
            assert self._handle is not None
            head = _headers(self._handle.head)
            if head is not None and hearing.opens(_status(self._handle.head), head):
                self._listen_on(hearing)
        return hearing.is_stream

    def _listen_on(self, hearing: Hearing) -> None:
        """Give up when only signs of life come."""
        if hearing.is_silent:
            self.break_off(Break.TIMEOUT)
        elif self._handle is not None and not hearing.is_over and hearing.silent_s < math.inf:
            pause_s = hearing.silent_s / _LOOK_EVERY
            self._listening = self._wires.loop.call_later(pause_s, self._listen_on, hearing)

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, still: int) -> None:
        """Give up when nothing has moved for `read_s`."""
        assert self._handle is not None
        moved = sum(map(self._handle.getinfo, (pycurl.SIZE_UPLOAD_T, pycurl.SIZE_DOWNLOAD_T, pycurl.HEADER_SIZE)))
        still, self._moved = (still + 1 if moved == self._moved else 1), moved
        if still > _LOOK_EVERY - 1:
            self.break_off(Break.TIMEOUT if self._sent else Break.CONNECT)
        else:
            self._timer = self._wires.loop.call_later(self._limits.read_s / _LOOK_EVERY, self._look, still)


class Handle(pycurl.Curl):
    """One of libcurl's handles: for one exchange after another of its kind, what stays the same being said once."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.exchange: Exchange | None = None
        self.head: list[bytes] = []  # lines of the answer
        self.url = ""
        self._is_large = False  # Its body takes memory worth giving back.
        self._said: dict[int, tuple[tuple[int, Any], ...]] = {}
        for option, value in (*_ALWAYS, *_of_kind(kind)):
            self.setopt(option, value)
        self.setopt(pycurl.PREREQFUNCTION, self._may_send)
        self.setopt(pycurl.HEADERFUNCTION, self.head.append)
        self.setopt(pycurl.WRITEFUNCTION, self._take)

    def say(self, *options: tuple[int, Any]) -> None:
        """Set options that are always set together, if any of them was another the last time."""
        group = options[0][0]
        if self._said.get(group) != options:
            self._said[group] = options
            for option, value in options:
                self.setopt(option, value)

    def lead_to(self, url: str, *, anew: bool = False) -> None:
        """Where it is asked, and whether by a new connection."""
        self.url = url
        fresh = anew or wire.MAX_IDLE_S <= 0
        age = max(int(wire.MAX_IDLE_S), 1)
        self.say((pycurl.URL, url), (pycurl.MAXAGE_CONN, age), (pycurl.FRESH_CONNECT, int(fresh)))

    def carry(self, headers: list[bytes], body: bytes | None) -> None:
        """What is sent."""
        self.setopt(pycurl.HTTPHEADER, headers)
        if self.kind[1]:
            self.setopt(pycurl.POSTFIELDS, body or b"")
            self._is_large = len(body or b"") > _LARGE

    def forget(self) -> None:
        """Keep nothing of the exchange that is over."""
        self.exchange = None
        self.head.clear()
        if self._is_large:
            self.carry([], None)

    def _may_send(self, *ends: Any) -> int:
        return pycurl.PREREQFUNC_ABORT if self.exchange is None else self.exchange.may_send(*ends)

    def _take(self, piece: bytes) -> int | None:
        return 0 if self.exchange is None else self.exchange.take(piece)


class Wires:
    """All connections of one event loop, to be used by its thread alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._multi.setopt(pycurl.M_MAXCONNECTS, _MOST_KEPT)
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf  # when libcurl wants to be called, by the loop's clock
        self._is_adding = False  # It is about to be called anyway.
        self._watched: dict[int, int] = {}  # file descriptor -> what it is watched for
        self._idle: dict[Kind, list[Handle]] = defaultdict(list)
        self._under_way: dict[Handle, Exchange] = {}
        self._connections: dict[_Address, socket.socket] = {}  # by our end's address; it is libcurl that closes them
        self._ends: dict[int, _Address] = {}  # by file descriptor
        self._doubted: set[_Address] = set()
        self._new: set[_Address] = set()  # connections of which the file descriptor is not known yet

    def begin(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        limits: Limits,
        hearing: Hearing | None = None,
    ) -> Exchange:
        """Ask once, as `wire.exchange`.  The request has left, or is waiting for its connection, when this returns."""
        exchange = Exchange(self, limits, hearing)
        if limits.deadline <= time.monotonic():
            exchange.reply.set_result(Broken(Break.CONNECT, "there was no time left to ask"))
            return exchange
        kind = method, body is not None or method not in _BODILESS
        idle = self._idle[kind]
        handle = idle.pop() if idle else Handle(kind)
        try:
            handle.lead_to(_address(url))
            handle.carry(_lines(headers), body)
        except (ValueError, requests.RequestException):
            handle.close()
            exchange.break_off(Break.UNSENDABLE)
            return exchange
        exchange.begin(handle)
        self._send(handle, exchange)
        return exchange

    def send_anew(self, handle: Handle, exchange: Exchange) -> None:
        """Nothing has left yet: once more, by a new connection.  Its time goes on."""
        self._under_way.pop(handle)
        self._multi.remove_handle(handle)
        handle.lead_to(handle.url, anew=True)
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

    def give_back(self, handle: Handle) -> None:
        """Its exchange is over; one that has not come to its end breaks off with its connection."""
        if self._under_way.pop(handle, None) is not None:
            self._multi.remove_handle(handle)
        handle.forget()
        if len(self._idle[handle.kind]) < _MOST_KEPT:
            self._idle[handle.kind].append(handle)

    def close(self) -> None:
        for exchange in list(self._under_way.values()):
            exchange.cut()
        if self._timer is not None:
            self._timer.cancel()
        self._multi.close()
        for end in list(self._connections):
            self._forget(end)

    def _send(self, handle: Handle, exchange: Exchange) -> None:
        self._under_way[handle] = exchange
        self._is_adding = True
        self._multi.add_handle(handle)
        self._is_adding = False
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
        was, wanted = self._watched.pop(fd, 0), _WATCHED[event]
        if wanted:
            self._watched[fd] = wanted
        if was & ~wanted & pycurl.CSELECT_IN:
            self.loop.remove_reader(fd)
        if was & ~wanted & pycurl.CSELECT_OUT:
            self.loop.remove_writer(fd)
        if wanted & ~was & pycurl.CSELECT_IN:
            self.loop.add_reader(fd, self._act, fd, pycurl.CSELECT_IN)
        if wanted & ~was & pycurl.CSELECT_OUT:
            self.loop.add_writer(fd, self._act, fd, pycurl.CSELECT_OUT)

    def _set_timer(self, ms: int) -> None:
        """libcurl changes its mind several times in an exchange: a timer that rings too early is set once more."""
        self._due_s = math.inf if ms < 0 else self.loop.time() + ms / 1000
        if self._is_adding or (self._timer is not None and self._timer.when() <= self._due_s):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due_s < math.inf:
            self._timer = self.loop.call_at(self._due_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        left_s = self._due_s - self.loop.time()
        if left_s <= _EARLY_S:
            self._act(pycurl.SOCKET_TIMEOUT, 0)
        elif left_s < math.inf:
            self._timer = self.loop.call_at(self._due_s, self._ring)

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
        connection.recv(1, _LOOK_ONLY)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


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


_WATCHED = {
    pycurl.POLL_NONE: 0,
    pycurl.POLL_IN: pycurl.CSELECT_IN,
    pycurl.POLL_OUT: pycurl.CSELECT_OUT,
    pycurl.POLL_INOUT: pycurl.CSELECT_IN | pycurl.CSELECT_OUT,
    pycurl.POLL_REMOVE: 0,
}


def _of_kind(kind: Kind) -> Iterator[tuple[int, Any]]:
    """What is the same for all exchanges of a kind."""
    method, has_body = kind
    if method == "HEAD":
        yield pycurl.NOBODY, 1
    elif has_body:
        yield pycurl.POST, 1
    yield pycurl.CUSTOMREQUEST, method


def _lines(headers: Mapping[str, str]) -> list[bytes]:
    """Raises ValueError: they cannot be written as a header."""
    beside = _beside(frozenset(headers))
    lines = [f"{name}: {value}" if value else f"{name};" for name, value in headers.items()]
    if not "".join(lines).isprintable():
        raise ValueError("this cannot be written as a header")
    return [*"\n".join(lines).encode("latin-1").split(b"\n"), *beside] if lines else beside


@lru_cache(maxsize=1024)
def _beside(names: Set[str]) -> list[bytes]:
    """What is said beside headers of these names.  Raises ValueError: one of them is none."""
    if not all(names) or any(":" in name for name in names):
        raise ValueError("this cannot be the name of a header")
    said = {name.lower() for name in names}
    ours = [f"{name}: {value}".encode() for name, value in _OURS.items() if name not in names]
    return [*ours, *(line.encode() for line in _NOT_CURLS if line[:-1].lower() not in said)]


@lru_cache(maxsize=4096)
def _address(url: str) -> str:
    """As requests would write it.  Raises ValueError and requests' errors."""
    prepared = requests.PreparedRequest()
    prepared.prepare_url(url, None)
    assert prepared.url is not None
    return prepared.url


class _Head(Mapping[str, str]):
    """Headers by their names, however those are written.  Few of them are ever asked for."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines

    def __getitem__(self, name: str) -> str:
        wanted, found = name.lower().encode("latin-1"), None
        for line in self._lines:
            said, _, value = line.partition(b":")
            if said.strip().lower() == wanted:
                found = value
        if found is None:
            raise KeyError(name)
        return found.decode("latin-1").strip()

    def __iter__(self) -> Iterator[str]:
        return iter({line.partition(b":")[0].strip().lower().decode("latin-1"): None for line in self._lines})

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _headers(lines: list[bytes]) -> Mapping[str, str] | None:
    """Of the last head that came, for others were only on the way to it; None: it is not whole."""
    begins = max((n for n, line in enumerate(lines) if line.startswith(b"HTTP/")), default=0)
    for n in range(begins, len(lines)):
        if not lines[n].strip():  # What follows the body is no head.
            return _Head(lines[begins + 1 : n])
    return None


def _status(lines: list[bytes]) -> int:
    """Of the last head that came."""
    first = next(line for line in reversed(lines) if line.startswith(b"HTTP/"))
    return int(first.split(None, 2)[1])


def _ms(seconds: float) -> int:
    return max(int(seconds * 1000), 1)
