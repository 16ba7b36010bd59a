"""The journal: a file with one JSON line per run, which shows afterwards when each run was executed."""

import time
from pathlib import Path

import orjson

from slotkeeper.serve.run_scheduler import Run, RunEnd, State


class Journal:
    """A writer that appends a line per run to the file `path`.  Several servers may share one file.

    Fields of a line: `job_id` (the dispatcher's id or the server's own), `run_id`, `attempt` (or null), `slot`,
    `source` (dispatcher | direct), `started_ns`, `ended_ns` (monotonic), `started_wall_ns`, `ended_wall_ns` (Unix),
    `outcome` (completed | invalid | error | canceled).
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered and in append mode: each line is one write, so lines of several processes do not mix, and a killed
        # process loses no line that it has written.
        self._file = path.open("ab", buffering=0)

    def note(self, run: Run, ending: RunEnd, started: tuple[int, int]) -> None:
        """Append the line of a run that ends now.  `started`: monotonic and Unix time of its start, in ns."""
        self._file.write(
            orjson.dumps(
                {
                    "job_id": run.job_id,
                    "run_id": run.id,
                    "attempt": run.attempt,
                    "slot": run.slot,
                    "source": "dispatcher" if run.dispatcher else "direct",
                    "started_ns": started[0],
                    "ended_ns": time.monotonic_ns(),
                    "started_wall_ns": started[1],
                    "ended_wall_ns": time.time_ns(),
                    "outcome": outcome(ending),
                },
                option=orjson.OPT_APPEND_NEWLINE,
            )
        )

    def close(self) -> None:
        self._file.close()


def outcome(ending: RunEnd) -> str:
    """Return completed, invalid, error or canceled."""
    if ending.state is State.FAILED:
        return "error" if ending.retryable else "invalid"
    return str(ending.state)
