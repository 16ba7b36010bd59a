"""Where a waiting job stands: its position, and when it should start.

Both come from Redis, so they are a help and no promise.  While Redis is away they are not known, and nobody waits for
them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError, TimeoutError

from jobs.record import Waiting
from routing.dispatcher import Dispatcher
from routing.policies.forecast import Estimate

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

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._paused_until = 0.0

    def of(self, job: Waiting, *, new: bool = False) -> Place:
        """The place of a queued job; at most two calls to Redis.  `new`: it was submitted just now."""
        now = self._clock()
        if now < self._paused_until:
            return Place()
        try:
            return self._look(job, new)
        except TimeoutError:
            self._paused_until = now + _PAUSE_S  # It costs its time-out once, not at every request.
        except RedisError:
            pass
        return Place()

    def _look(self, job: Waiting, new: bool) -> Place:
        position = self._dispatcher.queues.position(self._dispatcher.fleet.model(job.model).fleet, job)
        if position is None:
            return Place()
        estimate = self._dispatcher.estimate(job, position, new=new)
        return Place(None if position.offered else position.ahead + 1, estimate, position.offered)
