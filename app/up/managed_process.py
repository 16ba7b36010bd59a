"""One process that is kept: in a group of its own, with its output in a file."""

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
    """What a process is for, and how it is started and stopped."""

    name: str
    command: str
    """A line for the shell."""
    port: int | None = None
    """It has begun when it listens there; None: when it shows so by a file (tasks/process_files.py)."""
    stop_timeout_s: float = 5.0
    """How long it may take to end after SIGTERM, before it is killed."""
    stop_order: int = 0
    """Those with the lowest are stopped first; the next ones when these have ended."""
    stops_last: bool = False
    """It gets its time to end even when a second signal asks for haste."""
    exits: bool = False
    """It has something to do and ends; others stay until they are stopped."""


class ManagedProcess:
    """The process of a role: started, looked at, ended, started again."""

    def __init__(self, role: Role, environment: Mapping[str, str], folder: Path, log: Path) -> None:
        self.role, self.log = role, log
        self._environment, self._folder = environment, folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """None: it does not run."""
        return self._process.pid if self._process else None

    def start(self) -> int:
        """Answers its pid, which is also the number of its group.  Raises OSError."""
        make_private_file(self.log)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                # `exec`: the process is the program itself and no shell before it.
                ["/bin/sh", "-c", f"exec {self.role.command}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for us; we end our children in order.
                umask=0o077,  # What they keep in the state folder is nobody else's.
            )
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status if it has ended since the last look; negative: the signal that killed it.

        What it leaves behind in its group is killed first, while its number cannot yet be another's.
        """
        process = self._process
        if process is None or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self.kill()
        self._process = None
        return process.wait()

    def terminate(self) -> None:
        if self._process:
            self._process.terminate()

    def kill(self) -> None:
        """End the whole group at once."""
        if self._process:
            with suppress(ProcessLookupError, PermissionError):  # macOS refuses for a group of zombies.
                os.killpg(self._process.pid, signal.SIGKILL)

    def trim_log(self) -> None:
        """Keep the log and one older part of it; a few lines written in between may be lost."""
        with suppress(OSError):
            if self.log.stat().st_size > _LARGEST_LOG:
                older = self.log.with_suffix(".log.1")
                make_private_file(older)
                shutil.copyfile(self.log, older)
                os.truncate(self.log, 0)

    def last_log_line(self) -> str:
        """The line of its log that most likely says why it ended, for an error of one line."""
        with suppress(OSError), open(self.log, "rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - 4096, 0))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            telling = [line for line in lines if _ERROR.match(line)]
            return (telling or lines or [""])[-1].strip()
        return ""
