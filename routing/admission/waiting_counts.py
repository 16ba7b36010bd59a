"""How many jobs wait, as this process knows it without asking Redis.

A limit that is far away need not be looked at for every submit: within a second the number of waiting jobs changes by
no more than what all processes accept in it.
"""

from collections.abc import Hashable
from dataclasses import dataclass

FAR = 100_000
"""Jobs; more than all processes of an installation accept in FRESH_MS."""
FRESH_MS = 1000
_MAX_KNOWN = 10_000


@dataclass(slots=True)
class _Count:
    waiting: int
    at_ms: int


class WaitingCounts:
    """The last counts read, by model or by (model, tenant), with what this process has admitted since."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Count] = {}

    def has_room(self, name: Hashable, count: int, limit: int, now_ms: int) -> bool:
        """Return whether `count` jobs more are far from the limit, and count them; False: Redis must be asked."""
        known = self._known.get(name)
        if known is None or not 0 <= now_ms - known.at_ms <= FRESH_MS or known.waiting + count + FAR > limit:
            return False
        known.waiting += count
        return True

    def note(self, name: Hashable, waiting: int, now_ms: int) -> None:
        """Keep what Redis has counted."""
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[name] = _Count(waiting, now_ms)
