"""Four models that only pretend, for demonstrations, tests and benchmarks.

    python -m slotkeeper.serve slotkeeper.serve.demo:zimg --slots 2
    python -m slotkeeper.serve slotkeeper.serve.demo:flux --slots 1 --async --port 9002
    python -m slotkeeper.serve slotkeeper.serve.demo:trellis --slots 1 --async --port 9003
    python -m slotkeeper.serve slotkeeper.serve.demo:parrot --slots 2 --port 9004

Fields of the payload, all optional:
`prompt`         any text; comes back in the result
`seconds`        how long the run takes; zimg 0.5, flux 1.5, trellis 2.5, parrot 0.05 for each word
`fail`           "error": an error that a retry may cure; "invalid": the request is wrong, no retry can help;
                 "crash": the whole server process dies
`fail_attempts`  `fail` only while the attempt's number is at most this, then succeed
"""

import hashlib
import os
from collections.abc import Iterator
from typing import Any

from slotkeeper.serve.served_function import Context, InvalidRequest

Payload = dict[str, Any]


def zimg(payload: Payload, context: Context) -> Payload:
    """A quick image model, for sync mode.  Returns {"url", "prompt"}."""
    return _pretend(payload, context, seconds=0.5, kind="zimg")


def flux(payload: Payload, context: Context) -> Payload:
    """A slow image model, for async mode.  Returns {"url", "prompt"}."""
    return _pretend(payload, context, seconds=1.5, kind="flux")


def trellis(payload: Payload, context: Context) -> Payload:
    """A model that makes 3D objects of pictures, for async mode.  Returns {"url", "prompt"}, and tells its progress."""
    steps = ("shape", "texture")
    for n, step in enumerate(steps):
        context.progress({"step": step, "done": n / len(steps)})
        context.sleep(_seconds(payload.get("seconds", 2.5)) / len(steps))
    return _pretend({**payload, "seconds": 0}, context, seconds=0, kind="trellis", ending="glb")


def parrot(payload: Payload, context: Context) -> Iterator[str]:
    """A language model, which says its prompt again, word by word."""
    words = str(payload.get("prompt", "")).split(" ")
    for n, word in enumerate(words):
        context.sleep(_seconds(payload.get("seconds", 0.05)))
        yield word if n == 0 else f" {word}"
    if _is_to_fail(payload, context):
        _fail(payload["fail"])


def _pretend(payload: Payload, context: Context, *, seconds: float, kind: str, ending: str = "png") -> Payload:
    prompt = str(payload.get("prompt", ""))
    duration_s = _seconds(payload.get("seconds", seconds))
    if duration_s:
        context.sleep(duration_s)
    if _is_to_fail(payload, context):
        _fail(payload["fail"])
    return {"url": f"https://images.example/{kind}/{_name(prompt)}.{ending}", "prompt": prompt}


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 86_400:
        raise InvalidRequest("seconds must be a number from 0 to 86400")
    return float(value)


def _is_to_fail(payload: Payload, context: Context) -> bool:
    if not payload.get("fail"):
        return False
    until = payload.get("fail_attempts")
    return until is None or (context.attempt or 1) <= int(until)


def _fail(how: str) -> None:
    if how == "crash":
        os._exit(3)
    if how == "invalid":
        raise InvalidRequest("the payload asked to be refused")
    raise RuntimeError("the payload asked for an error")


def _name(prompt: str) -> str:
    """The same prompt, the same picture."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]
