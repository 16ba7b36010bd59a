"""The events of one client: first those that it has missed, page by page, then those that happen."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import orjson

from app.deferred import FollowEvents
from app.server.event_feed import EventFeed, RenderedEvent, render
from routing.progress import ProgressEntry, ProgressFollower, Subscription
from slotkeeper.outbox import event_reader

HEARTBEAT_S = 15.0
_PAGE = 200  # events that are read at once
_MAX_BUFFERED_EVENTS = 5_000  # events that happen while the missed ones are read; then they are read, too
_MAX_UNSENT_BYTES = 128 << 10  # bytes that a client has not read; then it is closed, and may come again
_GAP = "Some of what happened after this event is not in the record any more: look at the jobs themselves."


class EventStream:
    """Called in the event loop's thread only.  `run` runs a function in a thread, `abort` closes the connection."""

    def __init__(
        self,
        following: FollowEvents,
        feed: EventFeed,
        watching: ProgressFollower,
        run: Callable[[Callable[[], Any]], Awaitable[Any]],
        abort: Callable[[], None],
    ) -> None:
        self.wanted = following.wanted
        self._feed, self._watching, self._run, self._abort = feed, watching, run, abort
        self._after, self._cursor = following.after, following.after or 0  # All up to the cursor has been sent.
        self._target: int | None = 0  # up to which missed events are read; None: they have been
        self._kept: list[RenderedEvent | ProgressEntry] = []
        self._unsent = 0  # bytes in it
        self._woken = asyncio.Event()
        self._over = False  # The last event that was sent ends its job.
        self._sent_at = time.monotonic()
        job_id = self.wanted.job_id
        self._watcher = Subscription(job_id, following.progress_after, self._keep) if job_id is not None else None
        self._is_watched = False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield what to send, until the job has ended; without one, for ever."""
        try:
            self._target = await self._feed.follow(self.wanted, self.push)
            yield b"retry: 2000\n\n"
            if self._after is None and self._watcher is None:
                self._cursor, self._target = self._target, None
                yield b"id: %d\n\n" % self._cursor
            else:
                async for text in self._send_missed():
                    yield text
            while self._kept or self._watcher is None or not self._over:
                if self._watcher is not None and not self._is_watched:
                    self._is_watched = True
                    self._watching.subscribe(self._watcher)
                if not self._kept:
                    await self._woken.wait()
                yield await self._kept_text() or self._heartbeat()
        finally:
            self._feed.unfollow(self.wanted, self.push)
            if self._watcher is not None:
                self._watching.unsubscribe(self._watcher)

    # -- what happens ----------------------------------------------------------------------------------------------

    def push(self, events: Sequence[RenderedEvent | ProgressEntry]) -> None:
        """These have happened."""
        if self._target is None and self._unsent > _MAX_UNSENT_BYTES:
            self._abort()
            return
        self._kept.extend(events)
        self._unsent += sum(len(it.text) for it in events)
        self._woken.set()
        if self._target is not None and len(self._kept) > _MAX_BUFFERED_EVENTS:
            self._target = max(it.number for it in self._kept if isinstance(it, RenderedEvent))
            self._kept.clear()

    def _keep(self, said: ProgressEntry) -> None:
        self.push([said])

    def check_time(self, now_s: float) -> None:
        """Called about every second."""
        if now_s - self._sent_at >= HEARTBEAT_S:
            self._woken.set()

    def _heartbeat(self) -> bytes:
        if self._watcher is not None:
            return b": still here\n\n"
        self._cursor = max(self._cursor, self._feed.position)
        return b": still here\nid: %d\n\n" % self._cursor

    # -- what was missed -------------------------------------------------------------------------------------------

    async def _send_missed(self) -> AsyncIterator[bytes]:
        is_first = goes_on = True
        while goes_on:
            target = self._target or 0
            complete, page, events = await self._run(partial(self._read_missed_page, is_first))
            if not complete:
                yield b"event: stream.gap\ndata: %b\n\n" % orjson.dumps({"after": self._cursor, "detail": _GAP})
                self._cursor = min(self._cursor, target)
            yield await self._text([it for it in events if it.number <= target and self.wanted.matches(it.entry)])
            self._cursor = max(self._cursor, min(page.last, target))
            is_first, goes_on = False, (page.has_more and page.last < target) or self._target != target
        self._target = None
        yield await self._kept_text()

    def _read_missed_page(self, is_first: bool) -> tuple[bool, event_reader.EventPage, list[RenderedEvent]]:
        """In a thread.  Raises SlotkeeperError while the database is away."""
        database, job_id = self._feed.database, self.wanted.job_id
        complete = not is_first or job_id is not None or event_reader.has_all_since(database, self._cursor)
        page = event_reader.read_page(database, self._cursor, _PAGE, job_id)
        return complete, page, [render(entry) for entry in page.events]

    # -- text ------------------------------------------------------------------------------------------------------

    async def _kept_text(self) -> bytes:
        events, self._kept, self._unsent = self._kept, [], 0
        self._woken.clear()
        return await self._text(events)

    async def _text(self, events: Sequence[RenderedEvent | ProgressEntry]) -> bytes:
        """Return the text of each event once; what the job's server has said stands before its end."""
        self._sent_at = time.monotonic()
        parts: list[bytes] = []
        for it in events:
            if isinstance(it, ProgressEntry):
                parts.append(self._progress(it))
            elif it.number > self._cursor:
                if it.ends and self._watcher is not None:
                    parts += [self._progress(said) for said in await self._remaining_progress(self._watcher)]
                parts.append(it.text)
                self._cursor, self._over = it.number, it.ends
        return b"".join(parts)

    async def _remaining_progress(self, watcher: Subscription) -> list[ProgressEntry]:
        """Return what the job's server has said and is not sent yet."""
        done = asyncio.Event()
        self._watching.finish(watcher, done.set)
        await done.wait()
        self._is_watched = False
        said = [it for it in self._kept if isinstance(it, ProgressEntry)]
        self._kept = [it for it in self._kept if not isinstance(it, ProgressEntry)]
        return said

    def _progress(self, said: ProgressEntry) -> bytes:
        return b"id: %d-%d-%d\nevent: progress\ndata: %b\n\n" % (self._cursor, *said.id, said.text)
