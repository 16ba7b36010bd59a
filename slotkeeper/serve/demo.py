"""Four simulated models for demonstrations, tests and benchmarks.

    python -m slotkeeper.serve slotkeeper.serve.demo:zimg --slots 2
    python -m slotkeeper.serve slotkeeper.serve.demo:flux --slots 1 --async --port 9002
    python -m slotkeeper.serve slotkeeper.serve.demo:trellis --slots 1 --async --port 9003
    python -m slotkeeper.serve slotkeeper.serve.demo:parrot --slots 2 --port 9004

Fields of the payload, all optional:
`prompt`         any text; the result contains it
`seconds`        duration of the run; default: zimg 0.5, flux 1.5, trellis 2.5, parrot 0.05 for each word
`fail`           "error": fail with an error after which a retry may succeed; "invalid": fail because the request is
                 wrong, so that no retry can help; "crash": exit the server process
`fail_attempts`  number of the last attempt that fails; later attempts succeed
"""

import hashlib
import os
from collections.abc import Iterator
from typing import Any

from slotkeeper.serve.served_function import Context, InvalidRequest

Payload = dict[str, Any]


def zimg(payload: Payload, context: Context) -> Payload:
    """Simulate a fast image model, for sync mode.  Returns {"url", "prompt"}."""
    return _simulate_run(payload, context, seconds=0.5, kind="zimg")


def flux(payload: Payload, context: Context) -> Payload:
    """Simulate a slow image model, for async mode.  Returns {"url", "prompt"}."""
    return _simulate_run(payload, context, seconds=1.5, kind="flux")


def trellis(payload: Payload, context: Context) -> Payload:
    """Simulate a model that makes 3D objects from images, for async mode.

    Returns {"url", "prompt"}.  Reports its progress.
    """
    steps = ("shape", "texture")
    for n, step in enumerate(steps):
        context.progress({"step": step, "done": n / len(steps)})
        context.sleep(_seconds(payload.get("seconds", 2.5)) / len(steps))
    return _simulate_run({**payload, "seconds": 0}, context, seconds=0, kind="trellis", suffix="glb")


def parrot(payload: Payload, context: Context) -> Iterator[str]:
    """Simulate a language model: yield the prompt word by word."""
    words = str(payload.get("prompt", "")).split(" ")
    for n, word in enumerate(words):
        context.sleep(_seconds(payload.get("seconds", 0.05)))
        yield word if n == 0 else f" {word}"
    if _should_fail(payload, context):
        _fail(payload["fail"])


def _simulate_run(payload: Payload, context: Context, *, seconds: float, kind: str, suffix: str = "png") -> Payload:
    prompt = str(payload.get("prompt", ""))
    duration_s = _seconds(payload.get("seconds", seconds))
    if duration_s:
        context.sleep(duration_s)
    if _should_fail(payload, context):
        _fail(payload["fail"])
    return {"url": f"https://images.example/{kind}/{_file_name(prompt)}.{suffix}", "prompt": prompt}


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 86_400:
        raise InvalidRequest("seconds must be a number from 0 to 86400")
    return float(value)


def _should_fail(payload: Payload, context: Context) -> bool:
    if not payload.get("fail"):
        return False
    last_failing = payload.get("fail_attempts")
    return last_failing is None or (context.attempt or 1) <= int(last_failing)


def _fail(kind: str) -> None:
    if kind == "crash":
        os._exit(3)
    if kind == "invalid":
        raise InvalidRequest("the payload asked to be refused")
    raise RuntimeError("the payload asked for an error")


def _file_name(prompt: str) -> str:
    """Return a file name derived from the prompt, so that equal prompts get equal URLs."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]
