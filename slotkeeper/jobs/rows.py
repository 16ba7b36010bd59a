"""Make jobs and runs of rows of the database."""

from typing import Any, TypeAlias

from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.values import Job, JobStatus, QueuedJob, Run, stored_error

Row: TypeAlias = Any
"""A row with the columns that its statement names."""


def queued_job_from_row(row: Row) -> QueuedJob:
    return QueuedJob(
        row.id,
        row.seq,
        row.model,
        row.priority,
        row.tenant,
        row.created_ms,
        row.constraints,
        row.deadline_ms or 0,
    )


def job_status_from_row(row: Row) -> JobStatus:
    return JobStatus(
        queued_job_from_row(row),
        State(row.state),
        row.attempt,
        row.lease,
        row.slot,
        row.cancel_requested_ms is not None,
    )


def run_from_row(row: Row, server: str, slot: str) -> Run:
    return Run(
        job=queued_job_from_row(row),
        payload=row.payload,
        attempt=row.attempt,
        failures=row.failures,
        crashes=row.crashes,
        deadline_ms=row.deadline_ms,
        remote_id=row.remote_id,
        sent_ms=row.sent_ms,
        server=server,
        slot=slot,
        started_ms=row.started_ms,
        cancel_requested=row.cancel_requested_ms is not None,
        envelope=row.envelope,
        described_by=row.described_by,
        sent_to=row.sent_to,
        traceparent=row.traceparent,
        terms=row.terms,
        last_error=stored_error(row.error_code, row.error_message),
    )


def job_from_row(row: Row) -> Job:
    """Return the job of a row, which may lack the columns that have a default."""
    found = row._asdict()
    return Job(
        **{name: found[name] for name in Job.__dataclass_fields__ if name in found and name not in {"state", "why"}},
        state=State(row.state),
        why=Reason(row.why),
    )
