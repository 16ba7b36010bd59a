"""A receiver of traces by OTLP over HTTP, which keeps what it is told."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """`status`: what it answers.  `poison`: the id, in hex, of a trace for which it refuses a whole request.

    `goes_on`: until when the end of an answer is waited for.
    """

    def __init__(self) -> None:
        self.status, self.poison = 200, ""
        self.goes_on: threading.Event | None = None
        self.spans: list[Span] = []
        self.asked = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.asked += 1
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(collector.take(self.path, body))
                self.send_header("Content-Length", "0" if collector.goes_on is None else "1")
                self.end_headers()
                if collector.goes_on is not None:
                    self.wfile.flush()
                    collector.goes_on.wait(60)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, path: str, body: bytes) -> int:
        if self.status != 200 or path != "/v1/traces":
            return self.status if self.status != 200 else 404
        told = ExportTraceServiceRequest.FromString(body)
        found = [span for of in told.resource_spans for part in of.scope_spans for span in part.spans]
        if any(span.trace_id.hex() == self.poison for span in found):
            return 400
        self.spans += found
        return 200

    def trace(self, trace_id: str) -> dict[str, Span]:
        """The spans of a trace, by their ids in hex."""
        return {span.span_id.hex(): span for span in self.spans if span.trace_id.hex() == trace_id}


@contextmanager
def collector() -> Iterator[Collector]:
    found = Collector()
    thread = threading.Thread(target=found.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.server.shutdown()
        found.server.server_close()
        thread.join()
