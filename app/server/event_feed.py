"""Events as they are committed, read from the database once for all who follow them or wait for a job's end."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import orjson
import structlog

from app.deferred import EventFilter
from app.job_answers import event_data
from slotkeeper.db import Database
from slotkeeper.errors import SlotkeeperError
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES
from slotkeeper.jobs.store import JobStore
from slotkeeper.outbox.event_reader import EventReader, OutboxEvent

log = structlog.get_logger(__name__)

# The pause between two readings: longer each time that nothing has happened.
_SHORTEST_S, _LONGEST_S, _GROWTH = 0.050, 0.200, 1.3
_REST_FACTOR = 4  # It is at least so many times as long as the streams have kept the event loop.
_AFTER_FAILURE_S = 1.0
_MAX_JOBS_PER_QUERY = 500  # jobs in one query
_ENDS = frozenset(EVENT_TYPES[state] for state in FINAL_STATES)


@dataclass(frozen=True, slots=True)
class RenderedEvent:
    """An event, and its text in a stream (text/event-stream)."""

    entry: OutboxEvent
    text: bytes

    @property
    def number(self) -> int:
        return self.entry.event.id

    @property
    def ends(self) -> bool:
        """Whether it ends its job."""
        return self.entry.event.type in _ENDS


EventHandler: TypeAlias = Callable[[Sequence[RenderedEvent]], None]


def render(entry: OutboxEvent) -> RenderedEvent:
    event = entry.event
    text = b"id: %d\nevent: %b\ndata: %b\n\n" % (event.id, event.type.encode(), orjson.dumps(event_data(entry)))
    return RenderedEvent(entry, text)


class EventFeed:
    """Called in the event loop's thread only.  It reads, in a thread, while anybody follows or waits."""

    def __init__(self, database: Database) -> None:
        self.database, self._store = database, JobStore(database)
        self._followers: dict[EventFilter, list[EventHandler]] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}  # by job
        self._asked: set[str] = set()  # jobs that may have ended before
        self._thread = ThreadPoolExecutor(1, "feed")
        self._reading: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        self.position = 0
        """While it reads: all events up to this one have been given to those who want them."""

    @property
    def is_reading(self) -> bool:
        return self._reading is not None

    async def follow(self, wanted: EventFilter, take: EventHandler) -> int:
        """Give to `take` all that is wanted of the events after the position that this returns."""
        self._followers.setdefault(wanted, []).append(take)
        self._wake()
        await self._begun.wait()
        return self.position

    def unfollow(self, wanted: EventFilter, take: EventHandler) -> None:
        self._followers[wanted].remove(take)
        if not self._followers[wanted]:
            del self._followers[wanted]

    async def wait_for_end(self, job_id: str) -> None:
        """Wait until the job has ended, or is gone, or the process stops."""
        ended = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(job_id, []).append(ended)
        self._asked.add(job_id)
        self._wake()
        try:
            await ended
        finally:
            self._waiters[job_id].remove(ended)
            if not self._waiters[job_id]:
                del self._waiters[job_id]

    def wake_waiters(self, jobs: set[str] | None = None) -> None:
        """For these jobs, or all."""
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
                self._asked.update(self._waiters)
                await asyncio.sleep(_AFTER_FAILURE_S)
        self._begun.clear()
        self._reading = None

    async def _read(self) -> None:
        """Raises SlotkeeperError while the database is away."""
        loop, tail, pause_s = asyncio.get_running_loop(), EventReader(self.database, after=self.position), _SHORTEST_S
        if not self._begun.is_set():
            self.position = await loop.run_in_executor(self._thread, tail.skip_to_end)
            self._begun.set()
        while self._followers or self._waiters:
            asked = {self._asked.pop() for _ in range(min(len(self._asked), _MAX_JOBS_PER_QUERY))}
            ended, events = await loop.run_in_executor(self._thread, self._look, tail, asked)
            began = loop.time()
            self.wake_waiters(ended | {it.entry.event.job_id for it in events if it.ends})
            self._hand_out(events)
            self.position = tail.position
            await asyncio.sleep(0)  # until all who were woken have sent what they got
            pause_s = _SHORTEST_S if events else min(pause_s * _GROWTH, _LONGEST_S)
            await asyncio.sleep(max(pause_s, (loop.time() - began) * _REST_FACTOR))

    def _look(self, tail: EventReader, asked: set[str]) -> tuple[set[str], list[RenderedEvent]]:
        """Return which of the jobs have ended or are gone, and what has happened: what ends later is read there."""
        briefs = self._store.get_statuses(sorted(asked)) if asked else {}
        ended = {it for it in asked if it not in briefs or briefs[it].state in FINAL_STATES}
        return ended, [render(entry) for entry in tail.read()]

    def _hand_out(self, events: Sequence[RenderedEvent]) -> None:
        jobs = {None, *(it.entry.event.job_id for it in events)}
        for wanted, takes in self._followers.items():
            part = [it for it in events if wanted.matches(it.entry)] if wanted.job_id in jobs else []
            for take in takes if part else ():
                take(part)
