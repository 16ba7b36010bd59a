"""Threads that a process cannot do without: one that fails ends the process, and its supervisor starts it again.

A worker's leases expire then, and other workers go on with its runs.
"""

import os
import threading
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
