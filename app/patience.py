"""Waiting for a job to end, by looking at the record.

A request that waits holds a thread, so only so many of them may; the others are answered at once, and ask again.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jobs.states import FINAL, State

_FIRST_LOOK_S, _LONGEST_LOOK_S, _GROWTH = 0.020, 0.250, 1.5

Look = Callable[[], State | None]

MAY_WAIT = "slotkeeper.may_wait"
"""In the WSGI environment: this request has a thread that may sleep; if False, another's would be kept."""
HAS_LEFT = "slotkeeper.has_left"
"""There: a function that says whether nobody waits for the answer any more."""


_ANY: Mapping[str, Any] = {}


def _never() -> bool:
    return False


class Patience:
    """Bounds how many requests of this process wait."""

    def __init__(
        self,
        most: int,
        pause: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._room = threading.BoundedSemaphore(most) if most > 0 else None
        self._stopping = threading.Event()
        self._pause = pause or self._stopping.wait
        self._clock = clock

    def wait(self, look: Look, seconds: float, environ: Mapping[str, Any] = _ANY) -> None:
        """Return when the job has ended or is gone, when time is up, or at once if too many wait already.

        `environ`: of the request that waits; its client may leave, and it may be one that must not wait.
        """
        if not environ.get(MAY_WAIT, True):
            return
        if seconds <= 0 or self._room is None or not self._room.acquire(blocking=False):
            return
        try:
            self._watch(look, self._clock() + seconds, environ.get(HAS_LEFT, _never))
        finally:
            self._room.release()

    def stop(self) -> None:
        """The process ends: answer those who wait, and let nobody wait any more."""
        self._stopping.set()

    def _watch(self, look: Look, until: float, has_left: Callable[[], bool]) -> None:
        step_s = _FIRST_LOOK_S
        while _goes_on(look()):
            left_s = until - self._clock()
            if left_s <= 0 or self._stopping.is_set() or has_left():
                return
            self._pause(min(step_s, left_s))
            step_s = min(step_s * _GROWTH, _LONGEST_LOOK_S)


def _goes_on(state: State | None) -> bool:
    return state is not None and state not in FINAL
