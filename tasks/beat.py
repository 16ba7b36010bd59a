"""Beat's clock and its restraint.

Intervals are measured by a clock that nobody sets, so a step of the host's clock neither hurries nor stops beat.  And
while nobody does maintenance nothing is said twice for hours: a queue that is long already gets no more.
"""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from celery import beat
from celery.schedules import schedule

log = structlog.get_logger(__name__)

QUEUE = "maintenance"
_MOST_QUEUED = 500
_COUNT_EVERY_S = 5.0
_BEGAN, _BEGAN_AT = datetime.now(UTC), time.monotonic()


def _steady_now() -> datetime:
    return _BEGAN + timedelta(seconds=time.monotonic() - _BEGAN_AT)


def every(seconds: float) -> schedule:
    """A schedule for beat: every so many seconds."""
    return schedule(timedelta(seconds=seconds), nowfun=_steady_now)


class Scheduler(beat.Scheduler):
    """Celery's own, but that it adds nothing to a queue that nobody works off."""

    _counted_at = float("-inf")
    _is_full = False

    def schedules_equal(self, old_schedules: Any, new_schedules: Any) -> bool:
        """It stands in celeryconfig.py and does not change; Celery's own compares every entry at each tick."""
        return old_schedules is not None

    def adjust(self, n: Any, drift: float = 0.0) -> Any:
        """It wakes when something is due; Celery's own wakes 10 ms before, and looks at its clock until then."""
        return n

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        if not self._has_backlog():
            super().apply_entry(entry, producer)

    def _has_backlog(self) -> bool:
        now = time.monotonic()
        if now - self._counted_at >= _COUNT_EVERY_S:
            self._counted_at, was = now, self._is_full
            self._is_full = self._queued() > _MOST_QUEUED
            if self._is_full and not was:
                log.warning("maintenance_is_not_done", queue=QUEUE)
        return self._is_full

    def _queued(self) -> int:
        """Messages in the queue; 0 if there is none yet, or the broker does not say."""
        try:
            with self.app.connection_for_write() as connection:
                channel: Any = connection.default_channel
                return int(channel.queue_declare(QUEUE, passive=True).message_count)
        except Exception:  # Each transport has errors of its own, and sending will meet the same.
            return 0
