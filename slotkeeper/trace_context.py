"""The W3C trace of a job, and the ids of its spans.

    traceparent: 00-<trace: 32 hex>-<span: 16 hex>-<flags: 2 hex>

Ids of spans are computed from the job's id and the traceparent of its submit, so processes pass nothing on.  A run that
is retried, resumed by another worker, or ended by maintenance is in the job's trace.
"""

import os
import re
import sys
from hashlib import blake2b
from typing import NamedTuple

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
_FORBIDDEN_VERSION = "ff"
_SAMPLED, _KNOWN_FLAGS = 0x01, 0x03


class Trace(NamedTuple):
    """parent: the span of the submit; "": none.  sampled: the trace is recorded."""

    id: str
    parent: str
    flags: int

    @property
    def sampled(self) -> bool:
        return bool(self.flags & _SAMPLED)


def parse_traceparent(given: str | None) -> str | None:
    """Return a traceparent in its stored form, or None if there is none or the standard says to ignore it."""
    found = _FORM.fullmatch(given or "")
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == _FORBIDDEN_VERSION or not int(trace, 16) or not int(span, 16):
        return None
    if version == "00" and more is not None:  # Only later versions may have more fields.
        return None
    return f"00-{trace}-{span}-{int(flags, 16) & _KNOWN_FLAGS:02x}"


def get_process_traceparent() -> str | None:
    """Return the traceparent in which this process was started, from its environment."""
    return os.environ.get("TRACEPARENT")


def get_current_traceparent() -> str | None:
    """Return OpenTelemetry's current span of this thread or task, where the process uses OpenTelemetry."""
    opentelemetry = sys.modules.get("opentelemetry.trace")
    if opentelemetry is None:
        return None
    span = opentelemetry.get_current_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" if span.is_valid else None


def find_trace(job_id: str, given: str | None) -> Trace:
    """Return the trace of a job.  given: the traceparent that is stored with it; an invalid one is ignored."""
    found = parse_traceparent(given)
    if found is None:
        return Trace(_named(16, job_id), "", _SAMPLED)
    _, trace, parent, flags = found.split("-")
    return Trace(trace, parent, int(flags, 16))


def find_trace_id(job_id: str, given: str | None) -> str:
    return find_trace(job_id, given).id


def make_span_id(job_id: str, kind: str, attempt: int = 0) -> str:
    """Return the id of one span of a job."""
    return _named(8, f"{job_id}/{kind}/{attempt}")


def make_traceparent(job_id: str, given: str | None, kind: str, attempt: int = 0) -> str:
    """Return the traceparent for work under this span of the job."""
    trace = find_trace(job_id, given)
    return f"00-{trace.id}-{make_span_id(job_id, kind, attempt)}-{trace.flags:02x}"


def _named(size: int, text: str) -> str:
    return blake2b(text.encode(errors="replace"), digest_size=size).hexdigest()
