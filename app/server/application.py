"""The ASGI application: it reads requests, has Flask answer them in threads, and keeps those that wait in the loop."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any

import structlog

from app.auth.api_keys import KeyCache, Owner, OwnerKind
from app.config import AppSettings
from app.deferred import CAN_DEFER, FollowEvents, WaitForJob
from app.request_deadline import ANSWER_UNTIL
from app.server.event_feed import EventFeed
from app.server.event_stream import EventStream
from app.server.fair_pool import ClientGone, FairPool, QueueFull, TurnLate
from app.server.http_protocol import EXTENSION, ConnectionLimits, LimitedHttpProtocol
from app.server.wsgi import Refusal, Response, Wsgi, build_environ, call_wsgi
from routing.progress import ProgressFollower
from slotkeeper.db import Database
from slotkeeper.errors import SlotkeeperError

log = structlog.get_logger(__name__)

KEYS_EVERY_S = 5.0
_TICK_S = 1.0
_HEAVY = 256 << 10  # bytes of a body that takes long to parse
_DISCARDS_S = 5.0  # for which a client whose request is refused may send the rest: else it may never read why
_PUSH, _PAGE = "/tasks/callback/", "/page/"
_KEYLESS = ("/health/", _PUSH, "/docs", "/openapi.json", _PAGE)  # The log-in is a form of the page.
_MOST_FORM_BYTES = 256 << 10
_MOST_STRANGERS_BYTES = 2048  # The log-in has two short fields.


class PlaceLimit:
    """Places that are bounded for each owner, and for all together."""

    def __init__(self, most: int, share: int) -> None:
        self.most, self.share = most, max(share, 1)
        self.taken: Counter[str] = Counter()

    @contextmanager
    def take(self, account: str) -> Iterator[bool]:
        """Hold one; False: there is none."""
        free = self.taken.total() < self.most and self.taken[account] < self.share
        self.taken[account] += free
        try:
            yield free
        finally:
            self.taken[account] -= free
            self.taken += Counter()  # Owners that hold none are forgotten.


class HttpRequest:
    """One request, and what has come of it."""

    owner: Owner
    key_s: float  # how long it took to find the owner

    def __init__(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        self.connection: LimitedHttpProtocol = scope["extensions"][EXTENSION]["connection"]
        self.receive, self._send = receive, send
        self.environ, self.version = build_environ(scope), scope["http_version"]
        self.path: str = self.environ["PATH_INFO"]
        self.length = int(self.environ.get("CONTENT_LENGTH") or 0)
        self.body = bytearray()
        self.complete = not self.length and "HTTP_TRANSFER_ENCODING" not in self.environ
        self.whole = True  # False: Flask is asked without its body, to refuse it.
        self.close = False  # the connection, after it

    async def start(self, response: Response) -> None:
        headers = [*response.headers, (b"connection", b"close")] if self.close else response.headers
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send more of the response, when what was sent before has left."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def disconnected(self) -> None:
        """Discard what comes, until the client has left."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


class WebApplication:
    """Called by uvicorn, in the event loop's thread only."""

    def __init__(
        self,
        wsgi: Wsgi,
        settings: AppSettings,
        owners: KeyCache,
        most_connections: int,
        database: Database,
        watching: ProgressFollower,
    ) -> None:
        """`watching`: the progress of jobs, for those who follow one."""
        self.settings, self._wsgi, self._owners, self.watching = settings, wsgi, owners, watching
        self.capacity = ConnectionLimits(settings, most_connections, self.stop)
        self.stopping = False
        self.feed = EventFeed(database)
        self._request_s = database.limits.request_s
        # Without keys all clients are one owner.  With keys one tenant has a quarter of the threads, as each of them
        # competes with the loop for the interpreter, and half of the places.
        threads, waiting, streams = settings.web_threads, settings.max_waiting_requests, settings.max_streams
        has_keys = settings.require_keys
        self.waiting = PlaceLimit(waiting, waiting // 2 if has_keys else waiting)
        self.streams = PlaceLimit(streams, settings.max_tenant_streams if has_keys else streams)
        self.general = FairPool("web", threads, threads // 4 if has_keys else threads)
        self._history = FairPool("history", 2, 1, streams)
        self._operators = FairPool("operators", 4, 4)
        self._heavy = FairPool("heavy", 1, 1)  # The JSON parser keeps all other threads waiting.
        self._pushes = FairPool("pushes", 8, 6)
        self._strangers = FairPool("strangers", 2, 1)
        self._readiness = FairPool("readiness", 1, 1)  # Of a probe, which shows no key and may not wait for strangers.
        self._open: dict[EventStream, tuple[HttpRequest, asyncio.Task[None]]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = HttpRequest(scope, receive, send)
        try:
            try:
                await self._answer(request)
            except Refusal as refusal:
                await self._respond(request, refusal.response(request.path))
        except Exception as error:
            if not isinstance(error, ClientGone):
                log.error("connection_failed", path=request.path, exc_info=error)
            if not request.connection.is_refused:
                request.connection.abort()
            await request.disconnected()

    async def _answer(self, request: HttpRequest) -> None:
        began = time.monotonic()
        request.owner = await self._owners.owner_of(request.environ)
        request.key_s = time.monotonic() - began
        if request.owner.kind in (OwnerKind.OPERATOR, OwnerKind.TENANT):
            self.capacity.mark_active(request.connection, trusted=True)
        await self._receive(request)
        request.environ[CAN_DEFER] = request.environ["REQUEST_METHOD"] == "GET"
        if request.path == "/health/live":
            response = self._call(request)()  # It reads nothing, and waits for no thread that others keep busy.
        else:
            response = await self._ask(self._pool_of(request), request)
        if isinstance(response.goes_on, FollowEvents):
            await self._stream(request, response, response.goes_on)
        elif isinstance(response.goes_on, WaitForJob):
            await self._respond(request, await self._wait(request, response, response.goes_on))
        else:
            await self._respond(request, response)

    # -- with a thread ---------------------------------------------------------------------------------------------

    async def _receive(self, request: HttpRequest) -> None:
        """Read the body, or as much as it takes to refuse it.  Raises Refusal, and Gone."""
        settings, owner, began = self.settings, request.owner, asyncio.get_running_loop().time()
        limit, request.close = self._limit_of(request), not request.complete
        wants_key = settings.require_keys and not request.path.startswith(_KEYLESS)
        request.whole = request.complete or not (
            (wants_key and owner.kind is OwnerKind.ANONYMOUS) or request.length > limit
        )
        while request.whole and not request.complete:
            earned_s = len(request.body) / settings.body_min_rate
            try:
                async with asyncio.timeout_at(began + settings.body_timeout_s + earned_s):
                    message = await request.receive()
            except TimeoutError:
                raise Refusal(
                    408, "request_too_slow", "The request did not arrive in time; nothing was done."
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            size, is_local = len(message["body"]), owner.kind is OwnerKind.LOCAL
            if not self.capacity.reserve_bytes(request.connection, owner.account, size, whole=is_local):
                told = "You send too much at once; let what you have begun end first."
                raise Refusal(429, "too_many_bytes", told, 1)
            request.body += message["body"]
            request.complete, request.whole = not message["more_body"], len(request.body) <= limit
        if request.whole:
            request.close = False
        else:
            request.environ["CONTENT_LENGTH"] = str(max(request.length, limit + 1))
            request.environ.pop("HTTP_TRANSFER_ENCODING", None)
            request.body.clear()

    def _limit_of(self, request: HttpRequest) -> int:
        """Return the largest body that is taken at this address."""
        path, is_stranger = request.path, request.owner.kind is OwnerKind.ANONYMOUS
        if is_stranger and not path.startswith(_PUSH):
            return min(_MOST_STRANGERS_BYTES, self.settings.max_body_bytes)
        if path == "/queue/submit-batch":
            return self.settings.max_batch_bytes
        if path.startswith(_PAGE):
            return min(_MOST_FORM_BYTES, self.settings.max_body_bytes)
        return self.settings.max_push_bytes if path.startswith(_PUSH) else self.settings.max_body_bytes

    def _pool_of(self, request: HttpRequest) -> FairPool:
        if request.path.startswith(_PUSH):
            return self._pushes
        if request.path == "/health/ready":
            return self._readiness
        if request.owner.kind is OwnerKind.ANONYMOUS:
            return self._strangers
        if len(request.body) > _HEAVY:
            return self._heavy
        return (
            self._operators if request.owner.kind is OwnerKind.OPERATOR and not self.general.has_room else self.general
        )

    async def _ask(self, pool: FairPool, request: HttpRequest) -> Response:
        """Have a thread call Flask.  Raises Refusal, and Gone."""
        longest_s = self._request_s - request.key_s
        request.environ[ANSWER_UNTIL] = time.monotonic() + longest_s
        try:
            asked = self._call(request)
            # Large requests wait for one another, however long each takes.
            longest_wait_s = None if pool is self._heavy else longest_s
            return await pool.run(
                request.owner.account, asked, lambda: not request.connection.has_disconnected, longest_wait_s
            )
        except QueueFull:
            request.close = True  # Else the next that has come on this connection would be refused at once, too.
            raise Refusal(429, "too_many_requests", "Too many of your requests wait already.", 1) from None
        except TurnLate:
            told = "No thread was free for it in time, and nothing was done; try again."
            raise Refusal(503, "overloaded", told, 1) from None

    def _call(self, request: HttpRequest) -> Callable[[], Response]:
        body = bytes(request.body)
        request.body.clear()
        return partial(call_wsgi, self._wsgi, request.environ, body, whole=request.whole)

    async def _respond(self, request: HttpRequest, response: Response) -> None:
        self.capacity.release_bytes(request.connection)
        if not self.capacity.reserve_bytes(request.connection, request.owner.account, len(response.body), whole=True):
            raise ClientGone
        await request.start(response)
        await request.write(response.body)
        if not request.complete:
            with suppress(TimeoutError):
                async with asyncio.timeout(_DISCARDS_S):
                    while (await request.receive()).get("more_body"):
                        pass
        await request.write(b"", more=False)
        self.capacity.release_bytes(request.connection)

    # -- without -----------------------------------------------------------------------------------------------------

    async def _wait(self, request: HttpRequest, response: Response, until: WaitForJob) -> Response:
        """Ask Flask once more when the job has ended, or the time is over."""
        with self.waiting.take(request.owner.account) as has_place:
            if not has_place or self.stopping:
                return response
            request.connection.waits_for_event = True
            either = [
                asyncio.create_task(self.feed.wait_for_end(until.job_id)),
                asyncio.create_task(request.disconnected()),
            ]
            await asyncio.wait(either, timeout=until.seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in either:
                task.cancel()
            request.connection.waits_for_event = False
        request.environ[CAN_DEFER] = False
        try:
            return await self._ask(self.general, request)
        except Refusal:
            return response

    async def _stream(self, request: HttpRequest, response: Response, following: FollowEvents) -> None:
        """Send events until the job has ended, the client has left, its key was removed, or the process stops."""
        account, connection = request.owner.account, request.connection
        with self.streams.take(account) as has_place:
            if not has_place or self.stopping:
                told = "As many streams are open as may be; close one, or ask for the jobs themselves now and then."
                raise Refusal(429, "too_many_streams", told, 5)
            if request.version == "1.0":
                raise Refusal(505, "http_version", "HTTP/1.0 cannot tell a stream's end; ask by HTTP/1.1.")
            response.headers = [it for it in response.headers if it[0].lower() != b"content-length"]
            request.close = connection.waits_for_event = True
            await request.start(response)
            stream = EventStream(
                following, self.feed, self.watching, partial(self._history.run, account), connection.abort
            )
            sending = asyncio.create_task(_send(request, stream))
            left = asyncio.create_task(request.disconnected())
            self._open[stream] = request, sending
            await asyncio.wait((sending, left), return_when=asyncio.FIRST_COMPLETED)
            sending.cancel()
            left.cancel()
            del self._open[stream]
            await asyncio.wait((sending,))
            if not sending.cancelled() and (error := sending.exception()) is not None:
                raise ClientGone if isinstance(error, SlotkeeperError) else error  # Its client comes again.
        await request.write(b"", more=False)

    # -- time --------------------------------------------------------------------------------------------------------

    async def run_timeouts(self) -> None:
        """Close what takes too long, and read the keys now and then."""
        keys_due, evicted = self.capacity.now(), 0
        while True:
            now = self.capacity.now()
            for connection in self.capacity.connections():
                connection.check_timeouts(now)
            for stream in self._open:
                stream.check_time(now)
            if self.capacity.evicted > evicted:
                log.warning("connections_gave_way", count=self.capacity.evicted - evicted)
                evicted = self.capacity.evicted
            if now >= keys_due:
                keys_due = now + KEYS_EVERY_S
                self._refreshing = asyncio.create_task(self._refresh_keys())
            await asyncio.sleep(_TICK_S)

    async def _refresh_keys(self) -> None:
        """A stream may last for days: it ends when its key is none any more."""
        await self._owners.refresh()
        for request, sending in self._open.values():
            if not self._owners.is_still_valid(request.owner, request.environ):
                sending.cancel()

    def stop(self) -> None:
        """Begin no more waiting, and end what waits; what is begun is answered."""
        if not self.stopping:
            self.stopping = True
            self.feed.wake_waiters()
            self.watching.stop()
            for _, sending in self._open.values():
                sending.cancel()


async def _send(request: HttpRequest, stream: EventStream) -> None:
    async with aclosing(stream.chunks()) as texts:
        async for text in texts:
            await request.write(text)
