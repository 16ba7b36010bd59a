"""Count what no event records.  Each process counts in memory and adds its counts to sums in Redis once a second.

So counting costs no round trip.  A process that is killed loses the counts of its last second.  After Redis was emptied
the sums start at 0, which Prometheus expects of a counter.
"""

import atexit
import threading
from bisect import bisect_left
from collections import Counter

from redis.exceptions import RedisError

from slotkeeper.redis.scripts import Scripts

HANDOFF_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Upper bounds of the buckets of a histogram; the last bucket, above them, has none."""

REFUSED, HANDED_ON = "refused", "handed_on"

_FLUSH_EVERY_S = 1.0
_SEPARATOR = "|"
_MICROSECONDS = "us"


class ProcessCounters:
    """The counts of one process, and the sums of all processes.  Safe between threads."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._lock = threading.Lock()
        self._new: Counter[str] = Counter()
        self._has_counted = threading.Event()
        self._thread: threading.Thread | None = None

    def count_refusal(self, limit: str, jobs: int) -> None:
        """Count jobs that a limit on submits has refused."""
        self.add(REFUSED, limit, jobs)

    def observe_handoff(self, seconds: float) -> None:
        """Add the time from a server's response to the next request for the same slot."""
        self.observe(HANDED_ON, seconds)

    def add(self, name: str, label: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._new[f"{name}{_SEPARATOR}{label}"] += by
        self._wake()

    def observe(self, name: str, seconds: float) -> None:
        """Add a value to a histogram."""
        with self._lock:
            self._new[f"{name}{_SEPARATOR}{bisect_left(HANDOFF_BUCKETS_S, seconds)}"] += 1
            self._new[f"{name}{_SEPARATOR}{_MICROSECONDS}"] += round(seconds * 1e6)
        self._wake()

    def flush(self) -> None:
        """Add the new counts to the sums in Redis.  If Redis does not accept them, the next flush repeats them."""
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
        """Return label -> sum over all processes.  Raises redis errors."""
        sums = self._scripts.hash(self._scripts.keys.counters())
        prefix = f"{name}{_SEPARATOR}"
        return {key.removeprefix(prefix): int(value) for key, value in sums.items() if key.startswith(prefix)}

    def histogram(self, name: str) -> tuple[list[int], float]:
        """Return the number of values in each bucket, not cumulated, and the sum of all values in s.

        Raises redis errors.
        """
        counts = self.counts(name)
        buckets = [counts.get(str(bucket), 0) for bucket in range(len(HANDOFF_BUCKETS_S) + 1)]
        return buckets, counts.get(_MICROSECONDS, 0) / 1e6

    def _wake(self) -> None:
        """Let the thread flush soon, and start the thread with the first count of the process."""
        if self._has_counted.is_set():
            return
        self._has_counted.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._flush_forever, name="process-counters", daemon=True)
                    self._thread.start()
                    atexit.register(self.flush)

    def _flush_forever(self) -> None:
        pause = threading.Event()
        while True:
            self._has_counted.wait()
            pause.wait(_FLUSH_EVERY_S)
            self._has_counted.clear()
            self.flush()
            with self._lock:
                if self._new:
                    self._has_counted.set()
