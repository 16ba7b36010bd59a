"""What happens to jobs, read from the record once for all who follow it or wait for a job's end.

One thread reads, and only while somebody listens; whoever listens is called in the event loop, and holds nothing else.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import orjson
import structlog

from app.job_answers import happened
from app.later import Wanted
from database.db import Database
from foundation.errors import SlotkeeperError
from jobs.events import TYPES
from jobs.states import FINAL
from jobs.store import Store
from outbox.tail import Entry, Tail

log = structlog.get_logger(__name__)

# How long it rests between two looks: longer each time that nothing has happened.
_SHORTEST_S, _LONGEST_S, _GROWTH = 0.050, 0.200, 1.3
_SHARE = 4  # It rests so many times as long as handing out has kept the loop.
_AFTER_FAILURE_S = 1.0
_AT_ONCE = 100  # are called in one turn of the loop
_MOST_ASKED = 500  # jobs in one look

ENDS = frozenset(TYPES[state] for state in FINAL)
"""Types of events that end a job."""


@dataclass(frozen=True, slots=True)
class Shown:
    """An event, and as it stands in a stream."""

    entry: Entry
    text: bytes

    @property
    def number(self) -> int:
        return self.entry.event.id

    @property
    def ends(self) -> bool:
        return self.entry.event.type in ENDS


class Listener(Protocol):
    """Somebody who follows events."""

    wanted: Wanted

    def begin(self, position: int) -> None:
        """From now on all that is wanted comes by `take`, of events after `position`."""

    def take(self, part: Sequence[Shown], text: bytes) -> None:
        """These have happened; `text`: all of them as they stand in a stream."""

    def end(self) -> None:
        """There is no more: the process stops."""


@dataclass(slots=True)
class _Batch:
    """What one look has found."""

    round: int
    shown: list[Shown]
    position: int
    ended: set[str]
    """Jobs that somebody waits for, and that have ended or are gone."""
    handed: threading.Event = field(default_factory=threading.Event)
    kept_s: float = 0.0  # how long it has kept the event loop


class Feed:
    """Called in the event loop's thread only."""

    def __init__(self, database: Database, call_soon: Callable[..., object]) -> None:
        """`call_soon` runs a function in the event loop's thread, from any other."""
        self._database, self._call_soon = database, call_soon
        self._store = Store(database)
        self._listeners: dict[Wanted, dict[Listener, None]] = {}
        self._waiters: dict[str, dict[Callable[[], None], None]] = {}
        self._asked: SimpleQueue[str] = SimpleQueue()
        self._round = 0  # grows with each time that nobody listens any more
        self._position: int | None = None  # None: reading has not begun
        self.handed = 0
        """All events up to this one have been given to those who want them."""
        self._wanted, self._stopping = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # -- who listens -----------------------------------------------------------------------------------------

    def follow(self, listener: Listener) -> None:
        """Call it with all that it wants; first its `begin`, as soon as reading has begun."""
        self._listeners.setdefault(listener.wanted, {})[listener] = None
        self._be_awake()
        if self._position is not None:
            listener.begin(self._position)

    def unfollow(self, listener: Listener) -> None:
        group = self._listeners.get(listener.wanted, {})
        group.pop(listener, None)
        if not group:
            self._listeners.pop(listener.wanted, None)
        self._rest_if_alone()

    def wait_for(self, job_id: str, ended: Callable[[], None]) -> None:
        """Call `ended` once when the job has ended, or is gone."""
        self._waiters.setdefault(job_id, {})[ended] = None
        self._asked.put(job_id)  # It may have ended before.
        self._be_awake()

    def forget(self, job_id: str, ended: Callable[[], None]) -> None:
        """Who waited does not any more."""
        group = self._waiters.get(job_id, {})
        group.pop(ended, None)
        if not group:
            self._waiters.pop(job_id, None)
        self._rest_if_alone()

    def stop(self) -> None:
        """The process stops: nobody is kept."""
        self._stopping.set()
        self._wanted.set()
        for listener in [it for group in self._listeners.values() for it in group]:
            listener.end()
        self._end_waiting(list(self._waiters))

    def _be_awake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
            self._thread.start()
        self._wanted.set()

    def _rest_if_alone(self) -> None:
        if not self._listeners and not self._waiters and not self._stopping.is_set():
            self._wanted.clear()
            self._round += 1
            self._position = None

    # -- handing out -----------------------------------------------------------------------------------------

    def _begun(self, round_: int, position: int) -> None:
        if round_ != self._round:
            return
        self._position = self.handed = position
        for job_id in self._waiters:  # Reading begins here: what ended before is to be looked at.
            self._asked.put(job_id)
        for listener in [it for group in self._listeners.values() for it in group]:
            listener.begin(position)

    def _hand_out(self, batch: _Batch) -> None:
        self._end_waiting(batch.ended | {it.entry.event.job_id for it in batch.shown if it.ends})
        if batch.round != self._round:
            batch.handed.set()
            return
        self._position = batch.position  # Whoever comes now begins behind this.
        self._go_on(batch, iter(list(self._calls(batch.shown))))

    def _calls(self, shown: Sequence[Shown]) -> Iterator[Callable[[], None]]:
        for wanted, group in self._concerned({it.entry.event.job_id for it in shown}):
            part = [it for it in shown if wanted.includes(it.entry)]
            if part:
                text = b"".join(it.text for it in part)
                yield from (partial(listener.take, part, text) for listener in group)

    def _concerned(self, jobs: Iterable[str]) -> Iterator[tuple[Wanted, Iterable[Listener]]]:
        """Of those who follow one job each, only those whose job it is."""
        return ((it, list(group)) for it, group in self._listeners.items() if it.job_id is None or it.job_id in jobs)

    def _go_on(self, batch: _Batch, calls: Iterator[Callable[[], None]]) -> None:
        """Make some of the calls, and come back for the others after whatever else the loop has to do."""
        began = time.monotonic()
        for _ in range(_AT_ONCE):
            call = next(calls, None)
            if call is None:
                break
            call()
        batch.kept_s += time.monotonic() - began
        if call is not None:
            self._call_soon(self._go_on, batch, calls)
            return
        if batch.round == self._round:
            self.handed = batch.position
        batch.handed.set()

    def _end_waiting(self, jobs: Iterable[str]) -> None:
        for job_id in jobs:
            for ended in list(self._waiters.pop(job_id, ())):
                ended()
        self._rest_if_alone()

    # -- reading, in a thread of its own -----------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wanted.wait()
            try:
                self._read(self._round)
            except Exception as error:
                if not isinstance(error, SlotkeeperError):
                    log.error("feed_failed", exc_info=error)
                self._stopping.wait(_AFTER_FAILURE_S)

    def _read(self, round_: int) -> None:
        """Read on for as long as somebody listens."""
        tail, pause_s = Tail(self._database), _SHORTEST_S
        self._call_soon(self._begun, round_, tail.begin())
        while round_ == self._round and not self._stopping.is_set():
            try:
                batch = self._look(round_, tail)
            except SlotkeeperError:
                self._stopping.wait(_AFTER_FAILURE_S)
                continue
            pause_s = _SHORTEST_S if batch.shown else min(pause_s * _GROWTH, _LONGEST_S)
            if batch.shown or batch.ended:
                self._call_soon(self._hand_out, batch)
                while not batch.handed.wait(1.0) and not self._stopping.is_set():
                    pass
            self._stopping.wait(max(pause_s, batch.kept_s * _SHARE))

    def _look(self, round_: int, tail: Tail) -> _Batch:
        asked = set[str]()
        try:
            with suppress(Empty):
                while len(asked) < _MOST_ASKED:
                    asked.add(self._asked.get_nowait())
            ended = self._ended(asked)
        except SlotkeeperError:
            for job_id in asked:
                self._asked.put(job_id)
            raise
        return _Batch(round_, [Shown(it, shown(it)) for it in tail.read()], tail.position, ended)

    def _ended(self, jobs: set[str]) -> set[str]:
        """Those that have ended, or are gone.  Asked before the tail is read: what ends after this is read there."""
        if not jobs:
            return jobs
        briefs = self._store.briefs(sorted(jobs))
        return {job_id for job_id in jobs if job_id not in briefs or briefs[job_id].state in FINAL}


def shown(entry: Entry) -> bytes:
    """An event as it stands in a stream (text/event-stream)."""
    event = entry.event
    text = orjson.dumps(happened(entry))
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.id, event.type.encode(), text)
