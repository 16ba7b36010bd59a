"""Calls one inference server, whose requests and responses are described by data (description.py).

A ServerAdapter makes the requests to one server and judges the responses; all runs of a process share it.  A
ServerSession sends the requests of one run.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlsplit

import uvloop

from routing.dispatch.outcome import BAD_ANSWER, Outcome, OutcomeKind
from slotkeeper.urls import find_secrets_in_url, refuses_connections
from tasks.servers.call import MAX_DEADLINE_S, Call, Health, HealthKind, Limits
from tasks.servers.compiled import CompiledDescription, CompiledStep, RequestTemplate, compile_description
from tasks.servers.description import DEFAULT, Description
from tasks.servers.http_client import SPOOL_AFTER_BYTES, HttpClient, HttpExchange
from tasks.servers.pointers import Pointer
from tasks.servers.responses import MAX_RESPONSE_BYTES, FailureReason, NoResponse, Response, parse_in_subprocess
from tasks.servers.rules import ResponseContext
from tasks.servers.stream_reader import OnPiece, Piece, StreamReader, ignore_piece
from tasks.servers.templates import SecretLookup, TemplateError, TemplateValues, to_json

MAX_HEALTH_BYTES = 1024 * 1024

_CONTENT_TYPE = "Content-Type"
_OWN_HEADERS = {"X-Source": "dispatcher"}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}[!-~]{0,100}")


class HttpRequest(NamedTuple):
    """One request, made from a description and a call."""

    method: str
    url: str
    headers: dict[str, str]
    body: bytes | None
    limits: Limits
    reader: StreamReader | None = None
    """If the response may be a stream."""


Send: TypeAlias = Callable[[HttpRequest], Awaitable[Response | NoResponse]]
"""Sends one request, and returns the response, or the reason why there is none."""


class ServerAdapter:
    """One inference server and its description.

    Thread-safe.  Keep it: the constructor compiles the description.  It has no connections: `send` sends its requests,
    one after another.  No method raises because of a server, a payload or a description: all faults become an Outcome
    or a Health.

    endpoint: the full URL that jobs are submitted to; other paths are appended to its scheme, host and port.
    secret: returns a secret by its name.  Secrets are sent, but never kept, logged or quoted.
    Raises ValueError if the endpoint is not an http or https URL.
    """

    def __init__(
        self,
        endpoint: str,
        description: Description | CompiledDescription = DEFAULT,
        *,
        secret: SecretLookup | None = None,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._endpoint, self._base = split_endpoint(endpoint)
        self._path = urlsplit(self._endpoint).path.rstrip("/")
        self._secrets_of_endpoint = find_secrets_in_url(self._endpoint)
        self._compiled = compile_description(description) if isinstance(description, Description) else description
        self._secret = secret
        self._max_response_bytes = max_response_bytes

    @property
    def pointers(self) -> Collection[Pointer]:
        """Return all places that are read in JSON responses."""
        return self._compiled.pointers

    @property
    def endpoint(self) -> str:
        """Return the URL that jobs are submitted to."""
        return self._endpoint

    @property
    def description(self) -> Description:
        """Return the description of the server."""
        return self._compiled.description

    def given_id_of(self, call: Call) -> str | None:
        """Return the server's id of this attempt if the request sets it; None: the server chooses the id."""
        template = self.description.given_id
        if template is None:
            return None
        return call.job_id if template == "{{job/id}}" else call.attempt_id

    async def submit(self, call: Call, send: Send, on_piece: OnPiece = ignore_piece) -> Outcome:
        """Submit the job, once.  `on_piece` is called with each piece of a streamed response.

        UNREACHABLE: certainly nothing was sent, or a gateway responded 502 or 504 (`bad_gateway`).
        UNKNOWN: the server may run the job; do not send it again until that is known.
        """
        values = self._template_values(call, self.given_id_of(call))
        try:
            outcome = await self._run_step(
                self._compiled.submit, values, _deadline_of(call), send, self._make_stream_reader(values, on_piece)
            )
        except TemplateError as error:
            return Outcome(error.kind, code=error.code, message=str(error))
        return outcome or Outcome(OutcomeKind.RETRY, code=BAD_ANSWER)

    def is_run_over(self, call: Call, reply: Response | NoResponse) -> bool:
        """Return whether the end of an abandoned submit shows that the server no longer runs the job."""
        if isinstance(reply, NoResponse):
            return False
        outcome = self._compiled.submit.judge.outcome(
            reply, self._response_context(self._template_values(call, self.given_id_of(call)))
        )
        return outcome is not None and outcome.kind not in (
            OutcomeKind.PENDING,
            OutcomeKind.UNKNOWN,
            OutcomeKind.UNREACHABLE,
        )

    async def status(self, call: Call, remote_id: str, send: Send) -> Outcome:
        """Poll the run.  A poll that fails is PENDING: the caller decides how long it polls.

        If the description has a result step, the result of a finished run is fetched, too.  Some servers delete a
        result that was read, so store it at once.
        """
        values, deadline_s = self._template_values(call, remote_id), _deadline_of(call)
        try:
            outcome = await self._status_outcome(values, deadline_s, send)
            return await self._with_fetched_result(outcome, values, deadline_s, send)
        except TemplateError as error:
            return Outcome(OutcomeKind.PENDING, code=error.code, message=str(error), remote_id=remote_id)

    async def cancel(self, call: Call, remote_id: str | None, send: Send) -> bool:
        """Send each of the described cancel requests; return whether the server accepts one.

        Whether that frees the slot is described by `description.cancel_frees_slot`.  Without the server's id of the
        run, the job's id is sent: the server received it in X-Job-Id.
        """
        values = self._template_values(call, remote_id or self.given_id_of(call) or call.job_id)
        is_accepted = False
        for step in self._compiled.cancel:
            try:
                outcome = await self._run_step(step, values, _deadline_of(call), send)
            except TemplateError:
                continue
            is_accepted |= outcome is not None and outcome.kind is OutcomeKind.CANCELED
        return is_accepted

    def read_push(self, call: Call, remote_id: str | None, body: bytes) -> Outcome:
        """Return the outcome of a push to the callback URL; PENDING if it does not end the run.

        The caller must have checked the token of the push.  If the description has a result step, `fetch_result`
        fetches the result.
        """
        values = self._template_values(call, remote_id or self.given_id_of(call))
        outcome = self._compiled.callback.outcome(Response(200, {}, body), self._response_context(values))
        return outcome or Outcome(OutcomeKind.PENDING, code=BAD_ANSWER, remote_id=values.remote_id)

    async def fetch_result(self, call: Call, remote_id: str | None, outcome: Outcome, send: Send) -> Outcome:
        """Fetch the result of a run that ended by a push."""
        values = self._template_values(call, remote_id or self.given_id_of(call))
        try:
            return await self._with_fetched_result(outcome, values, _deadline_of(call), send)
        except TemplateError as error:
            return Outcome(OutcomeKind.PENDING, code=error.code, message=str(error), remote_id=remote_id)

    async def health(self, send: Send) -> Health:
        """Return what the server reports of itself.  DOWN: it does not respond, but jobs may still run there."""
        if self._compiled.health is None:
            return Health(HealthKind.UNKNOWN, message="this server's description has no health check")
        request, judge = self._compiled.health
        deadline_s = time.monotonic() + request.connect_s + min(request.read_s, 60.0)
        values = self._template_values(None, None)
        try:
            reply = await send(self._make_request(request, values, dict(_OWN_HEADERS), deadline_s, MAX_HEALTH_BYTES))
            if isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET:
                # The server may have closed a kept connection at this moment.  A health check may be sent again.
                reply = await send(
                    self._make_request(request, values, dict(_OWN_HEADERS), deadline_s, MAX_HEALTH_BYTES)
                )
        except TemplateError as error:
            return Health(HealthKind.UNKNOWN, message=str(error))
        return judge.read(reply, self._secrets_to_redact(None))

    async def _status_outcome(self, values: TemplateValues, deadline_s: float, send: Send) -> Outcome:
        for step in self._compiled.status:
            outcome = await self._run_step(step, values, deadline_s, send)
            if outcome is not None:
                return outcome
        return Outcome(OutcomeKind.PENDING, code=BAD_ANSWER, remote_id=values.remote_id)

    async def _with_fetched_result(
        self, outcome: Outcome, values: TemplateValues, deadline_s: float, send: Send
    ) -> Outcome:
        if outcome.kind is not OutcomeKind.DONE or self._compiled.result is None:
            return outcome
        return await self._run_step(self._compiled.result, values, deadline_s, send) or outcome

    def _make_stream_reader(self, values: TemplateValues, on_piece: OnPiece) -> StreamReader | None:
        stream = self._compiled.stream
        return (
            None
            if stream is None
            else StreamReader(stream, self._compiled.submit.judge, lambda: self._response_context(values), on_piece)
        )

    async def _run_step(
        self,
        step: CompiledStep,
        values: TemplateValues,
        deadline_s: float,
        send: Send,
        reader: StreamReader | None = None,
    ) -> Outcome | None:
        """Send the request of a step and judge the response.  Raises TemplateError: then nothing was sent."""
        assert values.call is not None
        headers = _job_headers(values.call)
        if step is self._compiled.submit:
            headers |= _submit_headers(values.call)
        reply = await send(
            self._make_request(step.request, values, headers, deadline_s, self._max_response_bytes, reader)
        )
        if reader is not None and reader.is_stream:
            return reader.outcome(reply)
        outcome = step.judge.outcome(reply, self._response_context(values))
        # A server that is starting may respond as if the job were at fault: then its health decides (`only_when_up`).
        if (
            outcome is None
            or outcome.kind is not OutcomeKind.FAILED
            or not step.judge.depends_on_health(reply, values.remote_id)
        ):
            return outcome
        health = await self.health(send)
        if health.kind not in (HealthKind.BUSY, HealthKind.DOWN):
            return outcome
        return Outcome(
            OutcomeKind.BUSY, code="busy", message=f"{outcome.message} (the health check says {health.kind})"
        )

    def _make_request(
        self,
        request: RequestTemplate,
        values: TemplateValues,
        headers: dict[str, str],
        deadline_s: float,
        max_bytes: int,
        reader: StreamReader | None = None,
    ) -> HttpRequest:
        url = self._endpoint if request.path is None else self._base + request.path.fill(values)
        body = self._make_body(request, values, headers)
        if request.headers is not None:
            headers |= request.headers.fill(values)
        call = values.call
        listen_s = call.listen_s if call is not None and self._response_ends_run(request, call) else 0.0
        limits = Limits(request.connect_s, request.read_s, deadline_s, max_bytes, listen_s)
        return HttpRequest(request.method, url, headers, body, limits, reader)

    def _response_ends_run(self, request: RequestTemplate, call: Call) -> bool:
        """Return whether the response to this request is sent when the run ends, however late."""
        return (
            request is self._compiled.submit.request
            and self.description.mode in ("sync", "auto")
            and not self.description.ends_on_disconnect(call.payload)
        )

    def _make_body(self, request: RequestTemplate, values: TemplateValues, headers: dict[str, str]) -> bytes | None:
        is_payload = request is self._compiled.submit.request and request.body is None and request.method != "GET"
        if not is_payload and request.body is None:
            return None
        headers[_CONTENT_TYPE] = "application/json"
        if is_payload and values.call is not None:
            return to_json(self._with_stream_request(values.call.payload))
        return to_json(request.body.fill(values)) if request.body else None

    def _with_stream_request(self, payload: Any) -> Any:
        """Return the payload with the fields that request a stream; its own fields have precedence."""
        stream = self.description.submit.stream
        return {**stream.ask, **payload} if stream and stream.ask and isinstance(payload, dict) else payload

    def _template_values(self, call: Call | None, remote_id: str | None) -> TemplateValues:
        return TemplateValues(call, remote_id, self._secret, self._path, self._compiled.output_size)

    def _response_context(self, values: TemplateValues) -> ResponseContext:
        assert values.call is not None
        return ResponseContext(values.call.job_id, values.remote_id, self._secrets_to_redact(values.call), time.time())

    def _secrets_to_redact(self, call: Call | None) -> tuple[str, ...]:
        """Return the secrets that a response may quote.  A server may also quote those of an earlier request."""
        token = call.callback_token if call is not None else None
        known = (*self._secrets_of_endpoint, token) if token else self._secrets_of_endpoint
        if self._secret is None or not self.description.secrets:
            return known
        return (*filter(None, map(self._secret, sorted(self.description.secrets))), *known)


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Return the endpoint without its fragment, and its scheme://host:port.  Raises ValueError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or not endpoint.isprintable():
        raise ValueError("an endpoint is a full URL, such as http://gpu1:9001/generate")
    _ = parts.port  # Raises ValueError if it is not a number up to 65535.
    return endpoint.partition("#")[0], f"{parts.scheme}://{parts.netloc}"


def _deadline_of(call: Call) -> float:
    return time.monotonic() + min(call.deadline_s, MAX_DEADLINE_S)


def _job_headers(call: Call) -> dict[str, str]:
    headers = {**_OWN_HEADERS, "X-Job-Id": call.job_id, "X-Attempt": str(call.attempt)}
    if call.traceparent and _TRACEPARENT.fullmatch(call.traceparent):  # It may be a client's text.
        headers["traceparent"] = call.traceparent
    if call.model:
        headers["X-Model"] = call.model
    return headers


def _submit_headers(call: Call) -> dict[str, str]:
    # All attempts have the same key: a server that keeps its last results by key can respond to a repeated attempt with
    # the result, and does not run the job twice.
    headers = {"Idempotency-Key": call.job_id, "X-Deadline-Ms": str(call.deadline_ms)}
    if call.callback_url:
        headers["X-Callback-Url"] = call.callback_url
    if call.callback_token:
        headers["X-Callback-Token"] = call.callback_token
    return headers


T = TypeVar("T")

ResponseFuture: TypeAlias = "asyncio.Future[Response | NoResponse]"
"""The end of an abandoned exchange."""

_PROCESS_END_POLLS_S = (0.0, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4)  # pauses before each poll
_CUT_OFF = Outcome(OutcomeKind.UNKNOWN, code="cut_short", message="The call was cut short.")


class _CutOff(Exception):
    """The session was cut off: the submit was not sent, or its response is not awaited."""


class ServerSession:
    """The requests of one run to its server.

    on_piece: called with each piece of a streamed response, and with the progress that a poll returns.
    """

    __slots__ = ("_http", "_is_cut_off", "_on_piece", "_server", "_submit", "abandoned", "is_broken")

    def __init__(self, server: ServerAdapter, http: HttpClient, on_piece: OnPiece = ignore_piece) -> None:
        self._server, self._http, self._on_piece = server, http, on_piece
        self._submit: HttpExchange | None = None
        self._is_cut_off = False
        self.is_broken = False  # The connection broke during the submit, before the response was complete.
        self.abandoned: ResponseFuture | None = None  # the end of a submit that was abandoned

    @property
    def description(self) -> Description:
        return self._server.description

    def given_id_of(self, call: Call) -> str | None:
        return self._server.given_id_of(call)

    async def submit(self, call: Call) -> Outcome:
        """Submit as ServerAdapter.submit does.  UNKNOWN also if the session is cut off before the response."""
        try:
            return await self._server.submit(call, self._send_submit, self._on_piece)
        except _CutOff:
            return _CUT_OFF
        finally:
            self._submit = None

    async def _send_submit(self, request: HttpRequest) -> Response | NoResponse:
        """Send the submit.  Raises _CutOff."""
        if self._is_cut_off:
            raise _CutOff
        self._submit = self._http.send(*request)
        reply = await self._submit.reply
        if self._submit.is_abandoned:
            self.abandoned = self._submit.reply
        self.is_broken = isinstance(reply, NoResponse) and reply.reason is FailureReason.RESET and not self._is_cut_off
        if self._is_cut_off:
            raise _CutOff
        return await self._with_json(reply)

    async def _send(self, request: HttpRequest) -> Response | NoResponse:
        return await self._with_json(await self._http.send(*request).reply)

    async def _with_json(self, reply: Response | NoResponse) -> Response | NoResponse:
        """Return the reply; a large response is parsed in a subprocess first.

        To parse 64 MiB here would hold the interpreter's lock for seconds, and delay all other runs of the worker.
        """
        if isinstance(reply, Response) and reply.size > SPOOL_AFTER_BYTES:
            async with self._http.large_response_lock:
                reply.set_json(*await parse_in_subprocess(reply.file or reply.body, self._server.pointers))
        return reply

    def cut_off(self) -> None:
        """End the submit and close its connection.  A submit that was not sent yet is never sent."""
        self._is_cut_off = True
        if self._submit is not None:
            self._submit.cut_off()

    def abandon(self) -> None:
        """End the submit as `cut_off` does, but observe its exchange if its end shows that the run is over.

        `abandoned` is then a future for that end.  For a server without status or a health check, it is the only early
        sign that the slot is free.
        """
        self._is_cut_off = True
        if self._submit is not None:
            self._submit.abandon(FailureReason.TIMEOUT)

    async def is_run_over(self, call: Call) -> bool:
        """Wait for the end of an abandoned submit, and return whether it shows that the run is over."""
        if self.abandoned is None:
            return False
        reply = await self.abandoned
        if isinstance(reply, NoResponse):
            return reply.reason is FailureReason.RESET and await self.has_process_ended()
        return self._server.is_run_over(call, reply)

    async def has_process_ended(self) -> bool:
        """Return whether the server's process has ended after its connection broke: its address refuses connections.

        A supervisor may soon start the next process, so the first check is made at once, and more in the next second.
        """
        for pause_s in _PROCESS_END_POLLS_S:
            await asyncio.sleep(pause_s)
            if await self.refuses_connections():
                return True
        return False

    async def refuses_connections(self) -> bool:
        """Return whether no process listens at the server's address."""
        return await asyncio.to_thread(refuses_connections, self._server.endpoint)

    async def status(self, call: Call, remote_id: str) -> Outcome:
        outcome = await self._server.status(call, remote_id, self._send)
        if outcome.progress is not None:
            self._on_piece(Piece(progress=outcome.progress))
        return outcome

    async def cancel(self, call: Call, remote_id: str | None = None) -> bool:
        return await self._server.cancel(call, remote_id, self._send)

    async def health(self) -> Health:
        return await self._server.health(self._send)

    async def fetch_result(self, call: Call, remote_id: str | None, outcome: Outcome) -> Outcome:
        return await self._server.fetch_result(call, remote_id, outcome, self._send)


def run_with_http_client(function: Callable[[HttpClient], Coroutine[Any, Any, T]]) -> T:
    """Run `function` with an HttpClient in a new event loop, and return its result; for a thread without an event loop.

    It keeps no connections: such calls are rarer than servers close idle connections.
    """

    async def run() -> T:
        http = HttpClient(asyncio.get_running_loop())
        try:
            return await function(http)
        finally:
            http.close()

    return uvloop.run(run())


def call_server(server: ServerAdapter, function: Callable[[ServerSession], Coroutine[Any, Any, T]]) -> T:
    """Call a server from a thread that has no event loop, such as `call_server(server, ServerSession.health)`."""
    return run_with_http_client(lambda http: function(ServerSession(server, http)))
