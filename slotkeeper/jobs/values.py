"""Frozen values handed around: what goes into the record and what comes out.

Times are integers, milliseconds since the epoch, UTC; their names end in `_ms`.
"""

from dataclasses import dataclass, field
from typing import Any

import uuid_utils

from slotkeeper.jobs.states import Reason, State

PRIORITY_MOST_URGENT, PRIORITY_DEFAULT, PRIORITY_LEAST_URGENT = 1, 5, 9


def new_job_id() -> str:
    """A UUIDv7: unique, and close to sorted by time, which keeps the index of ids dense."""
    return str(uuid_utils.uuid7())


@dataclass(frozen=True, slots=True)
class NewJob:
    """A valid job that has not been accepted yet."""

    id: str
    model: str
    payload: str  # compact JSON
    priority: int = PRIORITY_DEFAULT
    tenant: str = "default"
    callback_url: str | None = None
    not_before_ms: int | None = None
    deadline_ms: int | None = None
    idempotency_key: str | None = None
    fingerprint: str = ""  # hash of the request, compared when the key is used again
    source: str = "rest"
    envelope: str | None = None  # JSON: whom its end concerns outside (Celery's links, chord, chain)
    constraints: str = ""  # in routing's canonical text; empty: any server will do
    traceparent: str | None = None  # checked; None: it came in nobody's trace
    batch: str | None = None  # what it came in; None: it came alone


@dataclass(frozen=True, slots=True)
class AcceptedJob:
    """Answer to a submit, once committed.

    `deduplicated`: the job had been accepted before.  `is_overdue`: its deadline had passed: it only waits to expire.
    """

    id: str
    seq: int
    state: State
    deduplicated: bool = False
    is_overdue: bool = False

    @property
    def enters_queue(self) -> bool:
        """Whether the job is put into its queue now."""
        return self.state is State.QUEUED and not self.deduplicated and not self.is_overdue


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """What the waiting room must know of a queued job."""

    id: str
    seq: int
    model: str
    priority: int
    tenant: str
    created_ms: int = 0
    constraints: str = ""


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a run did not succeed: a stable word and a sentence."""

    code: str
    message: str


def stored_error(code: str | None, message: str | None) -> JobError | None:
    """Return the error that two columns of a job hold; None: there is none."""
    return None if code is None else JobError(code, message or "")


@dataclass(frozen=True, slots=True)
class Quarantine:
    """That a run's slot is to be withheld when the run ends.

    `until_ms`: the longest.  `resumes`: not if its job goes back to be resumed in that very slot.
    """

    reason: str
    until_ms: int
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A job that has just been started: everything its worker needs.

    `attempt` is the fencing token: whatever is written about this run is written under it (LEASE-3).
    `remote_id` is set when an earlier worker had already handed the job to this server: resume, do not rerun.
    """

    job: QueuedJob
    payload: str
    attempt: int
    failures: int
    crashes: int
    deadline_ms: int | None
    remote_id: str | None
    sent_ms: int | None  # when the server took up `remote_id`
    server: str
    slot: str
    started_ms: int
    cancel_requested: bool
    envelope: str | None = None
    described_by: str | None = None  # how its server is spoken to; None: by the slot protocol
    traceparent: str | None = None
    sent_to: str | None = None  # its server's address when it began; None: not known
    last_error: JobError | None = None  # of the run before; None: it is the first, or the job was revived


@dataclass(frozen=True, slots=True)
class Job:
    """One row of the record, as it stands.  `payload` and `result` are JSON texts; None: not loaded or none."""

    id: str
    seq: int
    model: str
    state: State
    why: Reason
    priority: int
    tenant: str
    attempt: int
    waits: int
    failures: int
    crashes: int
    created_ms: int
    started_ms: int | None
    finished_ms: int | None
    due_ms: int | None
    deadline_ms: int | None
    server: str | None
    slot: str | None
    lease: str | None
    remote_id: str | None
    sent_ms: int | None  # as of its run
    cancel_requested_ms: int | None
    callback_url: str | None
    source: str
    error_code: str | None
    error_message: str | None
    envelope: str | None = None
    payload: str | None = None
    result: str | None = None
    constraints: str = ""
    described_by: str | None = None  # as of its run
    sent_to: str | None = None  # as of its run
    traceparent: str | None = None
    batch: str | None = None

    @property
    def error(self) -> JobError | None:
        """Why its last run did not succeed."""
        return stored_error(self.error_code, self.error_message)

    @property
    def queued(self) -> QueuedJob:
        """The part of it that the waiting room must know."""
        return QueuedJob(self.id, self.seq, self.model, self.priority, self.tenant, self.created_ms, self.constraints)

    @property
    def attempts(self) -> int:
        """Runs that a server really took up; starts that met a busy or absent server do not count."""
        return self.attempt - self.waits


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Where a job stands, without what it carries.

    `lease`: of a running one, the name and owner of its lease.  `slot`: of a queued one, where it is to be resumed.
    """

    job: QueuedJob
    state: State
    attempt: int
    lease: str | None
    slot: str | None
    cancel_requested: bool


@dataclass(frozen=True, slots=True)
class Event:
    """One transition, written in its transaction (JOB-2)."""

    id: int
    job_id: str
    type: str
    at_ms: int
    attempt: int
    data: dict[str, Any] = field(default_factory=dict)
