"""What is sent to one inference server, and what its responses mean, as its description says (description.py).

A ServerAdapter sends nothing; all runs of a process share it.  A ServerSession (session.py) sends the requests of one
run.
"""

import re
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from routing.dispatch.outcome import BAD_ANSWER, Outcome, OutcomeKind
from slotkeeper.urls import find_secrets_in_url
from tasks.servers.compiled import CompiledDescription, CompiledHealth, CompiledStep, compile_description
from tasks.servers.description import DEFAULT, Description
from tasks.servers.endpoint import Endpoint, parse_endpoint, quote_target
from tasks.servers.node_resolver import NodeResolver
from tasks.servers.pointers import Pointer
from tasks.servers.responses import MAX_RESPONSE_BYTES, NoResponse, Response
from tasks.servers.rules import ResponseContext
from tasks.servers.stream_reader import OnPiece, StreamReader
from tasks.servers.templates import SecretLookup, TemplateValues, to_json
from tasks.servers.values import Limits, RunDetails

MAX_HEALTH_BYTES = 1024 * 1024

_CONTENT_TYPE = "Content-Type"
_OWN_HEADERS = {"X-Source": "dispatcher"}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}[!-~]{0,100}")
_UNDECIDED = frozenset({OutcomeKind.PENDING, OutcomeKind.UNKNOWN, OutcomeKind.UNREACHABLE})


class HttpRequest(NamedTuple):
    """One request, built from a description and the details of a run."""

    method: str
    endpoint: Endpoint
    target: str
    """The path and the query, quoted."""
    headers: dict[str, str]
    body: bytes | None
    limits: Limits
    reader: StreamReader | None = None
    """If the response may be a stream."""
    nodes: NodeResolver | None = None
    """Finds the gateway of a node, if the request goes to one."""


class RequestBuilder:
    """Builds the requests to one server from its description and the details of a run."""

    def __init__(
        self,
        endpoint: Endpoint,
        compiled: CompiledDescription,
        secret: SecretLookup | None,
        max_response_bytes: int,
        nodes: NodeResolver | None = None,
    ) -> None:
        self._endpoint, self._compiled, self._secret, self._nodes = endpoint, compiled, secret, nodes
        self._max_response_bytes = max_response_bytes

    def template_values(self, run: RunDetails | None, remote_id: str | None = None) -> TemplateValues:
        """Return the values that the templates of a request may contain.  run: None for a health check."""
        return TemplateValues(run, remote_id, self._secret, self._endpoint.path, self._compiled.output_size)

    def build(
        self,
        step: CompiledStep | CompiledHealth,
        values: TemplateValues,
        deadline_s: float,
        reader: StreamReader | None = None,
    ) -> HttpRequest:
        """Build the request of a step.  Raises TemplateError.

        deadline_s: the monotonic time at which its exchange ends.
        """
        request, run, is_submit = step.request, values.run, step is self._compiled.submit
        target = self._endpoint.target if request.path is None else quote_target(request.path.fill(values))
        headers = _headers_for(run, is_submit, may_push=self._endpoint.node is None)
        body = self._build_body(step, values)
        if body is not None:
            headers[_CONTENT_TYPE] = "application/json"
        if request.headers is not None:
            headers |= request.headers.fill(values)
        max_bytes = MAX_HEALTH_BYTES if run is None else self._max_response_bytes
        listen_s = run.listen_s if run is not None and is_submit and self._response_ends_run(run) else 0.0
        limits = Limits(request.connect_s, request.read_s, deadline_s, max_bytes, listen_s)
        return HttpRequest(request.method, self._endpoint, target, headers, body, limits, reader, self._nodes)

    def _build_body(self, step: CompiledStep | CompiledHealth, values: TemplateValues) -> bytes | None:
        request = step.request
        if request.body is not None:
            return to_json(request.body.fill(values))
        if step is not self._compiled.submit or request.method == "GET" or values.run is None:
            return None
        return to_json(self._with_stream_request(values.run.payload))

    def _with_stream_request(self, payload: Any) -> Any:
        """Return the payload with the fields that request a stream; its own fields have precedence."""
        stream = self._compiled.description.submit.stream
        return {**stream.ask, **payload} if stream and stream.ask and isinstance(payload, dict) else payload

    def _response_ends_run(self, run: RunDetails) -> bool:
        """Return whether the response to the submit is sent when the run ends, however late."""
        description = self._compiled.description
        return description.mode in ("sync", "auto") and not description.ends_on_disconnect(run.payload)


class ServerAdapter:
    """One inference server and its description.

    Thread-safe.  Keep it: the constructor compiles the description.  Only `requests.build` raises because of a payload
    or a secret, and nothing because of a server: all its faults become an Outcome or a Health.

    endpoint: the full URL that jobs are submitted to; other paths are appended to its scheme, host and port.
    secret: returns a secret by its name.  Secrets are sent, but never kept, logged or quoted.
    nodes: finds the gateways of nodes.
    Raises ValueError if the endpoint is not an http or https URL, nor a node's.
    """

    def __init__(
        self,
        endpoint: str,
        description: Description | CompiledDescription = DEFAULT,
        *,
        secret: SecretLookup | None = None,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        nodes: NodeResolver | None = None,
    ) -> None:
        parsed = parse_endpoint(endpoint)
        self.endpoint = parsed.url
        """The URL that jobs are submitted to, without its fragment."""
        self.compiled = compile_description(description) if isinstance(description, Description) else description
        self.requests = RequestBuilder(parsed, self.compiled, secret, max_response_bytes, nodes)
        self.is_node = parsed.node is not None
        self._secret = secret
        self._secrets_of_endpoint = find_secrets_in_url(parsed.url)

    @property
    def pointers(self) -> Collection[Pointer]:
        """Return all places that are read in JSON responses."""
        return self.compiled.pointers

    @property
    def description(self) -> Description:
        """Return the description of the server."""
        return self.compiled.description

    def given_id_of(self, run: RunDetails) -> str | None:
        """Return the server's id of this attempt if the request sets it; None: the server chooses the id."""
        template = self.description.given_id
        if template is None:
            return None
        return run.job_id if template == "{{job/id}}" else run.attempt_id

    def make_stream_reader(self, values: TemplateValues, on_piece: OnPiece) -> StreamReader | None:
        """Return a reader of the response to a submit, if that may be a stream."""
        stream = self.compiled.stream
        if stream is None:
            return None
        return StreamReader(stream, self.compiled.submit.judge, lambda: self.response_context(values), on_piece)

    def is_run_over(self, run: RunDetails, reply: Response | NoResponse) -> bool:
        """Return whether the end of an abandoned submit shows that the server no longer runs the job."""
        if isinstance(reply, NoResponse):
            return False
        context = self.response_context(self.requests.template_values(run, self.given_id_of(run)))
        outcome = self.compiled.submit.judge.outcome(reply, context)
        return outcome is not None and outcome.kind not in _UNDECIDED

    def read_push(self, run: RunDetails, remote_id: str | None, push: Response) -> Outcome:
        """Return the outcome of a push to the callback URL; PENDING if it does not end the run.

        push: its body, as if it were a response.  The caller must have checked the token of the push.  If the
        description has a result step, `ServerSession.fetch_result` fetches the result.
        """
        values = self.requests.template_values(run, remote_id or self.given_id_of(run))
        outcome = self.compiled.callback.outcome(push, self.response_context(values))
        return outcome or Outcome(OutcomeKind.PENDING, code=BAD_ANSWER, remote_id=values.remote_id)

    def response_context(self, values: TemplateValues) -> ResponseContext:
        """Return what a response to a request with these values is judged by."""
        assert values.run is not None
        return ResponseContext(values.run.job_id, values.remote_id, self.secrets_to_redact(values.run), time.time())

    def secrets_to_redact(self, run: RunDetails | None) -> tuple[str, ...]:
        """Return the secrets that a response may quote.  A server may also quote those of an earlier request."""
        token = run.callback_token if run is not None else None
        known = (*self._secrets_of_endpoint, token) if token else self._secrets_of_endpoint
        if self._secret is None or not self.description.secrets:
            return known
        return (*filter(None, map(self._secret, sorted(self.description.secrets))), *known)


def _headers_for(run: RunDetails | None, is_submit: bool, *, may_push: bool) -> dict[str, str]:
    """Return the headers of a request that no description has to contain.

    may_push: False for a node, which could push an end that no one has verified.
    """
    headers = dict(_OWN_HEADERS)
    if run is None:
        return headers
    headers |= {"X-Job-Id": run.job_id, "X-Attempt": str(run.attempt)}
    if run.traceparent and _TRACEPARENT.fullmatch(run.traceparent):  # It may be a client's text.
        headers["traceparent"] = run.traceparent
    if run.model:
        headers["X-Model"] = run.model
    if is_submit:
        # All attempts have the same key: a server that keeps its last results by key can respond to a repeated attempt
        # with the result, and does not run the job twice.
        headers |= {"Idempotency-Key": run.job_id, "X-Deadline-Ms": str(run.deadline_ms)}
        if run.callback_url and may_push:
            headers["X-Callback-Url"] = run.callback_url
        if run.callback_token and may_push:
            headers["X-Callback-Token"] = run.callback_token
    return headers
