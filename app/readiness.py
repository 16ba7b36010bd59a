"""Whether this process can do its work, looked for by one for all who ask at about the same time.

Anybody may ask, so a flood of questions must be no flood of looks: each takes a connection to the broker.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

FRESH_S = 1.0
"""For so long an answer is everybody's."""
WITHIN_S = 0.6
"""For so long a part is waited for: probes of orchestrators wait for a second."""


class Readiness:
    """What each part says.  Safe between threads."""

    def __init__(
        self, probes: Mapping[str, Callable[[], str | None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probes, self._clock = probes, clock
        self._lock = threading.Lock()
        self._looks: dict[str, Future[str | None]] = {}  # under way
        self._threads = ThreadPoolExecutor(len(probes), "readiness")
        self._found: Mapping[str, str | None] = {}
        self._until = -1.0

    def parts(self) -> Mapping[str, str | None]:
        """Of each part what is wrong; None: nothing is.  Who asks meanwhile waits for the same look.

        All parts are looked at side by side.  A look that takes longer goes on, and no other is begun meanwhile.
        """
        with self._lock:
            if self._clock() >= self._until:
                self._found = self._look()
                self._until = self._clock() + FRESH_S
            return self._found

    def _look(self) -> dict[str, str | None]:
        for name, probe in self._probes.items():
            if name not in self._looks:
                self._looks[name] = self._threads.submit(probe)
        wait(self._looks.values(), WITHIN_S)
        found: dict[str, str | None] = {}
        for name in self._probes:
            look = self._looks[name]
            if look.done():
                del self._looks[name]
                found[name] = look.result()
            else:
                found[name] = f"It has not answered within {WITHIN_S:g} s."
        return found
