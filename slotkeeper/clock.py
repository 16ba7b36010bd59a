"""The clock that all processes share: the database's time, continued by this host's monotonic clock.

Deadlines, due times and retries are stored, and processes on several hosts compare them with the time.  So all
processes use PostgreSQL's clock.  A process measures it when it reads the catalog's version, at most once a second.
slotkeeper/db/shared_clock.py has the clock of an SQLite database, which is on one machine.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

# Difference to the database's clock above which an operator should correct this host's clock.
MAX_SKEW_MS = 2_000
_KEPT = 8  # measurements; the one with the shortest round trip counts
_SET_MS = 500
_WARN_EVERY_S = 60.0
_CLOCK_ID = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime_s() -> float:
    """Return seconds of a monotonic clock, which also counts suspensions where the system can."""
    return time.clock_gettime(_CLOCK_ID)


class Step(NamedTuple):
    """The shared clock was set: by how much, and what it showed then."""

    at_ms: int
    by_ms: int  # negative: back


class Clock:
    """The database's time in ms since the epoch, estimated from measurements."""

    def __init__(self) -> None:
        self.steps: Sequence[Step] = ()
        """The steps that the database knows, the last one first."""
        self.offset_ms: int | None = None
        """The stored offset that this clock uses, ms ahead of the monotonic clock; None: there is none."""
        self._pinned = threading.local()
        # (round trip s, ms ahead of the monotonic clock)
        self._measured: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._ahead_ms: float | None = None
        self._warned_at = float("-inf")

    def now_ms(self) -> int:
        """Return the database's time; this host's time before the first measurement."""
        if self._ahead_ms is None:
            return time.time_ns() // 1_000_000
        return round(time.monotonic() * 1000 + self._ahead_ms)

    def steady_ms(self) -> int:
        """Return a time that no step changes, in ms since some moment: for intervals that a process measures."""
        return self.now_ms() - (self.offset_ms or 0)

    def moved_since(self, offset_ms: int | None) -> int:
        """Return by how much this clock was set since its `offset_ms` was this one."""
        return 0 if offset_ms is None or self.offset_ms is None else self.offset_ms - offset_ms

    @contextmanager
    def pin_offset(self) -> Iterator[None]:
        """Let all that this thread writes name the present offset.

        It compares stored times with the time again and again: if the clock is set meanwhile, some of them are compared
        with the other time, so its writes must be refused.
        """
        self._pinned.offset_ms = self.offset_ms
        try:
            yield
        finally:
            del self._pinned.offset_ms

    def get_offset_of_writes(self) -> int | None:
        """Return the offset that the times of a new write are based on."""
        found: int | None = getattr(self._pinned, "offset_ms", self.offset_ms)
        return found

    def use_offset(self, offset_ms: int) -> None:
        """Go by a stored offset."""
        now_s = time.monotonic()
        self.offset_ms = offset_ms
        self.adjust(offset_ms + now_s * 1000, now_s, now_s)

    def ago_ms(self, duration_ms: int, now_ms: int) -> int:
        """Return what the clock showed `duration_ms` before `now_ms`: an older moment has an earlier time.

        After a step back some times came twice; of these none counts as older, so that nothing is deleted early.
        """
        ago_ms = now_ms - duration_ms
        for step in self.steps:
            if ago_ms >= step.at_ms:
                break
            ago_ms = min(ago_ms - step.by_ms, step.at_ms)
        return ago_ms

    def adjust(self, common_ms: float, asked_s: float, answered_s: float) -> None:
        """Add a measurement: the database's clock was at `common_ms` between two moments of the monotonic clock."""
        took_s, ahead_ms = answered_s - asked_s, common_ms - (asked_s + answered_s) * 500
        if self._ahead_ms is not None and abs(ahead_ms - self._ahead_ms) > _SET_MS + took_s * 1000:
            self._measured.clear()  # One of the two clocks was set, so earlier measurements are wrong.
        self._measured.append((took_s, ahead_ms))
        self._ahead_ms = min(self._measured)[1]
        if abs(self.skew_ms) > MAX_SKEW_MS and answered_s - self._warned_at > _WARN_EVERY_S:
            self._warned_at = answered_s
            import structlog  # Here, so that a command that only imports values does not load it.

            structlog.get_logger(__name__).warning("host_clock_differs", by_ms=self.skew_ms)

    @property
    def skew_ms(self) -> int:
        """How far this host's clock is ahead of the database's; negative: behind."""
        return time.time_ns() // 1_000_000 - self.now_ms()


clock = Clock()


def now_ms() -> int:
    """Return the time of the shared clock, in ms since the epoch."""
    return clock.now_ms()


def iso_time(at_ms: int) -> str:
    """Return a time as ISO 8601 in UTC with milliseconds."""
    return f"{_format_second(at_ms // 1000)}.{at_ms % 1000:03d}Z"


@lru_cache(maxsize=64)
def _format_second(at_s: int) -> str:
    # Cached, because events are published in the order of their times, so many in a row have the same second.
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%S}"
