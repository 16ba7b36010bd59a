"""What all connections of the process share: rules, threads, and the application."""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import structlog

from app.config import AppSettings
from app.later import TAKES_OVER, Following, UntilEnded
from app.web.crowd import Crowd
from app.web.feed import Feed
from app.web.gateway import Answer, Application, answer
from app.web.hall import Errand, Lane
from app.web.owners import Kind, Owner, Owners, TooManyKeys
from app.web.places import Places
from app.web.request import Request
from app.web.stream import Stream
from database.db import Database
from insight.said import Watching

if TYPE_CHECKING:
    from app.web.connection import Connection

log = structlog.get_logger(__name__)

_TICK_S = 1.0
_KEYS_EVERY_S, _KEYS_REST = 5.0, 30
_AT_ONCE = 32 << 10  # bytes; what comes before its turn is kept as it is
_HEAVY = 256 << 10  # bytes of a body that takes long to read
_MOST_WAITING = 1024  # requests of one owner
_MOST_LOOKED_UP = 64  # keys at one address
_STREAM_AGAIN_S = 5
_PUSH = "/tasks/callback/"
_LIVE = "/health/live"
_PAGE = "/page/"  # Its forms are read also from strangers: one of them is the log-in.
_MOST_FORM_BYTES = 256 << 10
_Then: TypeAlias = Callable[[], object]  # named here, or each request would make it anew
_KEYLESS = ("/health/", _PUSH, "/docs", "/openapi.json", _PAGE)


class Door:
    """Called from the event loop's thread only, but for what runs in the lanes'."""

    def __init__(
        self,
        application: Application,
        settings: AppSettings,
        owners: Owners,
        loop: asyncio.AbstractEventLoop,
        most_connections: int,
        record: Database,
    ) -> None:
        self._application, self.settings, self._owners, self._loop = application, settings, owners, loop
        self.crowd = Crowd(most_connections, settings.max_buffered_bytes)
        self.stopping = False
        self.now: Callable[[], float] = time.monotonic
        self._watching: Watching | None = None
        self._record, self._feed = record, Feed(record, self._soon)
        working, waiting, streams = settings.web_threads, settings.max_waiting_requests, settings.max_streams
        # Who shows no key because none is asked for is alone; else half of them stay for the other tenants.
        owners_at_once = 2 if settings.require_keys else 1
        self._general = self._lane("web", working, working // owners_at_once)
        self._waiting = Places(waiting, waiting // owners_at_once)
        self._streams = Places(streams, settings.max_tenant_streams if settings.require_keys else streams)
        self._history = self._lane("history", 2, 1, streams)
        self._operators = self._lane("operators", 4, 4)
        self._heavy = self._lane("heavy", 1, 1)  # The parser keeps all other threads waiting; never two in a row.
        self._pushes = self._lane("pushes", 8, 6)
        self._strangers = self._lane("strangers", 2, 1)
        self._live = self._lane("live", 1, 1)
        self._keys = self._lane("keys", 2, 1, _MOST_LOOKED_UP)
        self._told_evicted = 0
        self.arriving = bytearray(_AT_ONCE)  # what is taken from the system, of one connection after another
        self._open: dict[Stream, tuple[Request, float]] = {}  # streams, by whom and since when
        self._keys_due = 0.0  # when they are read again

    def watch_by(self, watching: Watching) -> None:
        """Streams of jobs tell from now on what their servers say, too."""
        self._watching = watching

    def _lane(self, name: str, threads: int, share: int, most_waiting: int = _MOST_WAITING) -> Lane:
        return Lane(name, threads, share, self._soon, most_waiting)

    def _soon(self, function: Callable[..., object], *args: object) -> None:
        """From a lane's thread: run it in the event loop's."""
        with suppress(RuntimeError):  # The loop is closed: the process ends.
            self._loop.call_soon_threadsafe(function, *args)

    # -- rules -----------------------------------------------------------------------------------------------

    def limit_of(self, path: str) -> int:
        """Largest body that is taken at this address."""
        if path == "/queue/submit-batch":
            return self.settings.max_batch_bytes
        if path.startswith(_PAGE):
            return min(_MOST_FORM_BYTES, self.settings.max_body_bytes)
        return self.settings.max_push_bytes if path.startswith(_PUSH) else self.settings.max_body_bytes

    def wants_key(self, path: str) -> bool:
        """Whether a stranger is refused there whatever it sends."""
        return self.settings.require_keys and not path.startswith(_KEYLESS)

    def may_hold(self, connection: "Connection", request: Request, size: int) -> bool:
        return self.crowd.hold(connection, _payer(connection, request), size, whole=_may_hold_all(request))

    def hold_answer(self, connection: "Connection", request: Request, size: int) -> bool:
        return self.crowd.hold(connection, _payer(connection, request), size, whole=True)

    # -- requests --------------------------------------------------------------------------------------------

    def owner_of(self, connection: "Connection", request: Request) -> Owner | None:
        """Whose request it is; None: `connection.owned` is called when that is known.

        Raises TooManyKeys: nobody has time to find out.
        """
        assert request.environ is not None
        authorization = request.environ.get("HTTP_AUTHORIZATION", "")
        cookie = request.environ.get("HTTP_COOKIE", "")
        known = self._owners.known(authorization, connection.address, cookie)
        if known is not None:
            return known

        def look() -> _Then:
            return partial(told, self._owners.look_up(authorization, connection.address))

        def told(owner: Owner) -> None:
            self._owners.remember(authorization, owner)
            connection.owned(request, owner)

        if not self._keys.enter(Errand(connection.address, look, lambda: not connection.has_left)):
            raise TooManyKeys
        return None

    def serve(self, connection: "Connection", request: Request) -> None:
        """Have it answered, by `connection.answer`."""
        assert request.environ is not None
        whole = not request.unread
        body = bytes(request.body) if whole else b""
        if not whole:
            request.environ["CONTENT_LENGTH"] = str(max(request.announced or 0, request.limit + 1))
            request.environ.pop("HTTP_TRANSFER_ENCODING", None)
        request.body = bytearray()
        owner = _payer(connection, request)
        lane = self._lane_of(request, owner, len(body))
        request.environ[TAKES_OVER] = request.method == "GET"
        if not self._enter(lane, connection, request, body, owner, whole=whole):
            detail = "Too many of your requests wait already."
            request.close = True  # Else the next that has come on this connection would be refused at once, too.
            connection.answer(request, Answer.problem(429, "too_many_requests", detail, request.path, 1))

    def _enter(
        self, lane: Lane, connection: "Connection", request: Request, body: bytes, owner: str, *, whole: bool
    ) -> bool:
        """Have a thread ask the application.  False: too many requests of its owner wait already."""

        def work() -> _Then:
            request.begun = True
            try:
                found = answer(self._application, request.environ or {}, body, whole=whole)
            except Exception as error:  # The application answers its own; this is one of the server's.
                log.error("request_failed", path=request.path, exc_info=error)
                found = Answer.problem(500, "internal_error", "This is a fault of the server, and it is in its log.")
            return partial(self._deliver, connection, request, found)

        return lane.enter(Errand(owner, work, lambda: not connection.has_left))

    def _deliver(self, connection: "Connection", request: Request, found: Answer) -> None:
        try:
            if isinstance(found.goes_on, UntilEnded):
                self._wait(connection, request, found, found.goes_on)
            elif isinstance(found.goes_on, Following):
                self._stream(connection, request, found, found.goes_on)
            else:
                connection.answer(request, found)
        except Exception as error:  # Else the connection would stay open, and unanswered, for good.
            log.error("connection_failed", exc_info=error)
            connection.give_way()

    # -- requests that hold no thread ------------------------------------------------------------------------

    def _wait(self, connection: "Connection", request: Request, found: Answer, until: UntilEnded) -> None:
        """Ask the application once more when the job has ended, or the time is over."""
        owner = _payer(connection, request)
        if connection.has_left or self.stopping or not self._waiting.take(owner):
            connection.answer(request, found)
            return

        def leave() -> None:
            timer.cancel()
            connection.when_left = _nothing
            self._waiting.free(owner)
            self._feed.forget(until.job_id, again)

        def again() -> None:
            leave()
            assert request.environ is not None
            request.environ[TAKES_OVER] = False
            if not self._enter(self._general, connection, request, b"", owner, whole=True):
                connection.answer(request, found)

        request.begun = False
        timer = self._loop.call_later(until.seconds, again)
        connection.when_left = leave
        self._feed.wait_for(until.job_id, again)

    def _stream(self, connection: "Connection", request: Request, found: Answer, following: Following) -> None:
        owner = _payer(connection, request)
        if connection.has_left or self.stopping or not self._streams.take(owner):
            detail = "As many streams are open as may be; close one, or ask for the jobs themselves now and then."
            connection.answer(request, Answer.problem(429, "too_many_streams", detail, request.path, _STREAM_AGAIN_S))
            return
        stream = Stream(owner, connection, request, found, following, self._feed, self._record, self._history)
        if self._watching is not None:
            stream.hear(self._watching)

        def leave() -> None:
            del self._open[stream]
            self._streams.free(owner)
            stream.leave()

        self._open[stream] = request, self.now()

        connection.when_left = leave
        self._feed.follow(stream)

    def _lane_of(self, request: Request, owner: str, size: int) -> Lane:
        assert request.owner is not None
        if request.path == _LIVE:
            return self._live
        if request.path.startswith(_PUSH):
            return self._pushes
        if request.owner.kind is Kind.STRANGER:
            return self._strangers
        if size > _HEAVY:
            return self._heavy
        if request.owner.kind is Kind.OPERATOR and not self._general.has_room:
            return self._operators
        return self._general

    # -- time ------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Close what takes too long, read the keys now and then, and come back."""
        now = self.now()
        if now >= self._keys_due:
            self._keys_due = math.inf
            self._keys.enter(Errand("the record", self._read_keys))
        for guest in self.crowd.guests():
            try:
                guest.tick(now)
            except Exception as error:  # One connection's fault is no other's.
                log.error("connection_failed", exc_info=error)
                guest.give_way()
        if self.crowd.evicted > self._told_evicted:
            log.warning("connections_gave_way", count=self.crowd.evicted - self._told_evicted, open=len(self.crowd))
            self._told_evicted = self.crowd.evicted
        self._loop.call_later(_TICK_S, self.tick)

    def _read_keys(self) -> Callable[[], object] | None:
        """In a lane's thread.  However many there are, it takes a small part of the time."""
        began = self.now()
        has_changed = self._owners.refresh()
        took_s = self.now() - began
        self._keys_due = self.now() + max(_KEYS_EVERY_S, took_s * _KEYS_REST)
        return partial(self._end_streams_without_key, began) if has_changed else None

    def _end_streams_without_key(self, read_at: float) -> None:
        """A stream may last for days; whoever has lost its key since it was opened is told nothing more."""
        for stream, (request, opened) in list(self._open.items()):
            assert request.environ is not None and request.owner is not None
            shown = request.environ.get("HTTP_AUTHORIZATION", ""), request.environ.get("HTTP_COOKIE", "")
            if opened < read_at and not self._owners.may_stay(*shown, request.owner):
                stream.end()

    def stop(self) -> None:
        """Take no further requests; those that are being answered are."""
        self.stopping = True
        self._feed.stop()
        if self._watching is not None:
            self._watching.stop()
        for guest in self.crowd.guests():
            guest.close_if_idle()


def _nothing() -> None:
    pass


def _payer(connection: "Connection", request: Request) -> str:
    owner = request.owner
    return f"address {connection.address}" if owner is None or owner.kind is Kind.STRANGER else f"key {owner.name}"


def _may_hold_all(request: Request) -> bool:
    return request.owner is not None and request.owner.kind is Kind.LOCAL
