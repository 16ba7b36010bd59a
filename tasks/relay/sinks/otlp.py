"""Traces as a sink of events: at a job's end all its spans are told to a receiver of OTLP over HTTP.

The spans are made from the record, so nothing is kept here; a job that is told twice has the same spans.
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
from slotkeeper.jobs.events import EVENT_TYPES
from slotkeeper.jobs.states import FINAL_STATES
from slotkeeper.outbox import timelines
from slotkeeper.outbox.webhook_messages import DELIVERED_TYPE
from tasks.relay.sinks.sink import PublishedEvent, SinkUnavailable

log = structlog.get_logger(__name__)

# Together shorter than a cursor is held, or two relays would take it from each other for ever.
_TIMEOUT_S, _BATCH_LIMIT_S = 4.0, 3.0
_MAX_JOBS = 100  # jobs in one request
_PATH = "/v1/traces"
_END_TYPES = frozenset(EVENT_TYPES[state] for state in FINAL_STATES)
# What is wrong with the spans themselves.  That the key or the path is wrong, a person can mend: these wait.
_REFUSED_STATUSES = frozenset({400, 413, 415, 422})
_SCOPE = InstrumentationScope("slotkeeper")
_KINDS = {
    trace_spans.SUBMIT: SpanKind.SERVER,
    trace_spans.EXCHANGE: SpanKind.CLIENT,
    trace_spans.WEBHOOK: SpanKind.CLIENT,
}


class SpansRefused(Exception):
    """The receiver will never take these spans."""


class OtlpSink:
    """Tells the spans of jobs that have ended.  Jobs that are no longer in the record are passed over."""

    retention = 0
    """Who begins to look at traces looks at those to come."""

    def __init__(self, database: Database, exporter: SpanExporter) -> None:
        """`exporter`: may raise SinkUnavailable and Refused."""
        self._database, self._exporter = database, exporter
        self._resource = Resource({"service.name": "slotkeeper"}).merge(OTELResourceDetector().detect())
        self._exported_up_to = 0  # up to this event

    def resume_after(self, position: int) -> int:
        return max(position, self._exported_up_to)

    def publish(self, batch: Sequence[PublishedEvent]) -> None:
        """A slow receiver gets some, and the rest when it is asked again; of what it refuses the jobs are found."""
        until = time.monotonic() + _BATCH_LIMIT_S
        exported = [event for event in batch if event.type in _END_TYPES or event.type == DELIVERED_TYPE]
        waiting = deque(exported[n : n + _MAX_JOBS] for n in range(0, len(exported), _MAX_JOBS))
        while waiting:
            part = waiting.popleft()
            try:
                self._export(part)
            except SpansRefused as refused:
                if len(part) > 1:
                    middle = len(part) // 2
                    waiting.extendleft((part[middle:], part[:middle]))
                    continue
                log.warning("trace_refused", job_id=part[0].key, reason=str(refused))
            self._exported_up_to = part[-1].number
            if waiting and time.monotonic() > until:
                raise SinkUnavailable("The receiver of traces is slow.")
        self._exported_up_to = batch[-1].number

    def close(self) -> None:
        self._exporter.shutdown()

    def _export(self, events: Sequence[PublishedEvent]) -> None:
        """Raises SinkUnavailable, Refused, DatabaseUnavailable."""
        found = [to_otel_span(span, self._resource) for span in self._read_spans(events)]
        if found and self._exporter.export(found) is not SpanExportResult.SUCCESS:
            raise SinkUnavailable("The receiver of traces does not take them.")

    def _read_spans(self, events: Sequence[PublishedEvent]) -> Iterator[TraceSpan]:
        known = timelines.read_timelines(self._database, [event.key for event in events])
        for event in events:
            timeline = known.get(event.key)
            try:
                if timeline is not None:
                    yield from (
                        trace_spans.job_spans(timeline)
                        if event.type in _END_TYPES
                        else trace_spans.webhook_spans(timeline)
                    )
            except Exception:  # Whatever is wrong with it in the record, the others are told.
                log.exception("trace_not_made", job_id=event.key)


class _Session(requests.Session):
    """Hears how an answer begins, and nothing behind that: what comes drop by drop would hold up the relay."""

    was_sent = False
    status: int | None = None
    """Of the last answer."""

    def request(self, *args: Any, **options: Any) -> requests.Response:
        self.was_sent = True
        response = super().request(*args, **{**options, "stream": True})
        self.status = response.status_code
        response.close()
        return response


class OtlpExporter(SpanExporter):
    """A receiver of OTLP over HTTP.  Headers and certificates are those of OpenTelemetry's own variables."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: http://host:4318.  Raises ValueError: it is no such address."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("SLOTKEEPER_EVENTS_OTLP_ENDPOINT must be an address such as http://host:4318")
        self._session = _Session()
        url = f"{endpoint.rstrip('/').removesuffix(_PATH)}{_PATH}"
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=_TIMEOUT_S, session=self._session)
        # It would say at each try what the relay says once.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Raises SinkUnavailable, Refused."""
        self._session.was_sent, self._session.status = False, None
        result = self._exporter.export(spans)
        status = self._session.status
        if not self._session.was_sent:
            raise SpansRefused("The spans cannot be sent: they are too large, or cannot be written.")
        if status is None:
            raise SinkUnavailable("The receiver of traces does not answer.")
        if status in _REFUSED_STATUSES:
            raise SpansRefused(f"The receiver of traces answered {status}.")
        if status >= 300:  # A redirect, which is not followed, would pass for a success.
            raise SinkUnavailable(f"The receiver of traces answered {status}.")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def to_otel_span(span: TraceSpan, resource: Resource) -> ReadableSpan:
    """A span as OpenTelemetry has it."""
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
