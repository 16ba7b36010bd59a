"""What the owner of a node decides: whether it takes jobs now."""

import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import orjson

from slotkeeper.agent.config import Hours
from slotkeeper.agent.files import write_file

_PAUSE_FILE = "paused.json"


class OwnerControls:
    """The owner's pause, which outlives the agent, and the hours of the configuration."""

    def __init__(self, state_dir: Path, hours: Hours | None) -> None:
        self._path, self._hours = state_dir / _PAUSE_FILE, hours

    def pause(self, reason: str, until_s: float | None) -> None:
        """Take no jobs; runs go on.  until_s: Unix time; None: until `resume`.  Raises OSError."""
        write_file(self._path, orjson.dumps({"reason": reason, "until_s": until_s}))

    def resume(self) -> None:
        """Take jobs again.  Raises OSError."""
        self._path.unlink(missing_ok=True)

    def why_not(self) -> str:
        """Return why the owner takes no jobs now; "": jobs are taken."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            paused = orjson.loads(self._path.read_bytes())
            until_s = paused["until_s"]
            if until_s is None or until_s > time.time():
                until = "" if until_s is None else f" until {datetime.fromtimestamp(until_s):%Y-%m-%d %H:%M}"
                return f"paused by its owner{until}" + (f": {paused['reason']}" if paused["reason"] else "")
        if self._hours is not None and not self._hours.includes(datetime.now().time()):
            return f"outside the hours of its owner, from {self._hours.start:%H:%M} to {self._hours.end:%H:%M}"
        return ""
