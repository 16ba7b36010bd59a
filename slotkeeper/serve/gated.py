"""The test model that a server must serve when `slotkeeper conform` checks it.

    slotkeeper serve slotkeeper.serve.gated:model --slots 2 --port 9001

A server in another language needs the same model, about twenty lines.  Fields of the payload, all optional:

  `gate`  "host:port": connect to it, send `name` and a newline, and wait for a line: return | error | invalid;
          a closed connection means return
  `fail`  "error" or "invalid": how to fail, in a run without a gate

The result is {"echo": payload}.  A cancel ends the wait for the gate.
"""

import contextlib
import socket
from typing import Any

from slotkeeper.serve.served_function import Context, InvalidRequest

_CANCEL_POLL_S = 0.02


def model(payload: dict[str, Any], context: Context) -> dict[str, Any]:
    """Return {"echo": payload}, unless the gate or the payload requests a failure.

    Raises InvalidRequest, RuntimeError or Canceled.
    """
    name = str(payload.get("name", ""))
    ending = _wait_for_gate(payload["gate"], name, context) if "gate" in payload else payload.get("fail")
    if ending == "invalid":
        raise InvalidRequest("told to refuse")
    if ending == "error":
        raise RuntimeError("told to fail")
    return {"echo": payload}


def deaf(payload: dict[str, Any]) -> dict[str, Any]:
    """Return {"echo": payload} after a wait for the gate, like `model`, but ignore cancels and requested failures."""
    if "gate" in payload:
        _wait_for_gate(payload["gate"], str(payload.get("name", "")), None)
    return {"echo": payload}


def _wait_for_gate(gate: str, name: str, context: Context | None) -> str:
    """Return the line that the gate sends.  Raises Canceled if the run of `context` is canceled."""
    host, _, port = gate.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(name.encode() + b"\n")
        connection.settimeout(_CANCEL_POLL_S)
        while True:
            if context:
                context.check()
            with contextlib.suppress(TimeoutError):
                return connection.recv(100).decode().strip()
