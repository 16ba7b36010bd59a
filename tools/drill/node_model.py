"""The function that the drill's node runs: as that of the other servers, and it notes its end, too.

An agent has no journal of the servers' kind, so the function writes the line of a run, just before the run ends.
"""

import os
import time
from functools import cache
from typing import Any

import orjson

from slotkeeper.serve.served_function import Canceled, Context
from tools.drill import drill_model

JOURNAL = "SLOTKEEPER_DRILL_JOURNAL"
"""The environment variable with the path of the file that gets one JSON line for each end."""


def work(payload: dict[str, Any], context: Context) -> dict[str, Any]:
    """Do what drill_model.work does, and note the end."""
    started_ns, outcome = time.monotonic_ns(), "error"
    try:
        result = drill_model.work(payload, context)
        outcome = "completed"
        return result
    except Canceled:
        outcome = "canceled"
        raise
    finally:
        line = {"job_id": context.job_id, "attempt": context.attempt, "slot": context.slot, "started_ns": started_ns}
        line |= {"ended_ns": time.monotonic_ns(), "outcome": outcome}
        os.write(_journal_file(), orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


@cache
def _journal_file() -> int:
    return os.open(os.environ[JOURNAL], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
