"""The reference server as a subprocess that a test can kill and restart."""

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
    """A reference server in a subprocess.

    Its stderr goes to the file `log`.  Without a reader a pipe would become full and block the server.
    """

    command: list[str]
    served: ServerUnderTest
    log: IO[str]
    child: "subprocess.Popen[str]"

    def errors(self) -> str:
        """Return everything that the server has written to stderr."""
        self.log.seek(0)
        return self.log.read()

    def restart(self) -> None:
        """Kill the server and start it again at the same address."""
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
    """Start a reference server for a function on a free port, yield it, and kill it at the end."""
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
