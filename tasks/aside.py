"""Work that must not keep its caller waiting."""

import threading
import time
from collections.abc import Callable

import structlog

from tasks import threads

log = structlog.get_logger(__name__)


class BackgroundTask:
    """Does one thing in a thread of its own when it is asked to; asked meanwhile, it does it once more.

    `delay_s`: before it begins, so that those who ask meanwhile are served together.
    """

    def __init__(self, name: str, act: Callable[[], object], delay_s: float = 0.0) -> None:
        self.name, self._act, self._delay_s = name, act, delay_s
        self._asked = self._at_it = False
        self._lock = threading.Lock()

    def request(self) -> None:
        """Raises nothing: if no thread can be started now, what was asked for is done when it is asked for again."""
        with self._lock:
            self._asked = True
            if self._at_it:
                return
            self._at_it = True
        try:
            threads.start_vital_thread(self.name, self._work)
        except RuntimeError as error:
            log.warning("background_work_postponed", what=self.name, error=str(error))
            with self._lock:
                self._at_it = False

    def _work(self) -> None:
        while self._goes_on():
            try:
                self._act()
            except Exception:
                log.exception("background_work_failed", what=self.name)

    def _goes_on(self) -> bool:
        time.sleep(self._delay_s)
        with self._lock:
            self._at_it, self._asked = self._asked, False
            return self._at_it
