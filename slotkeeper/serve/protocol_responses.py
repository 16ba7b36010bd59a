"""What the protocol answers, as pure functions from what the engine says to a Response."""

from collections.abc import Iterator
from typing import Any

import orjson

from slotkeeper.serve.http_server import Response
from slotkeeper.serve.run_scheduler import Health, Run, State

RETRY_AFTER_S = 1


def answer(status: int, body: dict[str, Any], *headers: tuple[str, str]) -> Response:
    return Response(status, orjson.dumps(body), headers)


def refused(status: int, error: str) -> Response:
    """The request itself is wrong: sending it again cannot help."""
    return answer(status, {"status": "failed", "error": error, "retryable": False})


def not_now(status: str, error: str, health: Health) -> Response:
    """503: nothing has failed, the call belongs elsewhere or later."""
    body = {"status": status, "error": error, "active_jobs": health.active, "slots": health.slots}
    body["direct_queue"] = health.direct_queue
    return answer(503, body, ("Retry-After", str(RETRY_AFTER_S)))


def unknown(name: str) -> Response:
    return answer(404, {"status": "unknown", "job_id": name, "error": "no such job here (any more)"})


def queued(run: Run, position: int) -> Response:
    return answer(200, {"status": State.QUEUED, "job_id": run.id, "position": position})


def sync_result(run: Run) -> Response:
    """The answer to a sync call, once the run has ended."""
    ending = run.ending
    assert ending is not None
    if ending.state is State.COMPLETED:
        return answer(200, {"status": "success", "result": orjson.Fragment(ending.result)})
    if ending.state is State.CANCELED:
        return answer(200, {"status": State.CANCELED, "job_id": run.id, "error": ending.error})
    if ending.retryable:
        return answer(500, {"status": "error", "error": ending.error, "retryable": True})
    return refused(422, ending.error)


def stream(run: Run) -> Response:
    """What the run says while it is at it, as server-sent events; the last is what a sync call is answered."""
    return Response(200, b"", events=_events(run))


def _events(run: Run) -> Iterator[bytes]:
    for said in run.pieces:
        yield b"data: %b\n\n" % said
    run.done.wait()
    yield b"data: %b\n\n" % sync_result(run).body


def status_body(run: Run) -> dict[str, Any]:
    """What `/status` tells of a run that does not wait; a push says the same."""
    body: dict[str, Any] = {"status": run.state, "job_id": run.id}
    ending = run.ending
    if ending is None:
        return body if run.pieces.progress is None else body | {"progress": run.pieces.progress}
    body["status"] = ending.state  # the ending is written before the state: never show one without the other
    if ending.state is State.COMPLETED:
        return body | {"result": orjson.Fragment(ending.result)}
    body["error"] = ending.error
    return body | {"retryable": ending.retryable} if ending.state is State.FAILED else body


def health(now: Health, about: dict[str, str]) -> Response:
    """`about` names model, mode and endpoint."""
    return answer(
        200,
        {
            "status": "stopping" if now.stopping else "ok",
            "active_jobs": now.active,
            "job_ids": now.job_ids,
            "idempotent": True,
            "slots": now.slots,
            "direct_queue": now.direct_queue,
            "max_active": now.max_active,
            **about,
        },
    )
