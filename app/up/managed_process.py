"""A child process in a separate process group, with its output in a log file."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slotkeeper.state_folder import make_private_file

_LARGEST_LOG = 16 << 20
_ERROR = re.compile(r"[\w.]+(Error|Exception)\b.*:|Error: |# Fatal|.*\bFATAL\b")


@dataclass(frozen=True, slots=True)
class Role:
    """The definition of a process: how it is started and stopped."""

    name: str
    command: str
    """A command line for the shell."""
    port: int | None = None
    """It has started when it listens on this port; None: when it has written a file (tasks/process_files.py)."""
    stop_timeout_s: float = 5.0
    """How long it may take to end after SIGTERM; then it is killed."""
    stop_order: int = 0
    """Roles with the lowest number are stopped first; the next ones when these have ended."""
    stops_last: bool = False
    """True: a second signal does not kill it; it still has `stop_timeout_s` to end."""
    exits: bool = False
    """True: it ends by itself when its work is done.  False: it runs until it is stopped."""


class ManagedProcess:
    """The process of a role, which can be started, polled, ended and restarted."""

    def __init__(self, role: Role, environment: Mapping[str, str], folder: Path, log: Path) -> None:
        self.role, self.log = role, log
        self._environment, self._folder = environment, folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process; None: it does not run."""
        return self._process.pid if self._process else None

    def start(self) -> int:
        """Start the process, and return its pid, which is also the id of its group.  Raises OSError."""
        make_private_file(self.log)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                # `exec`: the shell is replaced by the program, so that signals reach it.
                ["/bin/sh", "-c", f"exec {self.role.command}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._environment,
                start_new_session=True,  # Ctrl-C must reach only this process, which ends its children in order.
                umask=0o077,  # No other user may read its files in the state folder.
            )
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status if the process has ended since the last call; negative: the signal that killed it.

        Other processes of its group are killed before it is reaped: until then no other group can get its id.
        """
        process = self._process
        if process is None or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self.kill()
        self._process = None
        return process.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        if self._process:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the whole group."""
        if self._process:
            with suppress(ProcessLookupError, PermissionError):  # macOS raises it for a group of zombies.
                os.killpg(self._process.pid, signal.SIGKILL)

    def trim_log(self) -> None:
        """Rotate a log that is too large, and keep one older file; a few lines written meanwhile may be lost."""
        with suppress(OSError):
            if self.log.stat().st_size > _LARGEST_LOG:
                older = self.log.with_suffix(".log.1")
                make_private_file(older)
                shutil.copyfile(self.log, older)
                os.truncate(self.log, 0)

    def last_log_line(self) -> str:
        """Return the line of the log that most likely has the reason for the end: an error, or the last line."""
        with suppress(OSError), open(self.log, "rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - 4096, 0))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            errors = [line for line in lines if _ERROR.match(line)]
            return (errors or lines or [""])[-1].strip()
        return ""
