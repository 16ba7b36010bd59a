"""Limit the wrong keys per minute at the log-in: of one address, and of all addresses.

A valid key is accepted whatever the counts are; otherwise an attacker could lock operators out.  A key has 256 random
bits, so that guessing is hopeless.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable

_WINDOW_S = 60.0
_MOST_OF_ADDRESS, _MOST_OF_ALL = 10, 200


class Attempts:
    """Counts wrong keys of the present minute, in this process.  Safe between threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        self._wrong: Counter[str] = Counter()

    def wrong(self, address: str) -> float:
        """Count a wrong key of an address and return the seconds until its next try; 0: now."""
        with self._lock:
            left = self._began + _WINDOW_S - self._clock()
            if left <= 0:
                self._began, self._wrong, left = self._clock(), Counter(), _WINDOW_S
            if self._wrong[address] >= _MOST_OF_ADDRESS or self._wrong.total() >= _MOST_OF_ALL:
                return left
            self._wrong[address] += 1
            return 0.0
