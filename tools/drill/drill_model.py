"""What the drill's inference servers run: it takes its time, and tells of each start before it does.

The server's own journal has a line for a run that has ended; a run under which the server was killed is known from
the start alone.
"""

import os
import threading
import time
from functools import cache
from typing import Any

import orjson

from slotkeeper.serve.served_function import Context

STARTS = "SLOTKEEPER_DRILL_STARTS"
"""Environment: the file that gets one JSON line per start."""


class _Running:
    """Counts the runs that are under way in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def __enter__(self) -> None:
        with self._lock:
            self.count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.count -= 1


_running = _Running()


def work(payload: dict[str, Any], context: Context) -> dict[str, Any]:
    """`seconds`: how long it takes.  `fails`: how many attempts answer with an error that a retry may cure."""
    with _running:
        note = {"job_id": context.job_id, "attempt": context.attempt, "slot": context.slot, "at_once": _running.count}
        note["at_ns"] = time.monotonic_ns()
        os.write(_starts(), orjson.dumps(note, option=orjson.OPT_APPEND_NEWLINE))
        context.sleep(float(payload["seconds"]))
    if (context.attempt or 0) <= payload.get("fails", 0):
        raise RuntimeError("this attempt was to fail")
    return {"number": payload["number"]}


@cache
def _starts() -> int:
    return os.open(os.environ[STARTS], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
