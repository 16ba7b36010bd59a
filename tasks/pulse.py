"""Whether what does one thing after another in this process, its loop or a thread, still does so.

A thread that has ended by an error that nobody foresaw, and one that waits for ever, look the same: they do not come
round any more.  Nothing else tells of it, while other threads keep alive what nobody works at.
"""

import os
import time
from collections.abc import Callable
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)

_STOPPED_S = 30.0  # longer than any of them waits for the record, for Redis, or for a broker
_STOPPED_LOOKS = 30  # so many in a row: a process that was halted has not looked meanwhile


class Watched(Protocol):
    """What has a pulse."""

    name: str

    def has_stopped(self) -> bool:
        """To be asked again and again."""
        ...


class Pulse:
    """Of one loop or thread, which calls `beat` whenever it comes round.

    `wake`: makes it come round, where it would wait for something to do.
    """

    def __init__(self, name: str, wake: Callable[[], object] = lambda: None) -> None:
        self.name = name
        self._wake = wake
        self._looks = 0  # since it has last come round
        self._came_round_s = time.monotonic()

    def beat(self) -> None:
        self._looks, self._came_round_s = 0, time.monotonic()

    def has_stopped(self) -> bool:
        """Whether it has not come round for too long, though it was looked for again and again."""
        self._wake()
        self._looks += 1
        return self._looks > _STOPPED_LOOKS and time.monotonic() - self._came_round_s > _STOPPED_S


def end_if_stopped(*watched: Watched) -> None:
    """End this process if one of them has stopped: its runs would never end, or its leases not be renewed.

    Its leases expire, and other workers go on with its runs.
    """
    for it in watched:
        if it.has_stopped():
            log.critical("thread_stopped", thread=it.name)
            os._exit(os.EX_SOFTWARE)
