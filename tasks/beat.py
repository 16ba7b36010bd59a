"""The maintenance schedule, and the scheduler of Celery beat.

`python -m tasks beat` is Celery's beat with this schedule; it sends a message when a task is due.  Two beat processes
do no harm: a task that comes too soon after its last run returns at once (tasks/maintenance.py).
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from celery import beat
from celery.schedules import schedstate, schedule

from tasks.periods import PERIODS_S

log = structlog.get_logger(__name__)

QUEUE = "maintenance"
_TASK = "maintenance.run"
_MAX_QUEUED = 500
_COUNT_PERIOD_S, _COUNT_PERIOD_IF_FULL_S = 30.0, 1.0
_STARTED, _STARTED_AT = datetime.now(UTC), time.monotonic()


def _steady_now() -> datetime:
    """Return the time by a monotonic clock: Celery's own schedule stops when the host's clock is set back."""
    return _STARTED + timedelta(seconds=time.monotonic() - _STARTED_AT)


class AlignedSchedule(schedule):
    """A schedule that is due at the multiples of its period: tasks that are due together wake beat and worker once."""

    def __init__(self, seconds: float) -> None:
        super().__init__(timedelta(seconds=seconds), nowfun=_steady_now)
        self._period_s = seconds

    def is_due(self, last_run_at: datetime) -> schedstate:
        """Return whether the task is due, and in how many seconds it is due next."""
        now_s, last_s = _seconds(self.now()), _seconds(last_run_at)
        return schedstate(now_s // self._period_s > last_s // self._period_s, self._period_s - now_s % self._period_s)


def _seconds(moment: datetime) -> float:
    return (moment - _STARTED).total_seconds()


def beat_entries() -> dict[str, dict[str, Any]]:
    """Return the setting `beat_schedule`, in which every task is due when beat starts.

    The entries have no `expires`, which would compare the clocks of two hosts.
    """
    long_ago = _STARTED - timedelta(days=1)
    return {
        name: {"task": _TASK, "schedule": AlignedSchedule(period_s), "args": [[name]], "last_run_at": long_ago}
        for name, period_s in PERIODS_S.items()
    }


class Scheduler(beat.Scheduler):
    """Celery's scheduler, with two differences.

    It sends the tasks that are due together in one message: a message costs more than most tasks.  It sends nothing to
    a queue that no worker consumes.
    """

    _due: Sequence[str] = ()
    _counted_at = float("-inf")
    _is_full = False

    def schedules_equal(self, old_schedules: Any, new_schedules: Any) -> bool:
        """Return whether there is a schedule, which does not change; Celery's own compares all entries at each tick."""
        return old_schedules is not None

    def adjust(self, n: Any, drift: float = 0.0) -> Any:
        """Return `n`: wake when a task is due.  Celery's own wakes 10 ms earlier, and then polls its clock."""
        return n

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send the tasks that are due, and return the seconds until the next is due."""
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
        """Return the number of messages in the queue; 0 if it does not exist yet, or cannot be counted."""
        try:
            channel: Any
            with self.connection.channel() as channel:  # RabbitMQ closes it if the queue does not exist.
                return int(channel.queue_declare(QUEUE, passive=True).message_count)
        except Exception:  # The type depends on the transport; publishing will raise the same error.
            return 0
