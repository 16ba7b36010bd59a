"""How long anything on a database may take: settings, and a limit for a block of code."""

import math
import threading
import time
from typing import Any

CONNECT_TIMEOUT_S = 5
POOL_TIMEOUT_S = 2.0
ENGINE_OPTIONS: dict[str, Any] = {"hide_parameters": True}  # Otherwise errors would contain payloads.

_clock = threading.local()


class time_limit:
    """Limits the time of all statements that this thread executes in the block; PostgreSQL's connection is then closed.

    On SQLite, transactions that begin in the block wait no longer for other writers.
    """

    __slots__ = ("_before", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._before = getattr(_clock, "until", math.inf)
        _clock.until = min(self._before, time.monotonic() + self._seconds)

    def __exit__(self, *_: object) -> None:
        _clock.until = self._before


def time_left() -> float:
    """Return the seconds that are left of the innermost limit; infinity outside of any block."""
    return float(getattr(_clock, "until", math.inf)) - time.monotonic()
