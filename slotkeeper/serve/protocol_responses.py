"""The responses of the slot protocol, as pure functions of runs and health."""

from collections.abc import Iterator
from typing import Any

import orjson

from slotkeeper.serve.http_server import Response
from slotkeeper.serve.run_scheduler import Health, Run, State

RETRY_AFTER_S = 1


def answer(status: int, body: dict[str, Any], *headers: tuple[str, str]) -> Response:
    """Return a JSON response."""
    return Response(status, orjson.dumps(body), headers)


def refused(status: int, error: str) -> Response:
    """Return the response to a request that is itself wrong, so that no retry can help."""
    return answer(status, {"status": "failed", "error": error, "retryable": False})


def not_now(status: str, error: str, health: Health) -> Response:
    """Return 503: nothing has failed, and the client should call another server or call later."""
    body = {"status": status, "error": error, "active_jobs": health.active, "slots": health.slots}
    body["direct_queue"] = health.direct_queue
    return answer(503, body, ("Retry-After", str(RETRY_AFTER_S)))


def unknown(name: str) -> Response:
    """Return 404 for an id that no run has."""
    return answer(404, {"status": "unknown", "job_id": name, "error": "no such job here (any more)"})


def queued(run: Run, position: int) -> Response:
    """Return the response for a direct call that waits at this position of the direct queue."""
    return answer(200, {"status": State.QUEUED, "job_id": run.id, "position": position})


def sync_result(run: Run) -> Response:
    """Return the response to a sync call whose run has ended."""
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
    """Return the run's progress stream as server-sent events; the last event is the body of the sync response."""
    return Response(200, b"", events=_events(run))


def _events(run: Run) -> Iterator[bytes]:
    for message in run.pieces:
        yield b"data: %b\n\n" % message
    run.done.wait()
    yield b"data: %b\n\n" % sync_result(run).body


def status_body(run: Run) -> dict[str, Any]:
    """Return the body of `/status` for a run that has started or ended.  A push has the same body."""
    body: dict[str, Any] = {"status": run.state, "job_id": run.id}
    ending = run.ending
    if ending is None:
        return body if run.pieces.progress is None else body | {"progress": run.pieces.progress}
    # Not `run.state`, which the scheduler sets after `ending`: it may still be `processing`.
    body["status"] = ending.state
    if ending.state is State.COMPLETED:
        return body | {"result": orjson.Fragment(ending.result)}
    body["error"] = ending.error
    return body | {"retryable": ending.retryable} if ending.state is State.FAILED else body


def health(now: Health, about: dict[str, str | bool]) -> Response:
    """Return the response of `/health`.  `about` has the fields model, mode, streams and endpoint."""
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
