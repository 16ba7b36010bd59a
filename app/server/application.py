"""The ASGI application: reads requests, calls Flask in threads, and keeps waiting requests in the event loop."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import structlog

from app.auth.api_keys import LOCAL_OWNER, KeyCache, Owner, OwnerKind
from app.config import MAX_FORM_BYTES, AppSettings
from app.deferred import CAN_DEFER, FollowEvents, WaitForJob
from app.request_deadline import ANSWER_UNTIL
from app.server.event_feed import EventFeed
from app.server.event_stream import EventStream
from app.server.fair_pool import ClientGone, FairPool, QueueFull, TurnLate
from app.server.http_protocol import DISCARD_S, EXTENSION, ConnectionLimits, LimitedHttpProtocol
from app.server.line_stream import LineCutter, is_line_stream, is_lines_path, take_lines
from app.server.wsgi import Refusal, Response, Wsgi, build_environ, call_wsgi
from routing.progress import ProgressFollower
from slotkeeper.db import Database
from slotkeeper.errors import SlotkeeperError

log = structlog.get_logger(__name__)

KEYS_EVERY_S = 5.0
_TICK_S = 1.0
_HEAVY_BYTES = 256 << 10  # bytes; a larger body takes long to parse
_PUSH_PATH, _PAGE_PATH = "/tasks/callback/", "/page/"
_KEYLESS = (
    "/health/",
    _PUSH_PATH,
    "/nodes/enroll",
    "/docs",
    "/openapi.json",
    _PAGE_PATH,
)  # /page/ contains the log-in form.
_SLOWEST_BYTES = 1 << 10  # of lines, within `body_timeout_s`: a client may make them as it sends them
_MAX_ANONYMOUS_BYTES = 2048  # The log-in form has two short fields.


class PlaceLimit:
    """Limits places, such as open streams, for each account and in total."""

    def __init__(self, most: int, share: int) -> None:
        self.most, self.share = most, max(share, 1)
        self.taken: Counter[str] = Counter()

    @contextmanager
    def take(self, account: str) -> Iterator[bool]:
        """Context manager: hold a place.  Yields False if there is none."""
        free = self.taken.total() < self.most and self.taken[account] < self.share
        self.taken[account] += free
        try:
            yield free
        finally:
            self.taken[account] -= free
            self.taken += Counter()  # Removes accounts without a place.


class HttpRequest:
    """One request and its state."""

    owner: Owner
    key_s: float  # seconds that the lookup of the owner took

    def __init__(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        self.connection: LimitedHttpProtocol = scope["extensions"][EXTENSION]["connection"]
        self.receive, self._send = receive, send
        self.environ, self.version = build_environ(scope), scope["http_version"]
        self.path: str = self.environ["PATH_INFO"]
        self.length = int(self.environ.get("CONTENT_LENGTH") or 0)
        self.body = bytearray()
        self.is_complete = not self.length and "HTTP_TRANSFER_ENCODING" not in self.environ
        self.has_body = True  # False: Flask is called without the body, and refuses the request.
        self.close = False  # whether the connection is closed after the response

    async def start(self, response: Response) -> None:
        """Send the head of the response."""
        headers = [*response.headers, (b"connection", b"close")] if self.close else response.headers
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the response body, after the parts before were written to the network."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def disconnected(self) -> None:
        """Discard received data until the client disconnects."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


class WebApplication:
    """The application that uvicorn calls.  For the thread of the event loop only."""

    def __init__(
        self,
        wsgi: Wsgi,
        settings: AppSettings,
        key_cache: KeyCache | None,
        most_connections: int,
        database: Database,
        progress_follower: ProgressFollower,
        keep_watched: Callable[[Mapping[str, float]], object],
    ) -> None:
        """`key_cache` None: no keys are required.  `progress_follower`: delivers the progress of jobs to streams.

        keep_watched: is called each second, in a thread, with the jobs that clients wait for and that are canceled when
        none does, and their `cancel_when_gone`.
        """
        self.settings, self._wsgi = settings, wsgi
        self._key_cache, self.progress_follower = key_cache, progress_follower
        self.limits = ConnectionLimits(settings, most_connections, self.stop)
        self.stopping = False
        self.feed = EventFeed(database)
        self._request_s = database.limits.request_s
        # Without keys all clients are one owner.  With keys one tenant gets at most a quarter of the threads, because
        # each thread competes with the event loop for the interpreter, and at most half of the places.
        threads, waiting, streams = settings.web_threads, settings.max_waiting_requests, settings.max_streams
        has_keys = settings.require_keys
        self.waiting = PlaceLimit(waiting, waiting // 2 if has_keys else waiting)
        self.streams = PlaceLimit(streams, settings.max_tenant_streams if has_keys else streams)
        self.general = FairPool("web", threads, threads // 4 if has_keys else threads)
        self._missed_events = FairPool("history", 2, 1, streams)
        self._operators = FairPool("operators", 4, 4)
        self._heavy = FairPool("heavy", 1, 1)  # The JSON parser blocks all other threads.
        self._pushes = FairPool("pushes", 8, 6)
        self._anonymous = FairPool("anonymous", 2, 1)
        self._readiness = FairPool("readiness", 1, 1)  # Probes send no key, and must not wait for anonymous clients.
        self._open: dict[EventStream, tuple[HttpRequest, asyncio.Task[None]]] = {}
        self._keep_watched = keep_watched
        self._watching: Counter[tuple[str, float]] = Counter()  # (job, its cancel_when_gone): clients that wait for it
        self._renewing: asyncio.Task[object] | None = None

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
        cache = self._key_cache
        request.owner = LOCAL_OWNER if cache is None else await cache.owner_of(request.environ)
        request.key_s = time.monotonic() - began
        if request.owner.kind in (OwnerKind.OPERATOR, OwnerKind.TENANT):
            self.limits.mark_active(request.connection, trusted=True)
        if is_line_stream(request.environ) and request.owner.kind is not OwnerKind.ANONYMOUS:
            await self._respond(request, await self._take_lines(request))
            return
        await self._receive(request)
        request.environ[CAN_DEFER] = request.environ["REQUEST_METHOD"] == "GET"
        if request.path == "/health/live":
            response = self._flask_call(request)()  # Needs no database or Redis, and so no thread.
        else:
            response = await self._call_in_thread(self._pool_for(request), request)
        if isinstance(response.deferred, FollowEvents):
            await self._stream(request, response, response.deferred)
        elif isinstance(response.deferred, WaitForJob):
            await self._respond(request, await self._wait(request, response, response.deferred))
        else:
            await self._respond(request, response)

    # -- lines of a batch --------------------------------------------------------------------------------------------

    async def _take_lines(self, request: HttpRequest) -> Response:
        """Accept the lines in the body.  Raises Refusal, ClientGone."""
        head = dict(request.environ)
        head.pop("HTTP_TRANSFER_ENCODING", None)

        async def call(path: str, query: str, content_type: str, body: bytes) -> Response:
            given = {"PATH_INFO": path, "QUERY_STRING": query, "CONTENT_TYPE": content_type}
            request.environ = {**head, **given, "CONTENT_LENGTH": str(len(body))}
            request.body += body
            request.key_s = 0.0
            try:
                return await self._call_in_thread(self._pool_for(request), request)
            except Refusal as refusal:
                return refusal.response(path)

        request.close = not request.is_complete
        with self.streams.take(request.owner.account) as has_place:
            if not has_place:
                raise Refusal(429, "too_many_streams", "Too many of your streams are open; close some of them.", 5)
            async with aclosing(self._iter_chunks(request)) as chunks:
                connection = request.connection
                return await take_lines(call, head["QUERY_STRING"], chunks, lambda: not connection.has_disconnected)

    async def _iter_chunks(self, request: HttpRequest) -> AsyncGenerator[list[bytes]]:
        """Yield the lines of the body, some at a time.  Raises Refusal, ClientGone."""
        cutter, clock = LineCutter(self.settings.max_body_bytes), asyncio.get_running_loop()
        received, waited_s = 0, 0.0  # without the time in which lines are accepted
        while not request.is_complete:
            began = clock.time()
            allowed_s = self.settings.body_timeout_s * (1 + received / _SLOWEST_BYTES) - waited_s
            late = "The lines did not arrive in time; GET /batches shows how many were received."
            message = await self._receive_part(request, began + allowed_s, late)
            waited_s += clock.time() - began
            received += len(message["body"])
            request.is_complete = not message["more_body"]
            for lines in cutter.feed(message["body"]):
                yield lines
            self.limits.release_bytes(request.connection)
            self._reserve_bytes(request, cutter.held_bytes)
        for lines in cutter.end():
            yield lines

    # -- receive, call Flask, respond ------------------------------------------------------------------------------

    async def _receive(self, request: HttpRequest) -> None:
        """Read the body, or as much of it as is needed to refuse it.  Raises Refusal, ClientGone."""
        settings, owner, began = self.settings, request.owner, asyncio.get_running_loop().time()
        limit, request.close = self._body_limit(request), not request.is_complete
        wants_key = settings.require_keys and not request.path.startswith(_KEYLESS)
        request.has_body = request.is_complete or not (
            (wants_key and owner.kind is OwnerKind.ANONYMOUS) or request.length > limit
        )
        while request.has_body and not request.is_complete:
            earned_s = len(request.body) / settings.body_min_rate
            late = "The request did not arrive in time; nothing was done."
            message = await self._receive_part(request, began + settings.body_timeout_s + earned_s, late)
            self._reserve_bytes(request, len(message["body"]))
            request.body += message["body"]
            request.is_complete, request.has_body = not message["more_body"], len(request.body) <= limit
        if request.has_body:
            request.close = False
        else:
            request.environ["CONTENT_LENGTH"] = str(max(request.length, limit + 1))
            request.environ.pop("HTTP_TRANSFER_ENCODING", None)
            request.body.clear()

    async def _receive_part(self, request: HttpRequest, until: float, late: str) -> Any:
        """Return the next part of the body.  Raises ClientGone; Refusal with the text `late` if it takes too long."""
        try:
            # A timeout costs more than to receive what is there.
            async with nullcontext() if request.connection.has_complete_request else asyncio.timeout_at(until):
                message = await request.receive()
        except TimeoutError:
            raise Refusal(408, "request_too_slow", late) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    def _reserve_bytes(self, request: HttpRequest, size: int) -> None:
        """Reserve memory for a part of the body.  Raises Refusal."""
        owner = request.owner
        is_local = owner.kind is OwnerKind.LOCAL
        if not self.limits.reserve_bytes(request.connection, owner.account, size, unlimited=is_local):
            detail = "Your open requests hold too many bytes; wait until some of them have ended."
            raise Refusal(429, "too_many_bytes", detail, 1)

    def _body_limit(self, request: HttpRequest) -> int:
        """Return the size in bytes of the largest body that this address accepts."""
        path, is_anonymous = request.path, request.owner.kind is OwnerKind.ANONYMOUS
        if is_anonymous and not path.startswith(_PUSH_PATH):
            return min(_MAX_ANONYMOUS_BYTES, self.settings.max_body_bytes)
        if path == "/queue/submit-batch" or is_lines_path(path):
            return self.settings.max_batch_bytes
        if path.startswith(_PAGE_PATH):
            return min(MAX_FORM_BYTES, self.settings.max_body_bytes)
        return self.settings.max_push_bytes if path.startswith(_PUSH_PATH) else self.settings.max_body_bytes

    def _pool_for(self, request: HttpRequest) -> FairPool:
        """Return the thread pool for a request."""
        if request.path.startswith(_PUSH_PATH):
            return self._pushes
        if request.path == "/health/ready":
            return self._readiness
        if request.owner.kind is OwnerKind.ANONYMOUS:
            return self._anonymous
        if len(request.body) > _HEAVY_BYTES:
            return self._heavy
        return (
            self._operators if request.owner.kind is OwnerKind.OPERATOR and not self.general.has_room else self.general
        )

    async def _call_in_thread(self, pool: FairPool, request: HttpRequest) -> Response:
        """Call Flask in a thread of the pool.  Raises Refusal, ClientGone."""
        longest_s = self._request_s - request.key_s
        request.environ[ANSWER_UNTIL] = time.monotonic() + longest_s
        try:
            call = self._flask_call(request)
            # Large requests wait for each other, however long each takes.
            longest_wait_s = None if pool is self._heavy else longest_s
            return await pool.run(
                request.owner.account, call, lambda: not request.connection.has_disconnected, longest_wait_s
            )
        except QueueFull:
            request.close = True  # Otherwise the next request on this connection would be refused at once, too.
            raise Refusal(429, "too_many_requests", "Too many of your requests are already waiting.", 1) from None
        except TurnLate:
            detail = "No thread was free for the request in time, and nothing was done; try again."
            raise Refusal(503, "overloaded", detail, 1) from None

    def _flask_call(self, request: HttpRequest) -> Callable[[], Response]:
        """Return a function that calls Flask, and release the body from the request."""
        body = bytes(request.body)
        request.body.clear()
        return partial(call_wsgi, self._wsgi, request.environ, body, has_body=request.has_body)

    async def _respond(self, request: HttpRequest, response: Response) -> None:
        self.limits.release_bytes(request.connection)
        if not self.limits.reserve_bytes(request.connection, request.owner.account, len(response.body), unlimited=True):
            raise ClientGone
        await request.start(response)
        await request.write(response.body)
        if not request.is_complete:
            with suppress(TimeoutError):
                async with asyncio.timeout(DISCARD_S):
                    while (await request.receive()).get("more_body"):
                        pass
        await request.write(b"", more=False)
        self.limits.release_bytes(request.connection)

    # -- without a thread ------------------------------------------------------------------------------------------

    @contextmanager
    def _watch(self, job_id: str | None, gone_s: float | None) -> Iterator[None]:
        """A client waits for a job in the block."""
        if job_id is None or gone_s is None:
            yield
            return
        self._watching[job_id, gone_s] += 1
        try:
            yield
        finally:
            self._watching[job_id, gone_s] -= 1
            self._watching += Counter()  # Removes jobs without a client.

    async def _wait(self, request: HttpRequest, response: Response, waiting: WaitForJob) -> Response:
        """Call Flask again when the job has ended or the time is over.  Return `response` if that is not possible."""
        with self.waiting.take(request.owner.account) as has_place:
            if not has_place or self.stopping:
                return response
            tasks = [
                asyncio.create_task(self.feed.wait_for_end(waiting.job_id)),
                asyncio.create_task(request.disconnected()),
            ]
            with self._watch(waiting.job_id, waiting.gone_s):
                await asyncio.wait(tasks, timeout=waiting.seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        request.environ[CAN_DEFER] = False
        try:
            request.key_s = 0.0  # It was spent before the wait.
            return await self._call_in_thread(self._pool_for(request), request)
        except Refusal:
            return response

    async def _stream(self, request: HttpRequest, response: Response, deferred_stream: FollowEvents) -> None:
        """Send events until the job has ended, the client has left, its key was removed, or the process stops."""
        account, connection = request.owner.account, request.connection
        with self.streams.take(account) as has_place:
            if not has_place or self.stopping:
                detail = "Too many streams are open; close one, or poll the jobs instead."
                raise Refusal(429, "too_many_streams", detail, 5)
            if request.version == "1.0":
                raise Refusal(505, "http_version", "HTTP/1.0 cannot mark the end of a stream; use HTTP/1.1.")
            response.headers = [header for header in response.headers if header[0].lower() != b"content-length"]
            request.close = True
            await request.start(response)
            stream = EventStream(
                deferred_stream,
                self.feed,
                self.progress_follower,
                partial(self._missed_events.run, account),
                connection.abort,
            )
            sending = asyncio.create_task(_send(request, stream))
            disconnected = asyncio.create_task(request.disconnected())
            self._open[stream] = request, sending
            with self._watch(deferred_stream.event_filter.job_id, deferred_stream.gone_s):
                await asyncio.wait((sending, disconnected), return_when=asyncio.FIRST_COMPLETED)
            sending.cancel()
            disconnected.cancel()
            del self._open[stream]
            await asyncio.wait((sending,))
            if not sending.cancelled() and (error := sending.exception()) is not None:
                raise ClientGone if isinstance(error, SlotkeeperError) else error  # The client reconnects.
        await request.write(b"", more=False)

    # -- time --------------------------------------------------------------------------------------------------------

    async def run_timeouts(self) -> None:
        """Close connections that take too long, refresh the keys, and keep jobs that clients wait for.

        Runs until it is canceled.
        """
        keys_due, evicted = self.limits.now(), 0
        while True:
            now = self.limits.now()
            for connection in self.limits.connections():
                connection.check_timeouts(now)
            for stream in self._open:
                stream.check_time(now)
            if self.limits.evicted > evicted:
                log.warning("connections_gave_way", count=self.limits.evicted - evicted)
                evicted = self.limits.evicted
            if self._key_cache is not None and now >= keys_due:
                keys_due = now + KEYS_EVERY_S
                self._refreshing = asyncio.create_task(self._refresh_keys(self._key_cache))
            if self._watching and (self._renewing is None or self._renewing.done()):
                self._renewing = asyncio.create_task(asyncio.to_thread(self._keep_watched, dict(self._watching.keys())))
            await asyncio.sleep(_TICK_S)

    async def _refresh_keys(self, cache: KeyCache) -> None:
        """Read the keys again, and end streams whose key is not valid any more: a stream may last for days."""
        await cache.refresh_in_thread()
        for request, sending in self._open.values():
            if not cache.is_still_valid(request.owner, request.environ):
                sending.cancel()

    def stop(self) -> None:
        """Begin no more waiting, end streams and waits, and let started requests finish."""
        if not self.stopping:
            self.stopping = True
            self.feed.wake_waiters()
            self.progress_follower.stop()
            for _, sending in self._open.values():
                sending.cancel()


async def _send(request: HttpRequest, stream: EventStream) -> None:
    """Send the chunks of a stream to the client."""
    async with aclosing(stream.chunks()) as texts:
        async for text in texts:
            await request.write(text)
