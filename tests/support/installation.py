"""`slotkeeper up` as a user starts it: real processes in a separate folder, on free ports."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from app.cli.__main__ import main
from app.up.ports import free_port, is_open
from tests.support.api import clear_wiring
from tools.cluster.stack import eventually

SLOTKEEPER = str(Path(sys.executable).with_name("slotkeeper"))
DEADLINE_S = 120.0


class Installation:
    """A state folder, its ports and its processes."""

    def __init__(self, home: Path, **settings: str) -> None:
        self.home = home
        for name in (
            "app.py",
            "tasks.py",
            "celeryconfig.py",
        ):  # modules of a user, which must not shadow those of the product
            (home.parent / name).write_text("raise RuntimeError('a file of the user was imported')\n")
        self.ports = {name: free_port() for name in ("PORT", "REDIS_PORT", "FLOWER_PORT")}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLOTKEEPER_")}
        chosen = {f"SLOTKEEPER_{name}": str(port) for name, port in self.ports.items()}
        self.environment = {**inherited, **chosen, "SLOTKEEPER_HOME": str(home), "COLUMNS": "200", **settings}

    def run(self, *words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        """Run a command that ends by itself."""
        return subprocess.run(
            [SLOTKEEPER, *words],
            input=stdin,
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.home.parent,
            timeout=DEADLINE_S,
            check=False,
        )

    def ask(self, *words: str, stdin: str = "") -> Any:
        """Run a command with --json, and return its output."""
        done = self.run(*words, "--json", stdin=stdin)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def run_here(self, *words: str, stdin: str = "") -> Result:
        """Run a command in this process."""
        try:
            return CliRunner().invoke(main, words, input=stdin, env=self.environment)
        finally:
            clear_wiring()

    def ask_here(self, *words: str, stdin: str = "") -> Any:
        done = self.run_here(*words, "--json", stdin=stdin)
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    @contextmanager
    def up(self, *options: str) -> Iterator["Up"]:
        """Run `slotkeeper up` during the block."""
        started = Up(self, options)
        try:
            yield started
        finally:
            started.process.kill()  # Its guardian ends the rest.
            started.process.wait()
            eventually(lambda: not self.processes(), "the end of all processes", DEADLINE_S)

    def processes(self) -> dict[int, str]:
        """Return pid and command of each process with this folder in its environment, and of the Valkey."""
        mark = f"SLOTKEEPER_HOME={self.home}".encode()
        valkey = f"valkey-server 127.0.0.1:{self.ports['REDIS_PORT']}"  # It writes this over its environment.
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit():
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command and (valkey in command or mark in (entry / "environ").read_bytes().split(b"\0")):
                    found[int(entry.name)] = command
            except OSError:
                continue
        return found

    def pid_of(self, part: str) -> int | None:
        return next((pid for pid, command in self.processes().items() if part in command), None)

    def open_ports(self) -> list[str]:
        return [name for name, port in self.ports.items() if is_open("127.0.0.1", port)]


class Up:
    """A running `slotkeeper up`."""

    def __init__(self, installation: Installation, options: tuple[str, ...]) -> None:
        self._printed = installation.home.parent / "printed"
        with open(self._printed, "w") as printed:
            self.process = subprocess.Popen(
                [SLOTKEEPER, "up", *options],
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=installation.environment,
                cwd=installation.home.parent,
                # As a script's `slotkeeper up &` has it.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
            )

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    def says(self, words: str) -> None:
        """Wait until it has printed these words."""
        self.source(lambda: words in self.printed, words)

    def source(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until a condition holds, at most as long as the process runs."""
        eventually(lambda: condition() or self.process.poll() is not None, what, DEADLINE_S)
        assert condition(), self.printed

    def stop(self, number: int = signal.SIGINT) -> float:
        """Send the signal, and return after how many seconds it ended."""
        began = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(DEADLINE_S) == 0, self.printed
        return time.monotonic() - began
