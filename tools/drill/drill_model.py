"""The function that the drill's inference servers run: it notes its start in a file, then sleeps.

The server's own journal has a line for each run that has ended.  The file of starts also shows the runs that ended
because their server was killed.
"""

import os
import threading
import time
from functools import cache
from typing import Any

import orjson

from slotkeeper.serve.served_function import Context

STARTS = "SLOTKEEPER_DRILL_STARTS"
"""The environment variable with the path of the file that gets one JSON line for each start."""


class _RunCounter:
    """Counts the active runs of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def __enter__(self) -> None:
        with self._lock:
            self.count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.count -= 1


_running = _RunCounter()


def work(payload: dict[str, Any], context: Context) -> dict[str, Any]:
    """Note the start, sleep, and return the job's number.

    Payload: `seconds`: how long to sleep.  `fails`: the first so many attempts raise RuntimeError.
    """
    with _running:
        note = {"job_id": context.job_id, "attempt": context.attempt, "slot": context.slot, "at_once": _running.count}
        note["at_ns"] = time.monotonic_ns()
        os.write(_starts_file(), orjson.dumps(note, option=orjson.OPT_APPEND_NEWLINE))
        context.sleep(float(payload["seconds"]))
    if (context.attempt or 0) <= payload.get("fails", 0):
        raise RuntimeError("this attempt was to fail")
    return {"number": payload["number"]}


@cache
def _starts_file() -> int:
    return os.open(os.environ[STARTS], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
