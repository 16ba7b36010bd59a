"""Threads that a process cannot do without: one that fails ends the process, and its supervisor starts it again.

A worker's leases expire then, and other workers go on with its runs.
"""

import os
import threading
import time
from collections.abc import Callable

import structlog

from slotkeeper import logs

log = structlog.get_logger(__name__)


def start_vital_thread(name: str, run: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread that runs `run`; if that raises, log it and end the process with status 70.

    Raises RuntimeError: no thread can be started now.
    """

    def run_or_end() -> None:
        try:
            run()
        except BaseException:
            try:
                log.critical("thread_failed", thread=name, exc_info=True)
                logs.flush()
            finally:
                os._exit(os.EX_SOFTWARE)

    thread = threading.Thread(target=run_or_end, name=name, daemon=True)
    thread.start()
    return thread


class BackgroundTask:
    """Runs a function in a background thread on request.  Requests during a run lead to one more run.

    delay_s: how long a run waits for further requests before it begins.
    """

    def __init__(self, name: str, function: Callable[[], object], delay_s: float = 0.0) -> None:
        self.name, self._function, self._delay_s = name, function, delay_s
        self._is_requested = self._is_running = False
        self._lock = threading.Lock()

    def request(self) -> None:
        """Have the function run soon.  If no thread can be started now, the next request runs it."""
        with self._lock:
            self._is_requested = True
            if self._is_running:
                return
            self._is_running = True
        try:
            start_vital_thread(self.name, self._run)
        except RuntimeError as error:
            log.warning("background_work_postponed", what=self.name, error=str(error))
            with self._lock:
                self._is_running = False

    def _run(self) -> None:
        while self._take_request():
            try:
                self._function()
            except Exception:
                log.exception("background_work_failed", what=self.name)

    def _take_request(self) -> bool:
        time.sleep(self._delay_s)
        with self._lock:
            self._is_running, self._is_requested = self._is_requested, False
            return self._is_running
