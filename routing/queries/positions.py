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
class QueuePosition:
    """`position` 1: next; None: not waiting in line, or not known.  `estimate`: of its start, from now.

    `offered`: it has a slot and is being started.
    """

    position: int | None = None
    estimate: Estimate | None = None
    offered: bool = False


class QueuePositions:
    """Looks places up.  Safe between threads."""

    def __init__(
        self, fleet: CatalogCache, queues: Queues, estimates: Estimates, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._queues = queues
        self._estimates = estimates
        self._clock = clock
        self._paused_until = 0.0

    def of_job(self, job: QueuedJob) -> QueuePosition:
        """The place of a queued job; at most two calls to Redis."""
        return self._unless_away(lambda: self._at(job, self._position(job)))

    def of_new_job(self, job: QueuedJob, position: Position | None) -> QueuePosition:
        """The place of a job that has come just now, as the room has said it; at most one call to Redis."""
        return self._unless_away(lambda: self._at(job, position, new=True))

    def _unless_away(self, look: Callable[[], QueuePosition]) -> QueuePosition:
        now = self._clock()
        if now < self._paused_until:
            return QueuePosition()
        try:
            return look()
        except TimeoutError:
            self._paused_until = now + _PAUSE_S  # It costs its time-out once, not at every request.
        except RedisError:
            pass
        return QueuePosition()

    def _position(self, job: QueuedJob) -> Position | None:
        return questions.position(self._queues, self._fleet.resolve(job.model).fleet, job)

    def _at(self, job: QueuedJob, position: Position | None, *, new: bool = False) -> QueuePosition:
        if position is None:
            return QueuePosition()
        estimate = self._estimates.of(job, position, new=new)
        return QueuePosition(None if position.offered else position.ahead + 1, estimate, position.offered)
