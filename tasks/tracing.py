"""The trace of a job, told to those who go on with it: its server, and the receiver of its webhook."""

from slotkeeper.process import singleton
from slotkeeper.trace_context import make_traceparent
from tasks.config import EventSettings


@singleton
def exports_spans() -> bool:
    """Whether this installation tells its own spans.

    Settings that are wrong are for the relay to refuse, and end no run.
    """
    try:
        return "otlp" in EventSettings().sinks
    except ValueError:
        return False


def outgoing_traceparent(job_id: str, traceparent: str | None, kind: str, attempt: int = 0) -> str | None:
    """The traceparent below which others go on; None: neither the client nor we want to see a trace."""
    return make_traceparent(job_id, traceparent, kind, attempt) if traceparent is not None or exports_spans() else None
