"""How many more runs living workers accept, reported and summed in Redis.

An offer is made only for a run that a living worker has reported capacity for, so that no offer waits unseen.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from slotkeeper.redis.scripts import Command, Scripts

CapacitySource = Callable[[], int]
"""Returns how many more runs living workers accept, all together."""

REPORT_EVERY_S = 1.0
_REPORT_TTL_MS = 3_500  # Two reports in a row may be lost.
_LEAVES, _STOPS = -1, -2
_STOPPING_TTL_MS = 3_600_000  # The worker's runs are resumed or given up long before.
_CACHE_S = 0.5
_EMPTY_CACHE_S = 0.02  # A worker that has just come, or has just ended a run, must not wait for work.


def unlimited() -> int:
    """Return more than any number of runs."""
    return 2**31


class WorkerScripts(Protocol):
    """The script of this module, on the hash of workers."""

    def report_capacity(self, key: str, *, worker: str, capacity: int, ttl_ms: int) -> Command[int | None]: ...


class WorkerCapacity:
    """Reports and reads the workers' capacity; the sum is cached for a moment.  Redis errors pass through."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._lua: WorkerScripts = scripts.bind(WorkerScripts)
        self._lock = threading.Lock()
        self._total: int | None = 0
        self._cached_until = 0.0
        self._refresh: Callable[[], object] | None = None

    def report(self, worker: str, capacity: int) -> int:
        """Report that `worker` lives and accepts so many more runs, and return the sum of all workers."""
        return self._call(worker, max(capacity, 0)) or 0

    def remove(self, worker: str) -> None:
        """Report that `worker` accepts no more runs."""
        self._call(worker, _LEAVES)

    def report_stopping(self, worker: str) -> None:
        """Report that `worker` is stopping: it accepts no run, and those that it cannot end cost nothing."""
        self._call(worker, _STOPS)

    def total(self) -> int:
        """Return how many more runs living workers accept, at most half a second old.

        After `refresh_in_background`, the value may be older, and this never waits.
        """
        return self._cached_total() or 0

    def is_any_alive(self) -> bool:
        """Return whether there is a worker that lives and is not stopping, however full it is.  As old as `total`."""
        return self._cached_total() is not None

    def _cached_total(self) -> int | None:
        with self._lock:
            if time.monotonic() < self._cached_until:
                return self._total
            if self._refresh is not None:
                self._cached_until = time.monotonic() + _CACHE_S  # One request is enough until its answer is here.
        if self._refresh is None:
            return self._call("", _LEAVES)
        self._refresh()
        return self._total

    def read_total(self) -> int:
        """Return how many more runs living workers accept now."""
        return self._call("", _LEAVES) or 0

    def total_command(self) -> Command[int | None]:
        """Return the command of `read_total`; its result is not cached."""
        return self._command("", _LEAVES)

    def refresh_in_background(self, refresh: Callable[[], object]) -> None:
        """Let `total` return the cached sum, and call `refresh`, which makes another thread call `read_total`."""
        self._refresh = refresh

    def _command(self, worker: str, capacity: int) -> Command[int | None]:
        ttl_ms = _STOPPING_TTL_MS if capacity == _STOPS else _REPORT_TTL_MS
        return self._lua.report_capacity(self._scripts.keys.workers(), worker=worker, capacity=capacity, ttl_ms=ttl_ms)

    def _call(self, worker: str, capacity: int) -> int | None:
        total = self._scripts.run(self._command(worker, capacity))
        with self._lock:
            self._total = total
            self._cached_until = time.monotonic() + (_CACHE_S if total else _EMPTY_CACHE_S)
        return total


def is_stopping(scripts: Scripts, worker: str) -> bool:
    """Return whether this worker reported that it is stopping.  Raises redis errors."""
    report: Any = scripts.redis.hget(scripts.keys.workers(), worker)
    return report is not None and report.startswith(b"stopping ")
