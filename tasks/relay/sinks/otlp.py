"""A sink that exports traces: at the end of a job it sends the job's spans to a collector, by OTLP over HTTP.

The spans are built from the database, so this process stores none.  A job that is exported twice has the same spans.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from routing.queries import trace_spans
from routing.queries.trace_spans import TraceSpan
from slotkeeper.db import Database
from slotkeeper.errors import InvalidSetting
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES
from slotkeeper.outbox import timelines
from slotkeeper.outbox.webhook_messages import DELIVERED_TYPE
from tasks.relay.sinks.sink import PublishedEvent, SinkUnavailable

log = structlog.get_logger(__name__)

# Their sum is below the time that a cursor is held; otherwise two relays would take it from each other forever.
_TIMEOUT_S, _BATCH_LIMIT_S = 4.0, 3.0
_MAX_JOBS = 100  # jobs in one request
_PATH = "/v1/traces"
_END_TYPES = frozenset(EVENT_TYPES[state] for state in FINAL_STATES)
# The spans themselves are wrong.  Other errors, such as a wrong key or path, an operator can fix: those spans wait.
_REFUSED_STATUSES = frozenset({400, 413, 415, 422})
_SCOPE = InstrumentationScope("slotkeeper")
_KINDS = {
    trace_spans.SUBMIT: SpanKind.SERVER,
    trace_spans.EXCHANGE: SpanKind.CLIENT,
    trace_spans.WEBHOOK: SpanKind.CLIENT,
}


class SpansRefused(Exception):
    """The collector will never accept these spans."""


class OtlpSink:
    """Exports the spans of jobs that have ended.  Jobs that are not in the database any more are skipped."""

    retention = 0
    """A new sink exports only jobs that end after it was configured."""

    def __init__(self, database: Database, exporter: SpanExporter) -> None:
        """Create a sink.  `exporter`: may raise SinkUnavailable and SpansRefused."""
        self._database, self._exporter = database, exporter
        self._resource = Resource({"service.name": "slotkeeper"}).merge(OTELResourceDetector().detect())
        self._exported_up_to = 0  # the last event whose spans were exported or skipped

    def resume_after(self, position: int) -> int:
        return max(position, self._exported_up_to)

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        """Export the spans of the job ends and webhook deliveries in a batch.

        A request that the collector refuses is split in halves until the refused job is found; only that one is
        skipped.

        Raises SinkUnavailable, also if the collector is slow: then `resume_after` returns the last exported event.
        Raises DatabaseUnavailable.
        """
        until = time.monotonic() + _BATCH_LIMIT_S
        exported = [event for event in batch if event.type in _END_TYPES or event.type == DELIVERED_TYPE]
        remaining = deque(exported[n : n + _MAX_JOBS] for n in range(0, len(exported), _MAX_JOBS))
        while remaining:
            part = remaining.popleft()
            try:
                self._export(part)
            except SpansRefused as error:
                if len(part) > 1:
                    middle = len(part) // 2
                    remaining.extendleft((part[middle:], part[:middle]))
                    continue
                log.warning("trace_refused", job_id=part[0].key, reason=str(error))
            self._exported_up_to = part[-1].number
            if remaining and time.monotonic() > until:
                raise SinkUnavailable("The receiver of traces is slow.")
        self._exported_up_to = batch[-1].number

    def close(self) -> None:
        self._exporter.shutdown()

    def _export(self, events: Sequence[PublishedEvent]) -> None:
        """Export the spans of these events.  Raises SinkUnavailable, SpansRefused, DatabaseUnavailable."""
        spans = [to_otel_span(span, self._resource) for span in self._read_spans(events)]
        if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise SinkUnavailable("The receiver of traces does not take them.")

    def _read_spans(self, events: Sequence[PublishedEvent]) -> Iterator[TraceSpan]:
        by_job = timelines.read_timelines(self._database, [event.key for event in events])
        for event in events:
            timeline = by_job.get(event.key)
            try:
                if timeline is not None:
                    yield from (
                        trace_spans.job_spans(timeline)
                        if event.type in _END_TYPES
                        else trace_spans.webhook_spans(timeline)
                    )
            except Exception:  # A job with invalid events in the database must not block the other jobs.
                log.exception("trace_not_made", job_id=event.key)


class _Session(requests.Session):
    """A session that reads only status and headers: a body that arrives slowly would block the relay."""

    was_sent = False
    """Whether a request was sent."""
    status: int | None = None
    """The status of the last response; None: there was none."""

    def request(self, *args: Any, **options: Any) -> requests.Response:
        self.was_sent = True
        response = super().request(*args, **{**options, "stream": True})
        self.status = response.status_code
        response.close()
        return response


class OtlpExporter(SpanExporter):
    """Exports spans by OTLP over HTTP.  OpenTelemetry's environment variables set headers and certificates."""

    def __init__(self, endpoint: str) -> None:
        """Create an exporter.  `endpoint`: such as http://host:4318.  Raises InvalidSetting for another form."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidSetting("SLOTKEEPER_EVENTS_OTLP_ENDPOINT must be an address such as http://host:4318.")
        self._session = _Session()
        url = f"{endpoint.rstrip('/').removesuffix(_PATH)}{_PATH}"
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=_TIMEOUT_S, session=self._session)
        # The library would log each failed attempt; the relay logs the first one.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans.  Raises SinkUnavailable, SpansRefused."""
        self._session.was_sent, self._session.status = False, None
        result = self._exporter.export(spans)
        status = self._session.status
        if not self._session.was_sent:
            raise SpansRefused("The spans cannot be sent: they are too large, or cannot be written.")
        if status is None:
            raise SinkUnavailable("The receiver of traces does not answer.")
        if status in _REFUSED_STATUSES:
            raise SpansRefused(f"The receiver of traces answered {status}.")
        if status >= 300:  # The library does not follow redirects, and would report one as a success.
            raise SinkUnavailable(f"The receiver of traces answered {status}.")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def to_otel_span(span: TraceSpan, resource: Resource) -> ReadableSpan:
    """Return a span as an OpenTelemetry span."""
    kind = _KINDS.get(span.name, SpanKind.INTERNAL)
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace, span.id),
        parent=_context(span.trace, span.parent, is_remote=True) if span.parent else None,
        resource=resource,
        attributes={f"slotkeeper.{name}": value for name, value in span.facts.items() if value is not None},
        kind=kind,
        status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
        start_time=span.start_ms * 1_000_000,
        end_time=span.end_ms * 1_000_000,
        instrumentation_scope=_SCOPE,
    )


def _context(trace: str, span: str, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))
