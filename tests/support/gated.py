"""A model for the reference server whose runs end when the test says so.

    gate = Gate(tmp_path / "gate")
    submit(model, gate.payload)    # runs until
    gate.open()

So a test can act on a run in progress on the slowest machine too.
"""

from pathlib import Path
from typing import Any

from slotkeeper.serve.demo import zimg
from slotkeeper.serve.served_function import Context

_LOOK_EVERY_S = 0.01


class Gate:
    """Holds any number of runs until it is opened.  `path`: a file that does not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def payload(self) -> dict[str, Any]:
        return {"gate": str(self._path), "seconds": 0}

    def open(self) -> None:
        self._path.touch()


def model(payload: dict[str, Any], context: Context) -> dict[str, Any]:
    """The demo's model; with a `gate` in its payload it first waits until that is opened, or the run canceled."""
    gate = payload.get("gate")
    while gate is not None and not Path(gate).exists():
        context.sleep(_LOOK_EVERY_S)
    return zimg(payload, context)
