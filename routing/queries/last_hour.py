"""The last hour, minute by minute: how many jobs of a model ended, and how many of its slots were in use.

A minute that is over does not change, so each is read from the record once and remembered; where nothing is known yet,
reading goes back from the newest minute and leaves off after a while, and goes on when it is asked again.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from routing.queries import looks
from routing.queries.looks import MINUTE_MS, Ended
from slotkeeper.db import Database

MINUTES = 60
_BUDGET_S = 0.25


@dataclass(slots=True)
class MinuteUsage:
    """Of one model.  `busy_ms`: slot time that its jobs' last runs took; jobs that still run are not in it."""

    ended: int = 0
    failed: int = 0
    busy_ms: int = 0


@dataclass(slots=True)
class _Known:
    """`read`: beginnings of the minutes whose ends are in `minutes`."""

    read: set[int] = field(default_factory=set)
    minutes: dict[str, dict[int, MinuteUsage]] = field(default_factory=lambda: defaultdict(dict))


class LastHourUsage:
    """Safe between threads; one of them reads, the others take what is known."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._known = _Known()

    def of(self, model: str, now_ms: int) -> list[MinuteUsage]:
        """The last sixty minutes that are over, the oldest first."""
        found = self._known.minutes.get(model, {})
        return [found.get(begins) or MinuteUsage() for begins in _minutes(now_ms)]

    def is_complete(self, now_ms: int) -> bool:
        return self._known.read.issuperset(_minutes(now_ms))

    def read_missing(self, now_ms: int) -> None:
        """Read what is missing, from the newest minute back.  Raises DatabaseUnavailable."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            began = self._clock()
            self._forget(now_ms)
            for begins in reversed(_minutes(now_ms)):
                if begins not in self._known.read:
                    self._add(begins, looks.of_minute(self._database, begins))
                    if self._clock() - began > _BUDGET_S:
                        return
        finally:
            self._lock.release()

    def _forget(self, now_ms: int) -> None:
        oldest = _minutes(now_ms)[0]
        self._known.read = {begins for begins in self._known.read if begins >= oldest}
        for model, minutes in list(self._known.minutes.items()):
            kept = {begins: it for begins, it in list(minutes.items()) if begins >= oldest}
            if kept:
                self._known.minutes[model] = kept
            else:
                del self._known.minutes[model]

    def _add(self, begins: int, found: Iterable[Ended]) -> None:
        oldest = begins - MINUTES * MINUTE_MS
        for it in found:
            minutes = self._known.minutes[it.model]
            own = minutes.setdefault(begins, MinuteUsage())
            own.ended += it.jobs
            own.failed += it.failed
            for minute, busy_ms in _spread(it, begins, oldest):
                minutes.setdefault(minute, MinuteUsage()).busy_ms += busy_ms
        self._known.read.add(begins)


def _spread(it: Ended, ended: int, oldest: int) -> Iterable[tuple[int, int]]:
    """(beginning of a minute, slot time in it) of jobs that ended in the minute `ended`."""
    if it.started_ms is None:
        return
    if it.started_ms == ended:
        yield ended, it.ends_ms - it.starts_ms
        return
    yield ended, it.ends_ms - it.jobs * ended
    yield it.started_ms, it.jobs * (it.started_ms + MINUTE_MS) - it.starts_ms
    for between in range(max(it.started_ms + MINUTE_MS, oldest), ended, MINUTE_MS):
        yield between, it.jobs * MINUTE_MS


def _minutes(now_ms: int) -> list[int]:
    """Beginnings of the last sixty that are over, the oldest first."""
    present = now_ms - now_ms % MINUTE_MS
    return [present - n * MINUTE_MS for n in range(MINUTES, 0, -1)]
