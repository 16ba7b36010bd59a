"""Which workers live, and for how many more runs each has room.

An offer is made only for a run that a living worker has said it has room for, so that none waits where nobody looks.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from slotkeeper.redis.scripts import Command, Scripts

CapacitySource = Callable[[], int]
"""How many runs living workers have room for, all together."""

REPORT_EVERY_S = 1.0
_BELIEVED_MS = 3_500  # Two words in a row may be lost.
_LEAVES, _STOPS = -1, -2
_STOPPING_MS = 3_600_000  # Its runs are resumed, or given up, long before.
_COPY_S = 0.5
_NO_ROOM_S = 0.02  # A worker that has just come, or has just ended a run, shall not have to wait for work.


def unlimited() -> int:
    """More room than anybody offers."""
    return 2**31


class WorkerScripts(Protocol):
    """Of the list of workers, which belongs to no fleet."""

    def workers(self, key: str, *, worker: str, room: int, ttl_ms: int) -> Command[int]: ...


class WorkerCapacity:
    """Talks to the list of workers, and keeps a copy of what they said for a moment.  Redis errors pass through."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._lua: WorkerScripts = scripts.bind(WorkerScripts)
        self._lock = threading.Lock()
        self._room = 0
        self._until = 0.0
        self._refresh: Callable[[], object] | None = None

    def report(self, worker: str, room: int) -> int:
        """`worker` lives and has room for so many more runs; answers the room of all."""
        return self._ask(worker, max(room, 0))

    def remove(self, worker: str) -> None:
        """`worker` takes nothing more."""
        self._ask(worker, _LEAVES)

    def report_stopping(self, worker: str) -> None:
        """`worker` was told to stop: it takes nothing more, and what it cannot end itself costs its jobs nothing."""
        self._ask(worker, _STOPS, _STOPPING_MS)

    def total(self) -> int:
        """For how many runs living workers have said that they have room: at most half a second ago, or, where somebody
        else refreshes it, when it was asked for before."""
        with self._lock:
            if time.monotonic() < self._until:
                return self._room
            if self._refresh is not None:
                self._until = time.monotonic() + _COPY_S  # Asking once is enough until the answer is here.
        if self._refresh is None:
            return self.read_total()
        self._refresh()
        return self._room

    def read_total(self) -> int:
        """The room of all, as they say now."""
        return self._ask("", _LEAVES)

    def total_command(self) -> Command[int]:
        """The command of `look`; its answer is kept by nobody."""
        key = self._scripts.keys.workers()
        return self._lua.workers(key, worker="", room=_LEAVES, ttl_ms=_BELIEVED_MS)

    def refresh_in_background(self, refresh: Callable[[], object]) -> None:
        """From now on nobody waits: `room` answers what is known, and `refresh` has somebody else `look` again."""
        self._refresh = refresh

    def _ask(self, worker: str, own: int, ttl_ms: int = _BELIEVED_MS) -> int:
        key = self._scripts.keys.workers()
        room = self._scripts.run(self._lua.workers(key, worker=worker, room=own, ttl_ms=ttl_ms))
        with self._lock:
            self._room = room
            self._until = time.monotonic() + (_COPY_S if room else _NO_ROOM_S)
        return room


def was_told_to_stop(scripts: Scripts, worker: str) -> bool:
    """Return whether this worker reported that it was told to stop.  Raises redis errors."""
    said: Any = scripts.redis.hget(scripts.keys.workers(), worker)
    return said is not None and said.startswith(b"stopping ")
