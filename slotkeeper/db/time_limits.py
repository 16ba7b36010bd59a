"""What connections to both databases share: how long anything may take, and what errors do not tell."""

import math
import threading
import time
from typing import Any

CONNECT_TIMEOUT_S = 5
POOL_TIMEOUT_S = 2.0
ENGINE_OPTIONS: dict[str, Any] = {"hide_parameters": True}  # or the texts of errors would hold payloads

_clock = threading.local()


class time_limit:
    """Whatever this thread asks of PostgreSQL meanwhile takes no longer in all: then the connection is given up.

    On SQLite, what begins meanwhile waits no longer for others who write.
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
    """Seconds of the block in `within` that are left; infinite outside of any."""
    return float(getattr(_clock, "until", math.inf)) - time.monotonic()
