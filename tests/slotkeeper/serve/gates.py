"""Functions that the reference server serves in its own tests, beside slotkeeper.serve.gated."""

from typing import Any


async def coroutine(payload: dict[str, Any]) -> dict[str, Any]:
    return {"echo": payload}


def unspeakable(payload: dict[str, Any]) -> object:
    """Returns what has no place in JSON."""
    return object()
