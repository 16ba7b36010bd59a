"""Publish and follow the progress that a server reports during a run: parts of results, and how far the run is.

Each job has a stream in Redis with its last entries, for clients that connect later, and a channel for those that are
connected.  No guarantee depends on it: while Redis does not answer, entries are lost and no job is delayed.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import structlog
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from slotkeeper.redis.connections import make_async_client
from slotkeeper.redis.scripts import Command, Scripts

log = structlog.get_logger(__name__)

_TTL_MS = 600_000  # of a stream, after its last entry
_TTL_AFTER_END_MS = 30_000  # for clients that reconnect; the database has the result
_RECONNECT_S = 1.0
_PING_S = 5.0
_FINISH_S = 0.5
_FIELD = b"said"


class EntryId(NamedTuple):
    """The id of an entry in its job's stream.  Ids grow with the attempt, then with the time."""

    attempt: int
    ms: int


FIRST_ENTRY = EntryId(0, 0)
"""Lower than the id of any entry: a subscription with it receives all entries."""


class ProgressEntry(NamedTuple):
    """An entry of a stream.  `text`: JSON, as the worker published it."""

    id: EntryId
    text: bytes


class ProgressScripts(Protocol):
    """The script in routing/lua for progress streams, which belong to no fleet."""

    def publish_progress(self, key: str, *, id: str, entry: str, kept: int, ttl_ms: int) -> Command[int]: ...


class EntryIds:
    """Generates the ids of one attempt's entries.  Each is higher than the last, even if the clock is set back."""

    def __init__(self, attempt: int) -> None:
        self._attempt, self._last_ms = attempt, 0

    def next(self) -> EntryId:
        self._last_ms = max(self._last_ms + 1, time.time_ns() // 1_000_000)
        return EntryId(self._attempt, self._last_ms)


class ProgressCommands:
    """Builds the commands with which a worker publishes progress.  The worker sends them."""

    def __init__(self, scripts: Scripts) -> None:
        self._keys = scripts.keys
        self._lua: ProgressScripts = scripts.bind(ProgressScripts)

    def publish_command(self, job_id: str, entry_id: EntryId, text: str, kept: int) -> Command[int]:
        """Return a command that adds an entry and keeps the last `kept` entries.

        Its result is the number of subscribers, or -1 if the stream already has an entry of a later attempt.
        """
        key, id_ = self._keys.progress(job_id), f"{entry_id.attempt}-{entry_id.ms}"
        return self._lua.publish_progress(key, id=id_, entry=text, kept=kept, ttl_ms=_TTL_MS)

    def end_command(self, job_id: str) -> Command[int]:
        """Return a command that ends a job's stream: it expires soon."""
        key = self._keys.progress(job_id)
        return self._lua.publish_progress(key, id="", entry="", kept=0, ttl_ms=_TTL_AFTER_END_MS)


@dataclass(eq=False, slots=True)
class Subscription:
    """Calls `on_entry` with each entry of a job once, in order.  `last_id`: of the last entry that was delivered."""

    job_id: str
    last_id: EntryId
    on_entry: Callable[[ProgressEntry], None]
    buffered: list[ProgressEntry] | None = None
    """New entries that wait until the backlog was read from the stream; None: it was read."""

    def deliver(self, entry: ProgressEntry) -> None:
        """Deliver an entry, or buffer it while the backlog is not read.  Skips an entry delivered before."""
        if self.buffered is not None:
            self.buffered.append(entry)
        elif entry.id > self.last_id:
            self.last_id = entry.id
            self.on_entry(entry)

    def deliver_backlog(self, backlog: list[ProgressEntry]) -> None:
        """Deliver the entries that were read from the stream, then the buffered ones."""
        buffered, self.buffered = self.buffered or [], None
        for entry in [*backlog, *buffered]:
            self.deliver(entry)


class ProgressFollower:
    """Delivers progress to the subscriptions of one event loop, over one connection to Redis.

    Its methods are for the thread of the event loop.
    """

    def __init__(self, scripts: Scripts) -> None:
        self._scripts, self._keys = scripts, scripts.keys
        self._redis: Redis | None = None
        self._subscriptions: dict[str, list[Subscription]] = {}  # by key
        self._channel: PubSub | None = None  # None: not connected
        self._listener: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def subscribe(self, subscription: Subscription) -> None:
        """Deliver the entries after the subscription's last id, then each new entry.  Connects at first use."""
        subscription.buffered = []
        key = self._keys.progress(subscription.job_id)
        self._subscriptions.setdefault(key, []).append(subscription)
        if self._listener is None:
            self._listener = asyncio.get_running_loop().create_task(self._listen_forever())
        elif self._channel is not None:
            self._start(self._subscribe_channel(self._channel, key))

    def unsubscribe(self, subscription: Subscription) -> None:
        """Deliver no more entries."""
        key = self._keys.progress(subscription.job_id)
        group = self._subscriptions.get(key, [])
        if subscription in group:
            group.remove(subscription)
        if not group and self._subscriptions.pop(key, None) is not None and self._channel is not None:
            self._start(self._unsubscribe_channel(self._channel, key))

    def finish(self, subscription: Subscription, then: Callable[[], None]) -> None:
        """Deliver the remaining entries of the stream and no more, then call `then`.

        `then` is also called if Redis does not answer, after half a second.
        """
        self.unsubscribe(subscription)
        subscription.buffered = []
        self._start(self._finish(subscription, then))

    def stop(self) -> None:
        for task in [self._listener, *self._tasks]:
            if task is not None:
                task.cancel()

    # -- tasks -----------------------------------------------------------------------------------------------------

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # The event loop keeps only a weak reference.
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, subscription: Subscription, then: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(_FINISH_S):
                await self._read_backlog(subscription)
        except TimeoutError:
            pass
        finally:
            then()

    async def _subscribe_channel(self, channel: PubSub, key: str) -> None:
        with suppress(RedisError):  # The listener sees the error too, and reconnects.
            await channel.subscribe(key)

    async def _unsubscribe_channel(self, channel: PubSub, key: str) -> None:
        with suppress(RedisError):
            if key not in self._subscriptions:
                await channel.unsubscribe(key)

    async def _read_backlog(self, subscription: Subscription) -> None:
        """Read the entries after the subscription's last id from the stream, and deliver them.

        If Redis does not answer, only the buffered entries are delivered.
        """
        try:
            last, key = subscription.last_id, self._keys.progress(subscription.job_id)
            rows: Any = await self._client().xrange(key, min=f"({last.attempt}-{last.ms}", max="+")
            backlog = [ProgressEntry(_parse_id(id_), fields[_FIELD]) for id_, fields in rows]
        except RedisError:
            backlog = []
        if subscription.buffered is not None:
            subscription.deliver_backlog(backlog)

    # -- the connection --------------------------------------------------------------------------------------------

    async def _listen_forever(self) -> None:
        """Keep the connection open, and reconnect after errors, until the task is canceled."""
        while True:
            try:
                await self._listen()
            except RedisError as error:
                log.warning("progress_follower_failed", error=str(error))
            except Exception:
                log.exception("progress_follower_failed")
            finally:
                self._channel = None
            # What is published before the next connection is read from the streams.
            for group in self._subscriptions.values():
                for subscription in group:
                    subscription.buffered = []
            await asyncio.sleep(_RECONNECT_S)

    async def _listen(self) -> None:
        async with self._client().pubsub() as channel:
            keys = list(self._subscriptions) or [self._keys.progress("")]
            await channel.subscribe(*keys)
            self._channel = channel
            # Subscriptions that began while the connection was being made.
            if missing := self._subscriptions.keys() - set(keys):
                await channel.subscribe(*missing)
            has_answered = True
            while True:
                message = await channel.get_message(timeout=_PING_S)
                if message is not None:
                    has_answered = True
                    self._handle(message)
                elif not has_answered:
                    raise RedisError("Redis has not answered in time.")
                else:
                    has_answered = False
                    await channel.ping()

    def _handle(self, message: dict[str, object]) -> None:
        if message["type"] == "pong":
            return
        subscriptions = list(self._subscriptions.get(_as_text(message["channel"]), ()))
        if message["type"] == "subscribe":
            # From here on each new entry arrives on the channel, so the backlog can be read without a gap.
            for subscription in subscriptions:
                if subscription.buffered is not None:
                    self._start(self._read_backlog(subscription))
        elif message["type"] == "message":
            entry = _parse_entry(message["data"])
            for subscription in subscriptions:
                subscription.deliver(entry)

    def _client(self) -> Redis:
        if self._redis is None:
            self._redis = make_async_client(self._scripts.redis)
        return self._redis


def _parse_id(id_: object) -> EntryId:
    attempt, _, ms = _as_text(id_).partition("-")
    return EntryId(int(attempt), int(ms))


def _parse_entry(data: object) -> ProgressEntry:
    """Return an entry from a message on a channel: its id, a space and its text."""
    assert isinstance(data, bytes)
    id_, _, text = data.partition(b" ")
    return ProgressEntry(_parse_id(id_), text)


def _as_text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
