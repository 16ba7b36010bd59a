"""A line in the log for each job that has ended, whoever ended it.

It is told by maintenance, from the record and some seconds later: workers have better things to do between two jobs.
"""

import structlog

from routing.queries.job_counters import EndedJob
from slotkeeper.trace_context import find_trace

log = structlog.get_logger(__name__)


def log_job_end(ended: EndedJob) -> None:
    """Who, where, how long and why; nothing that a client or a server has sent."""
    entry, event = ended.entry, ended.entry.event
    facts = {"server": entry.server, "run_ms": ended.ran_ms}
    log.info(
        "job_ended",
        job_id=event.job_id,
        tenant=entry.tenant,
        trace_id=find_trace(event.job_id, entry.traceparent).id,
        model=entry.model,
        state=ended.state.value,
        why=event.data.get("why"),
        attempt=event.attempt,
        **{name: value for name, value in facts.items() if value is not None},
    )
