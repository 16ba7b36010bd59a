"""Whether this process can do its work, looked for by one for all who ask at about the same time.

Anybody may ask, so a flood of questions must be no flood of looks: each takes a connection to the broker.
"""

import threading
import time
from collections.abc import Callable, Mapping

FRESH_S = 1.0
"""For so long an answer is everybody's."""


class Readiness:
    """What each part says.  Safe between threads."""

    def __init__(
        self, probes: Mapping[str, Callable[[], str | None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probes, self._clock = probes, clock
        self._lock = threading.Lock()
        self._found: Mapping[str, str | None] = {}
        self._until = -1.0

    def parts(self) -> Mapping[str, str | None]:
        """Of each part what is wrong; None: nothing is.  Who asks meanwhile waits for the same look."""
        with self._lock:
            if self._clock() >= self._until:
                self._found = {name: probe() for name, probe in self._probes.items()}
                self._until = self._clock() + FRESH_S
            return self._found
