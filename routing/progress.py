"""What the servers of runs say while they are at it: pieces of results, and how far they are.

It goes by Redis alone, for nobody depends on it: the last of it is kept for a while for those who come later, and who
watches hears it at once.  A Redis that is away costs what was said meanwhile, and no job.
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

_LASTS_MS = 600_000  # without another word
_LASTS_AFTER_END_MS = 30_000  # for those who come again; the result is in the record
_AGAIN_S = 1.0
_PING_S = 5.0
_REST_S = 0.5
_FIELD = b"said"


class EntryId(NamedTuple):
    """Of an entry among those of its job."""

    attempt: int
    ms: int


FIRST_ENTRY = EntryId(0, 0)
"""Before all entries."""


class ProgressEntry(NamedTuple):
    """An entry.  `text`: JSON, as it was told."""

    place: EntryId
    text: bytes


class SaidScripts(Protocol):
    """Of what one run's server says, which belongs to no fleet."""

    def publish_progress(self, key: str, *, id: str, entry: str, kept: int, ttl_ms: int) -> Command[int]: ...


class ProgressCommands:
    """For workers.  Gives commands for whoever has a way to Redis."""

    def __init__(self, scripts: Scripts) -> None:
        self._keys = scripts.keys
        self._lua: SaidScripts = scripts.bind(SaidScripts)

    def publish_command(self, job_id: str, place: EntryId, text: str, kept: int) -> Command[int]:
        """One entry more, of which the last `kept` stay.  Answers how many watch, or -1: it came too late."""
        key = self._keys.progress(job_id)
        return self._lua.publish_progress(
            key, id=f"{place.attempt}-{place.ms}", entry=text, kept=kept, ttl_ms=_LASTS_MS
        )

    def end_command(self, job_id: str) -> Command[int]:
        """Nothing more is said."""
        return self._lua.publish_progress(
            self._keys.progress(job_id), id="", entry="", kept=0, ttl_ms=_LASTS_AFTER_END_MS
        )


@dataclass(eq=False, slots=True)
class Subscription:
    """Somebody who hears each entry of a job once, and in order.  `place`: of the last that was heard."""

    job_id: str
    place: EntryId
    on_entry: Callable[[ProgressEntry], None]
    buffered: list[ProgressEntry] | None = None
    """What is said while what was said before is being read; None: it is heard at once."""

    def deliver(self, said: ProgressEntry) -> None:
        if self.buffered is not None:
            self.buffered.append(said)
        elif said.place > self.place:
            self.place = said.place
            self.on_entry(said)

    def deliver_backlog(self, before: list[ProgressEntry]) -> None:
        """What was said before is here."""
        kept, self.buffered = self.buffered or [], None
        for said in [*before, *kept]:
            self.deliver(said)


class ProgressFollower:
    """For an event loop in which somebody watches; used by its thread alone."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts, self._keys = scripts, scripts.keys
        self._redis: Redis | None = None
        self._watchers: dict[str, list[Subscription]] = {}  # by key
        self._channel: PubSub | None = None  # while there is a connection
        self._life: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def subscribe(self, watcher: Subscription) -> None:
        """Have it hear what has been said behind its place, and what will be."""
        watcher.buffered = []
        key = self._keys.progress(watcher.job_id)
        self._watchers.setdefault(key, []).append(watcher)
        if self._life is None:
            self._life = asyncio.get_running_loop().create_task(self._live())
        elif self._channel is not None:
            self._do(self._subscribe(self._channel, key))

    def unsubscribe(self, watcher: Subscription) -> None:
        """It hears nothing more."""
        key = self._keys.progress(watcher.job_id)
        group = self._watchers.get(key, [])
        if watcher in group:
            group.remove(watcher)
        if not group and self._watchers.pop(key, None) is not None and self._channel is not None:
            self._do(self._unsubscribe(self._channel, key))

    def finish(self, watcher: Subscription, then: Callable[[], None]) -> None:
        """Have it hear what is there still, and nothing more; then call `then`, also where Redis is away."""
        self.unsubscribe(watcher)
        watcher.buffered = []
        self._do(self._tell_rest(watcher, then))

    def stop(self) -> None:
        for task in [self._life, *self._tasks]:
            if task is not None:
                task.cancel()

    async def _tell_rest(self, watcher: Subscription, then: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(_REST_S):
                await self._read_back(watcher)
        except TimeoutError:
            pass
        finally:
            then()

    def _do(self, act: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(act)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _subscribe(self, channel: PubSub, key: str) -> None:
        with suppress(RedisError):  # The connection's life notices, too.
            await channel.subscribe(key)

    async def _unsubscribe(self, channel: PubSub, key: str) -> None:
        with suppress(RedisError):
            if key not in self._watchers:
                await channel.unsubscribe(key)

    async def _live(self) -> None:
        """Of the connection, for as long as this process has watched once."""
        while True:
            try:
                await self._listen()
            except RedisError as error:
                log.warning("progress_follower_failed", error=str(error))
            except Exception:
                log.exception("progress_follower_failed")
            finally:
                self._channel = None
            for group in self._watchers.values():
                for watcher in group:
                    watcher.buffered = []
            await asyncio.sleep(_AGAIN_S)

    async def _listen(self) -> None:
        async with self._client().pubsub() as channel:
            asked = list(self._watchers) or [self._keys.progress("")]
            await channel.subscribe(*asked)
            self._channel = channel
            if began := self._watchers.keys() - set(asked):  # while there was no connection yet
                await channel.subscribe(*began)
            answered = True
            while True:
                message = await channel.get_message(timeout=_PING_S)
                if message is not None:
                    answered = True
                    self._take(message)
                elif not answered:
                    raise RedisError("Redis has not answered in time.")
                else:
                    answered = False
                    await channel.ping()

    def _take(self, message: dict[str, object]) -> None:
        if message["type"] == "pong":
            return
        key = _text(message["channel"])
        watchers = list(self._watchers.get(key, ()))
        if message["type"] == "subscribe":  # From here on nothing is missed.
            for watcher in watchers:
                if watcher.buffered is not None:
                    self._do(self._read_back(watcher))
        elif message["type"] == "message":
            said = _read(message["data"])
            for watcher in watchers:
                watcher.deliver(said)

    async def _read_back(self, watcher: Subscription) -> None:
        """Tell it what was said before."""
        try:
            place = watcher.place
            key = self._keys.progress(watcher.job_id)
            found: Any = await self._client().xrange(key, min=f"({place.attempt}-{place.ms}", max="+")
            before = [ProgressEntry(_place(at), fields[_FIELD]) for at, fields in found]
        except RedisError:
            before = []
        if watcher.buffered is not None:
            watcher.deliver_backlog(before)

    def _client(self) -> Redis:
        if self._redis is None:
            self._redis = make_async_client(self._scripts.redis)
        return self._redis


class EntryIds:
    """Places for the entries of one attempt: each behind the one before, also where another process goes on."""

    def __init__(self, attempt: int) -> None:
        self._attempt, self._last_ms = attempt, 0

    def next(self) -> EntryId:
        self._last_ms = max(self._last_ms + 1, time.time_ns() // 1_000_000)
        return EntryId(self._attempt, self._last_ms)


def _place(at: object) -> EntryId:
    attempt, _, ms = _text(at).partition("-")
    return EntryId(int(attempt), int(ms))


def _read(data: object) -> ProgressEntry:
    assert isinstance(data, bytes)
    at, _, text = data.partition(b" ")
    return ProgressEntry(_place(at), text)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
