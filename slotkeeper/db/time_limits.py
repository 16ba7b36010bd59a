"""Limit how long a block of code may wait for a database: one statement, or all steps of a request together."""

import math
import threading
import time
from typing import Any

CONNECT_TIMEOUT_S = 5
POOL_TIMEOUT_S = 2.0
LOOK_S = 2.5
"""How long to look for a newer value of what is known; long enough for a new connection."""
ENGINE_OPTIONS: dict[str, Any] = {"hide_parameters": True}  # Otherwise errors would contain payloads.

_clock = threading.local()


class time_limit:
    """Limits the time of all statements that this thread executes in the block; PostgreSQL's connection is then closed.

    On SQLite, transactions that begin in the block wait no longer for other writers.

    alone: the limits around the block do not count in it, for work that this thread does for others as well.
    """

    __slots__ = ("_alone", "_before", "_seconds")

    def __init__(self, seconds: float, *, alone: bool = False) -> None:
        self._seconds, self._alone = seconds, alone

    def __enter__(self) -> None:
        self._before = getattr(_clock, "until", math.inf)
        until = time.monotonic() + self._seconds
        _clock.until = until if self._alone else min(self._before, until)

    def __exit__(self, *_: object) -> None:
        _clock.until = self._before


def time_left() -> float:
    """Return the seconds that are left of the innermost limit; infinity outside of any block."""
    return float(getattr(_clock, "until", math.inf)) - time.monotonic()
