"""The gate: a TCP server that holds the runs of the server under test until a check releases them.

The server under test must serve the model in `slotkeeper/serve/gated.py`, or its equivalent in another language.  A run
connects to the gate, sends its name, and reads one line, which determines how the run ends.  So a check knows when a
run has started and decides when it ends, without sleeps.
"""

import contextlib
import socket

ARRIVAL_S = 10.0
"""How long `Gate.arrival` waits for a run, in seconds."""


class HeldRun:
    """A run that waits at the gate.  `name` is the name that it sent."""

    def __init__(self, line: socket.socket) -> None:
        line.settimeout(10)
        self._connection, self._file = line, line.makefile("r")
        self.name = self._file.readline().strip()

    def release(self, how: str = "return") -> None:
        """End the run.  `how`: return | error | invalid."""
        with contextlib.suppress(OSError):
            self._connection.sendall(f"{how}\n".encode())
        self.close()

    def close(self) -> None:
        self._file.close()
        self._connection.close()


class Gate:
    """A listener for the connections of runs.  `host` is this machine's address for the server under test."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._listener = socket.create_server(("127.0.0.1" if host == "127.0.0.1" else "", 0), backlog=64)
        self._held: list[HeldRun] = []

    @property
    def address(self) -> str:
        """`host:port`, for the payload of a run."""
        return f"{self._host}:{self._listener.getsockname()[1]}"

    def arrival(self, timeout_s: float | None = None) -> HeldRun:
        """Wait for the next run and return it.  Raises TimeoutError; with `timeout_s` 0 BlockingIOError."""
        self._listener.settimeout(ARRIVAL_S if timeout_s is None else timeout_s)
        connection, _ = self._listener.accept()
        held = HeldRun(connection)
        self._held.append(held)
        return held

    def nobody_waits(self) -> bool:
        """Return True unless a further run has connected."""
        try:
            self.arrival(0)
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        """Release all runs.

        A closed connection means return.  A run that connects later is refused, and ends with an error.
        """
        for held in self._held:
            held.close()
        self._listener.close()
