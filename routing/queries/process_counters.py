"""What no event in the record tells, counted by the process that sees it, and summed up in Redis once a second.

A process that is killed takes the last second's counts with it; an emptied Redis begins anew, as Prometheus expects of
a counter.  To count costs the one who counts no round trip.
"""

import atexit
import threading
from bisect import bisect_left
from collections import Counter

from redis.exceptions import RedisError

from slotkeeper.redis.scripts import Scripts

HANDOFF_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Upper bounds of the parts of a histogram, but for the last, which has none."""

REFUSED, HANDED_ON = "refused", "handed_on"

_FLUSH_EVERY_S = 1.0
_BAR = "|"
_MICROS = "us"


class ProcessCounters:
    """Counts of one process, on their way to the sums of all.  Safe between threads."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._lock = threading.Lock()
        self._new: Counter[str] = Counter()
        self._counted = threading.Event()
        self._thread: threading.Thread | None = None

    def count_refusal(self, gate: str, jobs: int) -> None:
        """A gate has refused so many jobs."""
        self.add(REFUSED, gate, jobs)

    def observe_handoff(self, seconds: float) -> None:
        """A slot's next request left so long after its server had answered the one before."""
        self.observe(HANDED_ON, seconds)

    def add(self, name: str, label: str, by: int = 1) -> None:
        """Count."""
        with self._lock:
            self._new[f"{name}{_BAR}{label}"] += by
        self._wake()

    def observe(self, name: str, seconds: float) -> None:
        """Add a value to a histogram."""
        with self._lock:
            self._new[f"{name}{_BAR}{bisect_left(HANDOFF_BUCKETS_S, seconds)}"] += 1
            self._new[f"{name}{_BAR}{_MICROS}"] += round(seconds * 1e6)
        self._wake()

    def flush(self) -> None:
        """Bring what was counted to Redis; what it does not take is brought the next time."""
        with self._lock:
            new, self._new = self._new, Counter()
        if not new:
            return
        try:
            with self._scripts.redis.pipeline(transaction=True) as pipe:
                for name, value in new.items():
                    pipe.hincrby(self._scripts.keys.counters(), name, value)
                pipe.execute()
        except RedisError:
            with self._lock:
                self._new.update(new)

    def counts(self, name: str) -> dict[str, int]:
        """Label -> sum over all processes.  Raises redis errors."""
        found = self._scripts.hash(self._scripts.keys.counters())
        start = f"{name}{_BAR}"
        return {key.removeprefix(start): int(it) for key, it in found.items() if key.startswith(start)}

    def histogram(self, name: str) -> tuple[list[int], float]:
        """How many values lie in each part, one more than there are bounds, and the sum of all in s."""
        counts = self.counts(name)
        parts = [counts.get(str(part), 0) for part in range(len(HANDOFF_BUCKETS_S) + 1)]
        return parts, counts.get(_MICROS, 0) / 1e6

    def _wake(self) -> None:
        if self._counted.is_set():
            return
        self._counted.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._flush_all, name="tallies", daemon=True)
                    self._thread.start()
                    atexit.register(self.flush)

    def _flush_all(self) -> None:
        pause = threading.Event()
        while True:
            self._counted.wait()
            pause.wait(_FLUSH_EVERY_S)
            self._counted.clear()
            self.flush()
            with self._lock:
                if self._new:
                    self._counted.set()
