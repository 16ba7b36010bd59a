"""Where a waiting job stands: its position, and when it should start.

Both come from Redis, so they are a help and no promise.  While Redis is away they are not known, and nobody waits for
them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError, TimeoutError

from routing.admission import questions
from routing.admission.questions import Position
from routing.queries.estimates import Estimates
from routing.queries.interval import Estimate
from routing.queue.queues import Queues
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.registry.catalog_cache import CatalogCache

_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """`position` 1: next; None: not waiting in line, or not known.  `estimate`: of its start, from now.

    `offered`: it has a slot and is being started.
    """

    position: int | None = None
    estimate: Estimate | None = None
    offered: bool = False


class Places:
    """Looks places up.  Safe between threads."""

    def __init__(
        self, fleet: CatalogCache, queues: Queues, estimates: Estimates, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._queues = queues
        self._estimates = estimates
        self._clock = clock
        self._paused_until = 0.0

    def of(self, job: QueuedJob) -> Place:
        """The place of a queued job; at most two calls to Redis."""
        return self._unless_away(lambda: self._at(job, self._position(job)))

    def on_entry(self, job: QueuedJob, position: Position | None) -> Place:
        """The place of a job that has come just now, as the room has said it; at most one call to Redis."""
        return self._unless_away(lambda: self._at(job, position, new=True))

    def _unless_away(self, look: Callable[[], Place]) -> Place:
        now = self._clock()
        if now < self._paused_until:
            return Place()
        try:
            return look()
        except TimeoutError:
            self._paused_until = now + _PAUSE_S  # It costs its time-out once, not at every request.
        except RedisError:
            pass
        return Place()

    def _position(self, job: QueuedJob) -> Position | None:
        return questions.position(self._queues, self._fleet.resolve(job.model).fleet, job)

    def _at(self, job: QueuedJob, position: Position | None, *, new: bool = False) -> Place:
        if position is None:
            return Place()
        estimate = self._estimates.of(job, position, new=new)
        return Place(None if position.offered else position.ahead + 1, estimate, position.offered)
