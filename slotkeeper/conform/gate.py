"""The gate by which a check holds runs.  The server wraps `slotkeeper.serve.gated`, or the same in its language.

A gate is a TCP port.  A run connects to it, says its name, and waits for one line that tells it how to end.  So a check
knows when a run started, decides when it ends, and sleeps nowhere.
"""

import contextlib
import socket

ARRIVAL_S = 10.0
"""How long a run is waited for."""


class HeldRun:
    """One run that waits at the gate."""

    def __init__(self, line: socket.socket) -> None:
        line.settimeout(10)
        self._line, self._file = line, line.makefile("r")
        self.name = self._file.readline().strip()

    def release(self, how: str = "return") -> None:
        """`how`: return | error | invalid."""
        with contextlib.suppress(OSError):
            self._line.sendall(f"{how}\n".encode())
        self.close()

    def close(self) -> None:
        self._file.close()
        self._line.close()


class Gate:
    """Where runs wait until they are let go.  `host`: the name by which the server reaches this machine."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._listener = socket.create_server(("127.0.0.1" if host == "127.0.0.1" else "", 0), backlog=64)
        self._held: list[HeldRun] = []

    @property
    def address(self) -> str:
        return f"{self._host}:{self._listener.getsockname()[1]}"

    def arrival(self, timeout_s: float | None = None) -> HeldRun:
        """Wait for the next run to start.  Raises TimeoutError; with 0 seconds BlockingIOError."""
        self._listener.settimeout(ARRIVAL_S if timeout_s is None else timeout_s)
        line, _ = self._listener.accept()
        held = HeldRun(line)
        self._held.append(held)
        return held

    def nobody_waits(self) -> bool:
        """Whether no further run has come to the gate."""
        try:
            self.arrival(0)
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        """Let everybody go, late comers too: a closed connection means return, a refused one ends in an error."""
        for held in self._held:
            held.close()
        self._listener.close()
