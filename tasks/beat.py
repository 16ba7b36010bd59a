"""Maintenance's schedule, and beat's clock and restraint.

`python -m tasks beat` is Celery's beat with this schedule; it sends a message when a task is due.  Two of them do no
harm: a task that comes too soon after its last run ends at once (tasks/maintenance.py).
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from celery import beat
from celery.schedules import schedstate, schedule

log = structlog.get_logger(__name__)

QUEUE = "maintenance"
_TASK = "maintenance.run"
PERIODS_S = {
    "sweep": 2.0,
    "keep_time": 1.0,
    "reap": 0.5,
    "reap_killed": 0.5,
    "watch_runs": 2.0,
    "check_servers": 10.0,
    "check_urgent_servers": 2.0,
    "sync_locks": 30.0,
    "reconcile": 300.0,
    "check_invariants": 60.0,
    "scan_dlq": 60.0,
    "count": 5.0,
    "tell_due": 5.0,
    "publish_task_events": 30.0,
}
"""Maintenance's tasks, each of which is one function of tasks/maintenance.py, and their periods in s.

Those that are due together come by one message, and run one after another, the most frequent first.
"""

_MAX_QUEUED = 500
_COUNT_PERIOD_S, _COUNT_PERIOD_IF_FULL_S = 30.0, 1.0
_STARTED, _STARTED_AT = datetime.now(UTC), time.monotonic()


def _steady_now() -> datetime:
    """The time by a clock that nobody sets: a step of the host's clock neither hurries nor stops beat."""
    return _STARTED + timedelta(seconds=time.monotonic() - _STARTED_AT)


class AlignedSchedule(schedule):
    """Due at the whole multiples of its period, so that tasks which are due together wake beat and worker once."""

    def __init__(self, seconds: float) -> None:
        super().__init__(timedelta(seconds=seconds), nowfun=_steady_now)
        self._period_s = seconds

    def is_due(self, last_run_at: datetime) -> schedstate:
        """Return whether it is due, and in how many seconds it is due next."""
        now_s, last_s = _seconds(self.now()), _seconds(last_run_at)
        return schedstate(now_s // self._period_s > last_s // self._period_s, self._period_s - now_s % self._period_s)


def _seconds(moment: datetime) -> float:
    return (moment - _STARTED).total_seconds()


def beat_entries() -> dict[str, dict[str, Any]]:
    """Return `beat_schedule`: all is due when beat begins.

    No message expires, which would compare two hosts' clocks.
    """
    long_ago = _STARTED - timedelta(days=1)
    return {
        name: {"task": _TASK, "schedule": AlignedSchedule(period_s), "args": [[name]], "last_run_at": long_ago}
        for name, period_s in PERIODS_S.items()
    }


class Scheduler(beat.Scheduler):
    """Celery's own, but for two things.

    It sends what is due together as one message: a message costs more than most tasks of maintenance.  And it adds
    nothing to a queue that no worker reads.
    """

    _due: Sequence[str] = ()
    _counted_at = float("-inf")
    _is_full = False

    def schedules_equal(self, old_schedules: Any, new_schedules: Any) -> bool:
        """Return whether there is a schedule: it does not change.  Celery's own compares all entries at each tick."""
        return old_schedules is not None

    def adjust(self, n: Any, drift: float = 0.0) -> Any:
        """Return `n`: wake when a task is due.  Celery's own wakes 10 ms before, and looks at its clock until then."""
        return n

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due, and return when more will be, in s."""
        while (wait_s := super().tick(*args, **kwargs)) == 0:
            pass
        if self._due and not self._has_backlog():
            names = sorted(self._due, key=PERIODS_S.__getitem__)
            super().apply_entry(self.Entry("maintenance", _TASK, args=(names,), app=self.app), self.producer)
        self._due = ()
        return float(wait_s)

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        if entry.task == _TASK:
            self._due = [*self._due, *entry.args[0]]
        else:
            super().apply_entry(entry, producer)

    def _has_backlog(self) -> bool:
        now = time.monotonic()
        if now - self._counted_at >= (_COUNT_PERIOD_IF_FULL_S if self._is_full else _COUNT_PERIOD_S):
            self._counted_at, was_full = now, self._is_full
            self._is_full = self._count_queued() > _MAX_QUEUED
            if self._is_full and not was_full:
                log.warning("maintenance_overdue", queue=QUEUE)
        return self._is_full

    def _count_queued(self) -> int:
        """Return how many messages are in the queue; 0 if there is none yet, or the broker does not say."""
        try:
            channel: Any
            with self.connection.channel() as channel:  # RabbitMQ closes it where there is no queue.
                return int(channel.queue_declare(QUEUE, passive=True).message_count)
        except Exception:  # Each transport has errors of its own, and sending will meet the same.
            return 0
