"""A whole Slotkeeper of real processes on free ports, in a separate folder.

Used by the end-to-end tests and by the benchmarks.  The commands are those of a user's Procfile.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import requests

from app.up.ports import free_port
from tools.cluster.valkey_process import Valkey

REPO = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def eventually(condition: Callable[[], Any], what: str, within_s: float = 30.0, every_s: float = 0.05) -> Any:
    """Wait until `condition` returns a true value, and return that.  Raises AssertionError after `within_s` seconds."""
    end = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"waited {within_s} s in vain: {what}")
        time.sleep(every_s)


class Process:
    """One child process with its log."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str], logs: Path) -> None:
        self.name, self.command, self.env = name, list(command), env
        self.log_path = logs / f"{name}.log"
        self._log: IO[bytes] = self.log_path.open("ab")
        self.popen = subprocess.Popen(
            self.command, env=env, cwd=REPO, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def source(self, condition: Callable[[], Any], what: str, within_s: float = 60.0) -> None:
        """Wait until `condition` is true.

        Raises AssertionError with the end of the log: the process ended, or the time `within_s` is over.
        """
        try:
            eventually(lambda: condition() or self.popen.poll() is not None, what, within_s)
            assert self.popen.poll() is None, f"it ended before {what}"
        except AssertionError as error:
            raise AssertionError(f"{self.name}: {error}\n{self.log[-2000:]}") from error

    def ask_to_stop(self) -> None:
        """Send SIGTERM, and do not wait."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)

    def stop(self, with_signal: int = signal.SIGTERM, within_s: float = 15.0) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(with_signal)
            try:
                self.popen.wait(within_s)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        with suppress(ProcessLookupError, PermissionError):  # The children of a killed process would stay.
            os.killpg(self.popen.pid, signal.SIGKILL)
        self._log.close()
        return self.popen.returncode

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


class Stack:
    """Starts and stops the processes.  `env`: additional or other settings."""

    def __init__(self, home: Path, env: dict[str, str] | None = None) -> None:
        self.home = home
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: dict[str, Process] = {}
        self.valkey: Valkey | None = None
        self._extra_env = env or {}

    def __enter__(self) -> "Stack":
        self.home.mkdir(parents=True, exist_ok=True)
        settings = {"appendfsync": "everysec", "enable-protected-configs": "local"}
        self.valkey = Valkey(self.home / "valkey", appendonly=True, settings=settings)
        self.valkey.start()
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLOTKEEPER_")},
            "SLOTKEEPER_HOME": str(self.home),
            "SLOTKEEPER_REDIS_URL": self.valkey.url,
            "SLOTKEEPER_PORT": str(self.port),
            "PYTHONUNBUFFERED": "1",
            **self._extra_env,
        }
        self.run([sys.executable, "-c", _MIGRATE])
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes.values():  # All at once: each takes a while to end.
            process.ask_to_stop()
        for process in reversed(self.processes.values()):
            process.stop()
        if self.valkey is not None:
            self.valkey.stop()

    def run(self, command: Sequence[str]) -> str:
        return subprocess.run(command, env=self.env, cwd=REPO, check=True, capture_output=True, text=True).stdout

    def run_with_input(self, script: str, text: str) -> str:
        """Run a Python script with this installation's settings, and return its output."""
        command = [sys.executable, "-c", script]
        return subprocess.run(
            command, env=self.env, cwd=REPO, check=True, capture_output=True, text=True, input=text
        ).stdout

    def start(self, name: str, command: Sequence[str]) -> Process:
        self.processes[name] = Process(name, command, self.env, self.home)
        return self.processes[name]

    def server(self, name: str, slots: int, *options: str, function: str = "slotkeeper.serve.demo:zimg") -> "RefServer":
        """Start a reference server, and return it once it listens."""
        port = free_port()
        command = [sys.executable, "-P", "-m", "slotkeeper.serve", function, "--slots", str(slots), "--port", str(port)]
        journal = self.home / f"{name}.journal"
        process = self.start(name, [*command, "--journal", str(journal), *options])
        server = RefServer(name, port, slots, journal, process)
        process.source(lambda: listens(port), "it listens")
        return server

    def worker(self, name: str = "worker", threads: int = 64, level: str = "info") -> Process:
        command = self.celery("worker", "-Q", "celery", "-c", str(threads), "-n", f"{name}@%h")
        return self.start(name, [*command[:-1], level])

    def maintenance(self, name: str = "maintenance", *options: str) -> Process:
        return self.start(name, self.celery("worker", "-Q", "maintenance", "-n", f"{name}@%h", *options))

    def webhooks(self, name: str = "webhooks") -> Process:
        return self.start(name, [sys.executable, "-P", "-m", "tasks.webhooks"])

    def relay(self, name: str = "relay") -> Process:
        return self.start(name, [sys.executable, "-P", "-m", "tasks.relay"])

    def beat(self) -> Process:
        return self.start("beat", self.celery("beat"))

    def web(self) -> Process:
        process = self.start("web", [sys.executable, "-P", "-m", "app.server"])
        process.source(lambda: self.answers("/health/live"), "it answers")
        return process

    def celery(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "tasks", *arguments, "-l", "info"]

    def answers(self, path: str) -> bool:
        try:
            return requests.get(self.url + path, timeout=2).ok
        except requests.RequestException:
            return False


class RefServer:
    """A reference server process, and its journal of runs."""

    def __init__(self, name: str, port: int, slots: int, journal: Path, process: Process) -> None:
        self.name, self.port, self.slots, self.journal, self.process = name, port, slots, journal, process
        self.endpoint = f"http://127.0.0.1:{port}/generate"


_MIGRATE = (
    "from slotkeeper.config import *; from migrations.migrate import upgrade; upgrade(StorageSettings().sqlalchemy_url)"
)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
