"""The trace context of a job, which its inference server and the receivers of its webhooks get."""

from slotkeeper.errors import InvalidSetting
from slotkeeper.process import singleton
from slotkeeper.trace_context import make_traceparent
from tasks.config import EventSettings


@singleton
def exports_spans() -> bool:
    """Return whether this installation exports its own spans.

    Invalid settings count as no: the relay refuses them, and they must not end a run.
    """
    try:
        return "otlp" in EventSettings().sinks
    except InvalidSetting:
        return False


def outgoing_traceparent(job_id: str, traceparent: str | None, kind: str, attempt: int = 0) -> str | None:
    """Return the traceparent to send with a request; None: the client sent none, and no spans are exported."""
    return make_traceparent(job_id, traceparent, kind, attempt) if traceparent is not None or exports_spans() else None
