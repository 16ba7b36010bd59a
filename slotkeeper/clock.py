"""The common clock: what the record's database says the time is.

Deadlines, due times and retries stand in the record, and processes on several hosts compare them with the time.  So
all go by one clock, PostgreSQL's, measured by whoever asks for the catalog's version (once a second at most), and
counted on by this process's own steady clock while the database is away.  For a record on SQLite, which lies on one
machine, see slotkeeper/db/shared_clock.py.
"""

import time
from collections import deque

import structlog

log = structlog.get_logger(__name__)

# How far this host's clock may be from the common one before somebody should set it.
MAX_SKEW_MS = 2_000
_KEPT = 8  # measurements, of which the one with the quickest answer is believed
_SET_MS = 500
_SAY_EVERY_S = 60.0
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime_s() -> float:
    """Seconds of a clock that nobody sets and that, where the system has one, also counts while the host sleeps."""
    return time.clock_gettime(_STEADY)


class Clock:
    """Times in ms since the epoch."""

    def __init__(self) -> None:
        self._measured: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # (round trip s, ms ahead of the steady clock)
        self._ahead_ms: float | None = None
        self._said_at = float("-inf")

    def now_ms(self) -> int:
        """The time by the common clock; by this host's, if the common one was never heard."""
        if self._ahead_ms is None:
            return time.time_ns() // 1_000_000
        return round(time.monotonic() * 1000 + self._ahead_ms)

    def adjust(self, common_ms: float, asked_s: float, answered_s: float) -> None:
        """The common clock said `common_ms` between two moments of the steady one."""
        took_s, ahead_ms = answered_s - asked_s, common_ms - (asked_s + answered_s) * 500
        if self._ahead_ms is not None and abs(ahead_ms - self._ahead_ms) > _SET_MS + took_s * 1000:
            self._measured.clear()  # One of the two was set: what was measured before is worth nothing.
        self._measured.append((took_s, ahead_ms))
        self._ahead_ms = min(self._measured)[1]
        if abs(self.skew_ms) > MAX_SKEW_MS and answered_s - self._said_at > _SAY_EVERY_S:
            self._said_at = answered_s
            log.warning("host_clock_differs", by_ms=self.skew_ms)

    @property
    def skew_ms(self) -> int:
        """How far this host's clock is ahead of the common one; negative: behind."""
        return time.time_ns() // 1_000_000 - self.now_ms()


clock = Clock()


def now_ms() -> int:
    """The time by the common clock, in ms since the epoch."""
    return clock.now_ms()
