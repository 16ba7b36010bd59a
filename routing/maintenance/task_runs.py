"""When maintenance tasks last ran, and whether sweeps have stopped."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from slotkeeper.clock import now_ms
from slotkeeper.redis.scripts import Scripts

SWEEP_MARK_TTL_S = 15
_LATE_PERIODS, _LATE_S = 5.0, 30.0  # A task is late if it has not ended for so many periods and seconds.
_WRITE_EVERY_S = 1.0


def mark_sweep(scripts: Scripts) -> None:
    """Mark in Redis that a sweep has ended; the mark expires.  Raises redis errors."""
    scripts.redis.set(scripts.keys.maintenance_heartbeat(), "", ex=SWEEP_MARK_TTL_S)


def has_sweep_stopped(scripts: Scripts) -> bool:
    """Return whether no sweep has ended for SWEEP_MARK_TTL_S.  Raises redis errors."""
    return not scripts.redis.exists(scripts.keys.maintenance_heartbeat())


@dataclass(frozen=True, slots=True)
class TaskRun:
    """When a maintenance task last ended, ms since the epoch, and how long it took."""

    ended_ms: int
    took_s: float


class TaskRunRecorder:
    """Writes to Redis when the tasks of this process last ended, at most once a second."""

    def __init__(self, scripts: Scripts, clock: Callable[[], float] = time.monotonic) -> None:
        self._scripts, self._clock = scripts, clock
        self._lock = threading.Lock()
        self._unwritten: dict[Any, Any] = {}
        self._written_at = float("-inf")

    def note(self, task: str, took_s: float) -> None:
        """Note that a task has ended.  While Redis does not answer, this is lost."""
        with self._lock:
            self._unwritten[task] = f"{now_ms()} {took_s:.6f}"
            if self._clock() < self._written_at + _WRITE_EVERY_S:
                return
            unwritten, self._unwritten = self._unwritten, {}
            self._written_at = self._clock()
        with suppress(RedisError):
            self._scripts.redis.hset(self._scripts.keys.tasks(), mapping=unwritten)


def find_late_tasks(runs: Mapping[str, TaskRun], periods_s: Mapping[str, float]) -> dict[str, float]:
    """Return task -> seconds since its last run ended, of those that should have ended again."""
    now = now_ms()
    ages_s = {name: (now - runs[name].ended_ms) / 1000 for name in periods_s if name in runs}
    return {name: age_s for name, age_s in ages_s.items() if age_s > _LATE_PERIODS * periods_s[name] + _LATE_S}


def read_task_runs(scripts: Scripts) -> dict[str, TaskRun]:
    """Return task -> its last run that ended.  Raises redis errors."""
    runs = {}
    for name, text in scripts.hash(scripts.keys.tasks()).items():
        ended_ms, took_s = text.split()
        runs[name] = TaskRun(int(ended_ms), float(took_s))
    return runs
