"""Limit the wrong keys per minute at the log-in: from one address, and from all addresses.

A valid key is always accepted; otherwise an attacker could lock operators out.  A key has 256 random bits, so it cannot
be guessed.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable

_WINDOW_S = 60.0
_MAX_PER_ADDRESS, _MAX_IN_ALL = 10, 200


class Attempts:
    """Counts the wrong keys of the current minute in this process.  Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s = clock()
        self._counts: Counter[str] = Counter()

    def count_wrong_key(self, address: str) -> float:
        """Count a wrong key from an address, and return the seconds until its next try; 0: it may try now."""
        with self._lock:
            left_s = self._began_s + _WINDOW_S - self._clock()
            if left_s <= 0:
                self._began_s, self._counts, left_s = self._clock(), Counter(), _WINDOW_S
            if self._counts[address] >= _MAX_PER_ADDRESS or self._counts.total() >= _MAX_IN_ALL:
                return left_s
            self._counts[address] += 1
            return 0.0
