"""Reads committed events from the database, once for all streams and for all requests that wait for a job's end."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import orjson
import structlog

from app.deferred import EventFilter
from app.schemas.event_schemas import event_data
from slotkeeper.db import Database
from slotkeeper.errors import SlotkeeperError
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES
from slotkeeper.jobs.store import JobStore
from slotkeeper.outbox.event_reader import EventReader, OutboxEvent

log = structlog.get_logger(__name__)

# The pause between two reads: longer after each read without events.
_SHORTEST_S, _LONGEST_S, _GROWTH = 0.050, 0.200, 1.3
_REST_FACTOR = 4  # The pause is at least this multiple of the time that the streams used of the event loop.
_AFTER_FAILURE_S = 1.0
_MAX_JOBS_PER_QUERY = 500  # jobs in one query
_ENDS = frozenset(EVENT_TYPES[state] for state in FINAL_STATES)


@dataclass(frozen=True, slots=True)
class RenderedEvent:
    """An event and its text in a stream (text/event-stream)."""

    entry: OutboxEvent
    text: bytes

    @property
    def number(self) -> int:
        return self.entry.event.id

    @property
    def ends(self) -> bool:
        """Whether the event is the end of its job."""
        return self.entry.event.type in _ENDS


EventHandler: TypeAlias = Callable[[Sequence[RenderedEvent]], None]


def render(entry: OutboxEvent) -> RenderedEvent:
    """Return the event with its text."""
    event = entry.event
    text = b"id: %d\nevent: %b\ndata: %b\n\n" % (event.id, event.type.encode(), orjson.dumps(event_data(entry)))
    return RenderedEvent(entry, text)


class EventFeed:
    """Delivers events to followers.  It reads in a thread, while there are followers or waiting requests.

    Its methods are for the thread of the event loop only, except `_read_events`.
    """

    def __init__(self, database: Database) -> None:
        self.database, self._store = database, JobStore(database)
        self._followers: dict[EventFilter, list[EventHandler]] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}  # by job
        self._unchecked: set[str] = set()  # jobs that may have ended before the first read
        self._thread = ThreadPoolExecutor(1, "feed")
        self._reading: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self.position = 0
        """While the feed reads: all events up to this one were delivered."""

    @property
    def is_reading(self) -> bool:
        return self._reading is not None

    async def follow(self, event_filter: EventFilter, handler: EventHandler) -> int:
        """Call `handler` with the selected events after a position, and return that position."""
        self._followers.setdefault(event_filter, []).append(handler)
        self._wake()
        await self._started.wait()
        return self.position

    def unfollow(self, event_filter: EventFilter, handler: EventHandler) -> None:
        """Stop calling `handler`."""
        self._followers[event_filter].remove(handler)
        if not self._followers[event_filter]:
            del self._followers[event_filter]

    async def wait_for_end(self, job_id: str) -> None:
        """Wait until the job has ended or was removed, or the process stops."""
        ended = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(job_id, []).append(ended)
        self._unchecked.add(job_id)
        self._wake()
        try:
            await ended
        finally:
            self._waiters[job_id].remove(ended)
            if not self._waiters[job_id]:
                del self._waiters[job_id]

    def wake_waiters(self, jobs: set[str] | None = None) -> None:
        """End the waits for these jobs; None: all waits."""
        for job_id in self._waiters if jobs is None else jobs & self._waiters.keys():
            for ended in self._waiters[job_id]:
                if not ended.done():
                    ended.set_result(None)

    def _wake(self) -> None:
        if self._reading is None:
            self._reading = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._followers or self._waiters:
            try:
                await self._read()
            except Exception as error:
                if not isinstance(error, SlotkeeperError):
                    log.error("feed_failed", exc_info=error)
                self._unchecked.update(self._waiters)
                await asyncio.sleep(_AFTER_FAILURE_S)
        self._started.clear()
        self._reading = None

    async def _read(self) -> None:
        """Read and deliver events.  Raises SlotkeeperError while the database is unavailable."""
        loop, reader, pause_s = asyncio.get_running_loop(), EventReader(self.database, after=self.position), _SHORTEST_S
        if not self._started.is_set():
            self.position = await loop.run_in_executor(self._thread, reader.skip_to_end)
            self._started.set()
        while self._followers or self._waiters:
            unchecked = {self._unchecked.pop() for _ in range(min(len(self._unchecked), _MAX_JOBS_PER_QUERY))}
            ended, events = await loop.run_in_executor(self._thread, self._read_events, reader, unchecked)
            read_at = loop.time()
            self.wake_waiters(ended | {event.entry.event.job_id for event in events if event.ends})
            self._deliver(events)
            self.position = reader.position
            await asyncio.sleep(0)  # lets the woken streams send their events
            pause_s = _SHORTEST_S if events else min(pause_s * _GROWTH, _LONGEST_S)
            await asyncio.sleep(max(pause_s, (loop.time() - read_at) * _REST_FACTOR))

    def _read_events(self, reader: EventReader, unchecked: set[str]) -> tuple[set[str], list[RenderedEvent]]:
        """Return which of the jobs have ended or are removed, and the new events, in a thread.

        The jobs are checked first: the end of one that ends later is among the events.
        """
        statuses = self._store.get_statuses(sorted(unchecked)) if unchecked else {}
        ended = {job_id for job_id in unchecked if job_id not in statuses or statuses[job_id].state in FINAL_STATES}
        return ended, [render(entry) for entry in reader.read()]

    def _deliver(self, events: Sequence[RenderedEvent]) -> None:
        """Call the handlers of each filter with the events that it selects."""
        jobs = {None, *(event.entry.event.job_id for event in events)}
        for event_filter, handlers in self._followers.items():
            if event_filter.job_id not in jobs:
                continue
            selected = [event for event in events if event_filter.matches(event.entry)]
            for handler in handlers if selected else ():
                handler(selected)
