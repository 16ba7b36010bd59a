"""Leases that this process should have freed while Redis was away, so that it can free them again."""

import threading
from typing import Any

from redis.exceptions import RedisError

from routing.config import RoutingSettings
from routing.leases import Held, Leases, Released
from routing.scripts import Scripts
from routing.workers import Room, unbounded

# Each expires by itself soon; this bounds what a process keeps that never frees anything again.
_MOST = 10_000


class PatientLeases(Leases):
    """Leases; it remembers each release that Redis did not answer until one for the same lease succeeds."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings, room: Room = unbounded) -> None:
        super().__init__(scripts, settings, room)
        self._owed: dict[Held, tuple[bool, int]] = {}
        self._lock = threading.Lock()

    def release(self, held: Held, *, back: bool, rest_ms: int = 0, **more: Any) -> Released:
        try:
            answer = super().release(held, back=back, rest_ms=rest_ms, **more)
        except RedisError:
            self.owe(held, back, rest_ms)
            raise
        if self._owed:
            with self._lock:
                self._owed.pop(held, None)
        return answer

    def owe(self, held: Held, back: bool = False, rest_ms: int = 0) -> None:
        """This release was not answered."""
        with self._lock:
            self._owed[held] = back, rest_ms
            if len(self._owed) > _MOST:
                del self._owed[next(iter(self._owed))]

    def owed(self) -> dict[Held, tuple[bool, int]]:
        """Leases that are to be freed again, each with the `back` and the `rest_ms` of its release."""
        with self._lock:
            return dict(self._owed)
