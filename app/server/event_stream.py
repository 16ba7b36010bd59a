"""The event stream of one client: the events that it missed, page by page, then new ones and a job's progress."""

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
_PAGE_SIZE = 200  # missed events per read
_MAX_BUFFERED_EVENTS = 5_000  # new events while missed ones are read; more are read from the database, too
_MAX_UNSENT_BYTES = 128 << 10  # that the client has not read; beyond it the connection is closed
_GAP = "Some events after this one are not in the database any more: request the jobs to see their state."


class EventStream:
    """Collects and formats the events for one client.  For the thread of the event loop only.

    `run`: runs a function in a thread.  `abort`: closes the connection.
    """

    def __init__(
        self,
        request: FollowEvents,
        feed: EventFeed,
        progress_follower: ProgressFollower,
        run: Callable[[Callable[[], Any]], Awaitable[Any]],
        abort: Callable[[], None],
    ) -> None:
        self.event_filter = request.event_filter
        self._feed, self._follower, self._run, self._abort = feed, progress_follower, run, abort
        self._after, self._cursor = request.after, request.after or 0  # All events up to the cursor were sent.
        self._missed_until: int | None = 0  # the last missed event to read; None: all were read
        self._buffered: list[RenderedEvent | ProgressEntry] = []
        self._unsent = 0  # bytes in the buffer
        self._woken = asyncio.Event()
        self._job_ended = False  # The last event that was sent is the end of its job.
        self._sent_at = time.monotonic()
        job_id = self.event_filter.job_id
        self._subscription = (
            Subscription(job_id, request.progress_after, self._push_progress) if job_id is not None else None
        )
        self._is_subscribed = False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of the response: until the job has ended, or without end if the stream is not of one job."""
        try:
            self._missed_until = await self._feed.follow(self.event_filter, self.push)
            yield b"retry: 2000\n\n"
            if self._after is None and self._subscription is None:
                self._cursor, self._missed_until = self._missed_until, None
                yield b"id: %d\n\n" % self._cursor
            else:
                async for text in self._send_missed():
                    yield text
            while self._buffered or self._subscription is None or not self._job_ended:
                if self._subscription is not None and not self._is_subscribed:
                    self._is_subscribed = True
                    self._follower.subscribe(self._subscription)
                if not self._buffered:
                    await self._woken.wait()
                yield await self._buffered_text() or self._heartbeat()
        finally:
            self._feed.unfollow(self.event_filter, self.push)
            if self._subscription is not None:
                self._follower.unsubscribe(self._subscription)

    # -- new events ----------------------------------------------------------------------------------------------

    def push(self, events: Sequence[RenderedEvent | ProgressEntry]) -> None:
        """Buffer new events and progress entries.  Closes the connection of a client that does not read."""
        if self._missed_until is None and self._unsent > _MAX_UNSENT_BYTES:
            self._abort()
            return
        self._buffered.extend(events)
        self._unsent += sum(len(event.text) for event in events)
        self._woken.set()
        if self._missed_until is not None and len(self._buffered) > _MAX_BUFFERED_EVENTS:
            self._missed_until = max(event.number for event in self._buffered if isinstance(event, RenderedEvent))
            self._buffered.clear()

    def _push_progress(self, entry: ProgressEntry) -> None:
        self.push([entry])

    def check_time(self, now_s: float) -> None:
        """Send a heartbeat if one is due.  Called about once a second."""
        if now_s - self._sent_at >= HEARTBEAT_S:
            self._woken.set()

    def _heartbeat(self) -> bytes:
        if self._subscription is not None:
            return b": still here\n\n"
        self._cursor = max(self._cursor, self._feed.position)
        return b": still here\nid: %d\n\n" % self._cursor

    # -- missed events -------------------------------------------------------------------------------------------

    async def _send_missed(self) -> AsyncIterator[bytes]:
        """Yield the missed events, then those buffered meanwhile."""
        is_first = has_more = True
        while has_more:
            last = self._missed_until or 0
            complete, page, events = await self._run(partial(self._read_missed_page, is_first))
            if not complete:
                yield b"event: stream.gap\ndata: %b\n\n" % orjson.dumps({"after": self._cursor, "detail": _GAP})
                self._cursor = min(self._cursor, last)
            yield await self._text(
                [event for event in events if event.number <= last and self.event_filter.matches(event.entry)]
            )
            self._cursor = max(self._cursor, min(page.last, last))
            is_first, has_more = False, (page.has_more and page.last < last) or self._missed_until != last
        self._missed_until = None
        yield await self._buffered_text()

    def _read_missed_page(self, is_first: bool) -> tuple[bool, event_reader.EventPage, list[RenderedEvent]]:
        """Return whether all missed events exist, the page, and its events.  For a thread.  Raises SlotkeeperError."""
        database, job_id = self._feed.database, self.event_filter.job_id
        complete = not is_first or job_id is not None or event_reader.has_all_since(database, self._cursor)
        page = event_reader.read_page(database, self._cursor, _PAGE_SIZE, job_id)
        return complete, page, [render(entry) for entry in page.events]

    # -- text ------------------------------------------------------------------------------------------------------

    async def _buffered_text(self) -> bytes:
        """Empty the buffer and return its text."""
        events, self._buffered, self._unsent = self._buffered, [], 0
        self._woken.clear()
        return await self._text(events)

    async def _text(self, events: Sequence[RenderedEvent | ProgressEntry]) -> bytes:
        """Return the text of the events that were not sent.  Progress entries come before the end of their job."""
        self._sent_at = time.monotonic()
        parts: list[bytes] = []
        for event in events:
            if isinstance(event, ProgressEntry):
                parts.append(self._progress_text(event))
            elif event.number > self._cursor:
                if event.ends and self._subscription is not None:
                    remaining = await self._remaining_progress(self._subscription)
                    parts += [self._progress_text(entry) for entry in remaining]
                parts.append(event.text)
                self._cursor, self._job_ended = event.number, event.ends
        return b"".join(parts)

    async def _remaining_progress(self, subscription: Subscription) -> list[ProgressEntry]:
        """End the subscription, and return the progress entries that were not sent."""
        done = asyncio.Event()
        self._follower.finish(subscription, done.set)
        await done.wait()
        self._is_subscribed = False
        entries = [event for event in self._buffered if isinstance(event, ProgressEntry)]
        self._buffered = [event for event in self._buffered if not isinstance(event, ProgressEntry)]
        return entries

    def _progress_text(self, entry: ProgressEntry) -> bytes:
        return b"id: %d-%d-%d\nevent: progress\ndata: %b\n\n" % (self._cursor, *entry.id, entry.text)
