"""Functions that nodes of tests serve."""

from typing import Any


def big(payload: dict[str, Any]) -> dict[str, str]:
    """Return a result of so many bytes."""
    return {"text": "x" * payload["bytes"]}


def refuses(payload: dict[str, Any]) -> None:
    """Call every request wrong."""
    raise ValueError("this model likes no payload")
