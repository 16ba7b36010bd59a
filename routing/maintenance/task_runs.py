"""Whether maintenance goes on: each sweep leaves a mark in Redis, which fades; each task says when it last ended."""

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
_LATE, _LATE_S = 5.0, 30.0  # periods, and seconds more, after which a task that has not ended again is late
_TOLD_EVERY_S = 1.0


def mark_sweep(scripts: Scripts) -> None:
    """Maintenance has swept just now.  Raises redis errors."""
    scripts.redis.set(scripts.keys.maintenance_heartbeat(), "", ex=SWEEP_MARK_TTL_S)


def has_sweep_stopped(scripts: Scripts) -> bool:
    """Nobody has swept for SWEEP_MARK_TTL_S.  Raises redis errors."""
    return not scripts.redis.exists(scripts.keys.maintenance_heartbeat())


@dataclass(frozen=True, slots=True)
class TaskRun:
    """When a task of maintenance last came to its end, ms since the epoch, and how long it took."""

    ended_ms: int
    took_s: float


class TaskRunRecorder:
    """Tells when the tasks of one process last ended: what ends within a second is told together."""

    def __init__(self, scripts: Scripts, clock: Callable[[], float] = time.monotonic) -> None:
        self._scripts, self._clock = scripts, clock
        self._lock = threading.Lock()
        self._untold: dict[Any, Any] = {}
        self._told_at = float("-inf")

    def note(self, task: str, took_s: float) -> None:
        """A task has come to its end.  While Redis is away nobody is told."""
        with self._lock:
            self._untold[task] = f"{now_ms()} {took_s:.6f}"
            if self._clock() < self._told_at + _TOLD_EVERY_S:
                return
            untold, self._untold = self._untold, {}
            self._told_at = self._clock()
        with suppress(RedisError):
            self._scripts.redis.hset(self._scripts.keys.tasks(), mapping=untold)


def find_late_tasks(runs: Mapping[str, TaskRun], periods_s: Mapping[str, float]) -> dict[str, float]:
    """Return task -> seconds since its last run ended, of those that should have ended again."""
    now = now_ms()
    ages_s = {name: (now - runs[name].ended_ms) / 1000 for name in periods_s if name in runs}
    return {name: age_s for name, age_s in ages_s.items() if age_s > _LATE * periods_s[name] + _LATE_S}


def read_task_runs(scripts: Scripts) -> dict[str, TaskRun]:
    """Task -> its last run that came to its end.  Raises redis errors."""
    runs = {}
    for name, told in scripts.hash(scripts.keys.tasks()).items():
        ended_ms, took_s = told.split()
        runs[name] = TaskRun(int(ended_ms), float(took_s))
    return runs
