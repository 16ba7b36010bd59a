"""How often wrong keys are heard out at the log-in: a few times a minute from one address, and not often from all.

A right key is let in however many wrong ones have come, else anybody could keep operators out.  Nobody guesses one: it
has 256 random bits.
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
        """One more has come from this address.  Answers in how many seconds it may try again; 0: now."""
        with self._lock:
            left = self._began + _WINDOW_S - self._clock()
            if left <= 0:
                self._began, self._wrong, left = self._clock(), Counter(), _WINDOW_S
            if self._wrong[address] >= _MOST_OF_ADDRESS or self._wrong.total() >= _MOST_OF_ALL:
                return left
            self._wrong[address] += 1
            return 0.0
