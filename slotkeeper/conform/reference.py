"""The reference server as a process of its own, which can be killed and started again."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO
from urllib.parse import urlsplit

from slotkeeper.conform.check_context import ServerUnderTest

GATED = "slotkeeper.serve.gated:model"


@dataclass
class ServerProcess:
    """What it writes to stderr goes to a file: a pipe that nobody reads would fill, and hold the server up."""

    command: list[str]
    served: ServerUnderTest
    log: IO[str]
    child: "subprocess.Popen[str]"

    def errors(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def restart(self) -> None:
        """Kill it, and start it again at the same address."""
        self.child.kill()
        self.child.wait()
        port = urlsplit(self.served.url).port
        self.child = _start([*self.command, "--port", str(port)], self.log)
        self._read_address()

    def _read_address(self) -> None:
        assert self.child.stdout
        line = self.child.stdout.readline()
        if " at http://" not in line:
            raise RuntimeError(f"the reference server did not start: {line} {self.errors()}")
        self.served.url = line.split(" at ")[1].strip().removesuffix(self.served.endpoint)


@contextlib.contextmanager
def started(target: str, *options: str) -> Iterator[ServerProcess]:
    """A reference server around a function, on a free port, killed at the end."""
    command = [sys.executable, "-P", "-m", "slotkeeper.serve", target, *options]
    with tempfile.TemporaryFile("w+") as log:
        served = ServerUnderTest("", "async" if "--async" in options else "sync")
        process = ServerProcess(command, served, log, _start([*command, "--port", "0"], log))
        served.restart = process.restart
        try:
            process._read_address()
            yield process
        finally:
            process.child.kill()
            process.child.wait()
            if process.child.stdout:
                process.child.stdout.close()


def _start(command: list[str], log: IO[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
