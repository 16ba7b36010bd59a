"""The model that a server wraps to be put to the slot protocol (`slotkeeper conform`), as the reference server has it.

    slotkeeper serve slotkeeper.serve.gated:model --slots 2 --port 9001

In another language it is twenty lines.  The payload may hold

  `gate`  "host:port": connect there, send `name` and a newline, wait for a line: return | error | invalid;
          the end of the connection means return
  `fail`  "error" or "invalid", for a run without a gate

and the result is {"echo": payload}.  A cancel ends the wait at the gate.
"""

import contextlib
import socket
from typing import Any

from slotkeeper.serve.served_function import Context, InvalidRequest

_LOOK_FOR_CANCEL_S = 0.02


def model(payload: dict[str, Any], context: Context) -> dict[str, Any]:
    """Returns {"echo": payload}, or ends as it is told.  Raises InvalidRequest, RuntimeError, Canceled."""
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


def _wait_at(gate: str, name: str, context: Context | None) -> str:
    host, _, port = gate.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as line:
        line.sendall(name.encode() + b"\n")
        line.settimeout(_LOOK_FOR_CANCEL_S)
        while True:
            if context:
                context.check()
            with contextlib.suppress(TimeoutError):
                return line.recv(100).decode().strip()
