"""Leases that this process should have freed while Redis was away, so that it can free them again."""

import threading
from typing import Any

from redis.exceptions import RedisError

from routing.config import RoutingSettings
from routing.leases import Lease, Leases, Released
from routing.workers import Room, unbounded
from scripting.scripts import Scripts

# Each expires by itself soon; this bounds what a process keeps that never frees anything again.
_MOST = 10_000


class PatientLeases(Leases):
    """Leases; it remembers each release that Redis did not answer until one for the same lease succeeds."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings, room: Room = unbounded) -> None:
        super().__init__(scripts, settings, room)
        self._owed: dict[Lease, tuple[bool, int]] = {}
        self._lock = threading.Lock()

    def release(self, lease: Lease, *, back: bool, cooldown_ms: int = 0, **more: Any) -> Released:
        try:
            answer = super().release(lease, back=back, cooldown_ms=cooldown_ms, **more)
        except RedisError:
            self.owe(lease, back, cooldown_ms)
            raise
        if self._owed:
            with self._lock:
                self._owed.pop(lease, None)
        return answer

    def owe(self, lease: Lease, back: bool = False, cooldown_ms: int = 0) -> None:
        """This release was not answered."""
        with self._lock:
            self._owed[lease] = back, cooldown_ms
            if len(self._owed) > _MOST:
                del self._owed[next(iter(self._owed))]

    def owed(self) -> dict[Lease, tuple[bool, int]]:
        """Leases that are to be freed again, each with the `back` and the `cooldown_ms` of its release."""
        with self._lock:
            return dict(self._owed)
