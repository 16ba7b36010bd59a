"""The model that a server must wrap to be put to this suite, and the gate that a test holds it by.

A gate is a TCP port that the test listens on.  A run connects to it, says its name, and waits for one line that
tells it how to end.  So a test knows when a run started, decides when it ends, and sleeps nowhere; and the model can
be written in any language.
"""

import contextlib
import socket
from typing import Any

from reference_server import Context, InvalidRequest

LOOK_FOR_CANCEL_S = 0.02


def model(payload: dict[str, Any], context: Context) -> dict[str, Any]:
    """Returns {"echo": payload}.

    `gate`  "host:port": connect there, send `name` and a newline, wait for a line: return | error | invalid;
            the end of the connection means return
    `fail`  "error" or "invalid", for a run without a gate
    """
    how = _wait_at(payload["gate"], str(payload.get("name", "")), context) if "gate" in payload else payload.get("fail")
    if how == "invalid":
        raise InvalidRequest("told to refuse")
    if how == "error":
        raise RuntimeError("told to fail")
    return {"echo": payload}


def deaf(payload: dict[str, Any]) -> dict[str, Any]:
    """The same, but it knows nothing of a cancel."""
    if "gate" in payload:
        _wait_at(payload["gate"], str(payload.get("name", "")), None)
    return {"echo": payload}


async def coroutine(payload: dict[str, Any]) -> dict[str, Any]:
    return {"echo": payload}


def unspeakable(payload: dict[str, Any]) -> object:
    """Returns what has no place in JSON."""
    return object()


def _wait_at(gate: str, name: str, context: Context | None) -> str:
    host, _, port = gate.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        line.sendall(name.encode() + b"\n")
        line.settimeout(LOOK_FOR_CANCEL_S)
        while True:
            if context:
                context.check()
            with contextlib.suppress(TimeoutError):
                return line.recv(100).decode().strip()


class Held:
    """One run that waits at the gate."""

    def __init__(self, line: socket.socket) -> None:
        line.settimeout(10)
        self._line, self._file = line, line.makefile("r")
        self.name = self._file.readline().strip()

    def release(self, how: str = "return") -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(f"{how}\n".encode())
        self.close()

    def close(self) -> None:
        self._file.close()
        self._line.close()


class Gate:
    """Where runs wait until the test lets them go."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._held: list[Held] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def arrival(self, timeout_s: float = 10) -> Held:
        """Wait for the next run to start."""
        self._listener.settimeout(timeout_s)
        line, _ = self._listener.accept()
        held = Held(line)
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
