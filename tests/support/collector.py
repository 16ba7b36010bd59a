"""A collector of traces by OTLP over HTTP, which keeps the spans that it receives."""

import socket
import threading

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.scripted import Act, Scripted, Seen, answer, hang_up


class Collector(Scripted):
    """`status`: of its responses.  `poison`: the id, in hex, of a trace for which it refuses a whole request.

    `goes_on`: the event after which it sends the end of a response; None: at once.
    """

    def __init__(self) -> None:
        super().__init__(self._says)
        self.status, self.poison = 200, ""
        self.goes_on: threading.Event | None = None
        self.spans: list[Span] = []

    def _says(self, seen: Seen) -> Act:
        response, goes_on = answer(b"", self._take(seen.path, seen.body)), self.goes_on
        if goes_on is None:
            return response

        def half(sock: socket.socket) -> None:
            sock.sendall(response.replace(b"Content-Length: 0", b"Content-Length: 1"))
            goes_on.wait(60)
            hang_up(sock)

        return half

    def _take(self, path: str, body: bytes) -> int:
        if self.status != 200 or path != "/v1/traces":
            return self.status if self.status != 200 else 404
        request = ExportTraceServiceRequest.FromString(body)
        found = [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]
        if any(span.trace_id.hex() == self.poison for span in found):
            return 400
        self.spans += found
        return 200

    def trace(self, trace_id: str) -> dict[str, Span]:
        """Return the spans of a trace, by their ids in hex."""
        return {span.span_id.hex(): span for span in self.spans if span.trace_id.hex() == trace_id}
