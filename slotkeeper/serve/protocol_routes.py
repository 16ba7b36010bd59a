"""The routes of the slot protocol: from an HTTP request to an HTTP response."""

from typing import Any, assert_never
from urllib.parse import unquote

from slotkeeper.serve import protocol_responses
from slotkeeper.serve.exact import loads
from slotkeeper.serve.http_server import Request, Response
from slotkeeper.serve.result_push import usable
from slotkeeper.serve.run_executor import RunExecutor
from slotkeeper.serve.run_scheduler import (
    AlreadyKnown,
    Busy,
    Call,
    Callback,
    Queued,
    QueueFull,
    Run,
    RunScheduler,
    Started,
    State,
    Stopping,
)

MAX_ID_CHARS = 200


class BadCall(Exception):
    """A request that cannot be read as a call; its text becomes the field `error` of the response."""


class ProtocolRoutes:
    """The request handler: it parses requests, calls the scheduler and builds responses.

    Only the scheduler decides about slots.
    """

    def __init__(
        self,
        engine: RunScheduler,
        runner: RunExecutor,
        *,
        endpoint: str,
        asynchronous: bool,
        push: bool,
        cancelable: bool,
        streams: bool,
        model: str,
    ) -> None:
        self._scheduler, self._executor = engine, runner
        self._endpoint, self._asynchronous = endpoint, asynchronous
        self._push, self._cancelable, self._streams = push, cancelable, streams
        self._about: dict[str, str | bool] = {
            "model": model,
            "mode": "async" if asynchronous else "sync",
            "streams": streams and not asynchronous,
            "endpoint": endpoint,
        }

    def handle(self, request: Request) -> Response:
        """Return the response to a request.  Waits for the run if the endpoint is sync."""
        path = request.path
        if path == self._endpoint:
            return self._generate(request) if request.method == "POST" else _allow_only("POST")
        if path == "/health":
            return self._health() if request.method == "GET" else _allow_only("GET")
        if path.startswith("/status/"):
            return self._status(_id_from_path(path)) if request.method == "GET" else _allow_only("GET")
        if path.startswith("/cancel/"):
            return self._cancel(_id_from_path(path)) if request.method == "POST" else _allow_only("POST")
        return protocol_responses.refused(404, f"there is no {path} here; the model is at POST {self._endpoint}")

    def _generate(self, request: Request) -> Response:
        try:
            call = read_call(request, push=self._push)
        except BadCall as error:
            return protocol_responses.refused(400, str(error))
        match decision := self._scheduler.submit(call):
            case Started(run):
                return self._start(run, as_stream=self._wants_stream(request))
            case AlreadyKnown(run):
                return self._join(run, as_stream=self._wants_stream(request))
            case Queued(run, position):
                return protocol_responses.queued(run, position)
            case Busy():
                return protocol_responses.not_now(
                    "busy", "no slot is free for dispatcher traffic", self._scheduler.health()
                )
            case QueueFull():
                return protocol_responses.not_now("error", "Queue full", self._scheduler.health())
            case Stopping():
                status = "busy" if call.dispatcher else "error"
                return protocol_responses.not_now(status, "the server is stopping", self._scheduler.health())
            case _:
                assert_never(decision)

    def _wants_stream(self, request: Request) -> bool:
        accepted = [item.partition(";")[0].strip() for item in request.headers.get("accept", "").lower().split(",")]
        return self._streams and not self._asynchronous and request.takes_chunks and "text/event-stream" in accepted

    def _start(self, run: Run, *, as_stream: bool) -> Response:
        """Execute a run that has a slot, and return the first response to its call."""
        if as_stream:
            self._executor.start(run)
            return protocol_responses.stream(run)
        if self._asynchronous:
            self._executor.start(run)
            return protocol_responses.answer(200, {"status": State.PROCESSING, "job_id": run.id})
        self._executor.run_here(run)
        return protocol_responses.sync_result(run)

    def _join(self, run: Run, *, as_stream: bool) -> Response:
        """Return the response to a call with the Idempotency-Key of an existing run."""
        if self._asynchronous or run.state is State.QUEUED:
            return self._status_response(run)
        if as_stream and run.ending is None:
            return protocol_responses.stream(run)
        run.done.wait()
        return protocol_responses.sync_result(run)

    def _status(self, name: str) -> Response:
        run = self._scheduler.find(name)
        return self._status_response(run) if run else protocol_responses.unknown(name)

    def _status_response(self, run: Run) -> Response:
        position = self._scheduler.position(run)
        return (
            protocol_responses.queued(run, position)
            if position
            else protocol_responses.answer(200, protocol_responses.status_body(run))
        )

    def _cancel(self, name: str) -> Response:
        run = self._scheduler.cancel(name)
        if run is None:
            return protocol_responses.unknown(name)
        body: dict[str, Any] = {"status": run.state, "job_id": run.id}
        if run.state is State.PROCESSING and self._cancelable:
            body["status"] = "canceling"
        elif run.state is State.PROCESSING:  # "canceling" would promise an end that does not come
            body["error"] = "this model cannot be interrupted"
        return protocol_responses.answer(200, body)

    def _health(self) -> Response:
        return protocol_responses.health(self._scheduler.health(), self._about)


def read_call(request: Request, *, push: bool) -> Call:
    """Return the call that a request describes.  `push`: read the callback headers.  Raises BadCall."""
    get = request.headers.get
    attempt = get("x-attempt", "")
    callback_url, callback_token = get("x-callback-url"), get("x-callback-token")
    callback = None
    if push and callback_url and callback_token:
        if not usable(callback_url):
            raise BadCall("X-Callback-Url must be an http or https URL")
        callback = Callback(callback_url, callback_token)
    return Call(
        payload=_payload(request.body),
        dispatcher=get("x-source", "").lower() == "dispatcher",
        job_id=_checked_id(get("x-job-id"), "X-Job-Id"),
        attempt=int(attempt) if attempt.isascii() and attempt.isdigit() and len(attempt) < 10 else None,
        key=_checked_id(get("idempotency-key"), "Idempotency-Key"),
        callback=callback,
    )


def _payload(body: bytes) -> dict[str, Any]:
    try:
        payload = loads(body)
    except ValueError as error:
        raise BadCall(f"the body is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise BadCall("the body must be a JSON object")
    return payload


def _checked_id(value: str | None, name: str) -> str | None:
    if value and (len(value) > MAX_ID_CHARS or not value.isascii() or not value.isprintable()):
        raise BadCall(f"{name} must be at most {MAX_ID_CHARS} printable ASCII characters")
    return value or None


def _id_from_path(path: str) -> str:
    return unquote(path.split("/", 2)[2])


def _allow_only(method: str) -> Response:
    return protocol_responses.answer(
        405, {"status": "failed", "error": f"only {method} is allowed here", "retryable": False}, ("Allow", method)
    )
