"""Where a waiting job stands: its position, and a guess when it will start.

Both come from Redis and from the latest runs, so they are a help and no promise.  While Redis is away they are
not known, and nobody waits for them.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError, TimeoutError

from jobs.errors import RecordUnavailable
from jobs.record import Waiting
from jobs.states import State
from jobs.store import Store
from routing.dispatcher import Dispatcher

_SAMPLE = 200  # of the latest completed jobs, of all models
_KEPT_S = 10.0
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """`position` 1: next; None: not waiting in line, or not known.  `estimated_start_s`: from now."""

    position: int | None = None
    estimated_start_s: float | None = None


class Places:
    """Looks places up.  Safe between threads."""

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._dispatcher = dispatcher
        self._durations = Durations(dispatcher.store, clock)
        self._clock = clock
        self._paused_until = 0.0

    def of(self, job: Waiting) -> Place:
        """The place of a queued job; one call to Redis."""
        position = self._position(job)
        if position is None:
            return Place()
        slots = self._dispatcher.fleet.snapshot().slots_of(job.model)
        duration_s = self._durations.mean_s(job.model)
        if not slots or duration_s is None:
            return Place(position)
        return Place(position, round(position / slots * duration_s, 1))

    def _position(self, job: Waiting) -> int | None:
        now = self._clock()
        if now < self._paused_until:
            return None
        try:
            ahead = self._dispatcher.queues.ahead(self._dispatcher.fleet.model(job.model).fleet, job)
        except TimeoutError:
            self._paused_until = now + _PAUSE_S  # It costs its time-out once, not at every request.
            return None
        except RedisError:
            return None
        return None if ahead is None else ahead + 1


class Durations:
    """How long the latest runs of each model took; read again every few seconds."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._until = float("-inf")
        self._means: dict[str, float] = {}

    def mean_s(self, model: str) -> float | None:
        """None: no job of this model is among the latest."""
        if self._clock() >= self._until and self._lock.acquire(blocking=False):
            try:
                self._read()
            finally:
                self._lock.release()
        return self._means.get(model)

    def _read(self) -> None:
        self._until = self._clock() + _KEPT_S
        took: dict[str, list[int]] = defaultdict(list)
        try:
            latest = self._store.find(state=State.COMPLETED, limit=_SAMPLE)
        except RecordUnavailable:
            return
        for job in latest:
            if job.started_ms is not None and job.finished_ms is not None:
                took[job.model].append(job.finished_ms - job.started_ms)
        self._means = {model: sum(all_ms) / len(all_ms) / 1000 for model, all_ms in took.items()}
