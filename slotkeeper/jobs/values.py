"""Frozen values of jobs, as they are written to the database and read from it.

Times are integers, milliseconds since the epoch, UTC; their names end in `_ms`.
"""

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import uuid_utils

from slotkeeper.clock import clock
from slotkeeper.jobs.states import Reason, State

PRIORITY_MOST_URGENT, PRIORITY_DEFAULT, PRIORITY_LEAST_URGENT = 1, 5, 9


ENVIRONMENT, PRODUCTION = "environment", "production"
"""The condition of a job, and attribute of a server, that keeps jobs apart; and what counts where neither says any."""


def without_environment(constraints: str) -> str:
    """Return constraints without the line of an environment, which may be the default of the job's tenant."""
    return "\n".join(line for line in constraints.splitlines() if not line.startswith(f"{ENVIRONMENT}="))


def new_job_id() -> str:
    """Return a UUIDv7: unique, and roughly sorted by time, which keeps the index of ids dense."""
    return str(uuid_utils.uuid7())


_SAME_REQUEST = {"same_request": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What was submitted, as it is stored: each field is a column of the table `jobs`.

    The fields with `same_request` make a request the same when its id is used again.  Times are not among them: they
    are counted from the request, which may be repeated much later.
    """

    model: str = field(metadata=_SAME_REQUEST)
    priority: int = PRIORITY_DEFAULT
    tenant: str = field(default="default", metadata=_SAME_REQUEST)
    callback_url: str | None = field(default=None, metadata=_SAME_REQUEST)
    deadline_ms: int | None = None
    given_times: str | None = (
        None  # which of "not_before" and "deadline" the client gave as a time; the others: seconds
    )
    source: str = "rest"
    envelope: str | None = None  # JSON: Celery's links, chord and chain, which continue after the job's end
    constraints: str = field(default="", metadata=_SAME_REQUEST)  # in routing's canonical text; empty: any server
    labels: str = field(default="", metadata=_SAME_REQUEST)  # in routing's canonical text
    traceparent: str | None = None  # of the client's trace
    batch: str | None = None  # name of the batch; None: it was submitted alone
    terms: str | None = field(default=None, metadata=_SAME_REQUEST)  # JSON, see terms.py; None: it has none
    reserved: int | None = None  # micro-credits held for it, below 0 when it has ended; None: it costs nothing
    price: int | None = None  # micro-credits a second of its slot


SPEC_FIELDS = tuple(spec_field.name for spec_field in fields(JobSpec))
SAME_REQUEST_FIELDS = tuple(
    spec_field.name for spec_field in fields(JobSpec) if spec_field.metadata.get("same_request")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob(JobSpec):
    """A valid job that has not been accepted yet."""

    id: str
    payload: str  # compact JSON
    not_before_ms: int | None = None
    idempotency_key: str | None = None
    fingerprint: str = ""  # hash of the request, compared when the key is used again
    is_held: bool = False  # It waits until its batch releases it.


@dataclass(frozen=True, slots=True)
class AcceptedJob:
    """A job after the commit of its submit.

    deduplicated: it had been accepted before.  is_overdue: its deadline has passed, so that it only waits to expire.
    """

    id: str
    seq: int
    state: State
    deduplicated: bool = False
    is_overdue: bool = False

    @property
    def enters_queue(self) -> bool:
        """Whether the job is enqueued now."""
        return self.state is State.QUEUED and not self.deduplicated and not self.is_overdue


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """The fields of a queued job that the queue in Redis uses."""

    id: str
    seq: int
    model: str
    priority: int
    tenant: str
    created_ms: int = 0
    constraints: str = ""
    deadline_ms: int = 0  # 0: none


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a run did not succeed: a stable code and a sentence."""

    code: str
    message: str


def stored_error(code: str | None, message: str | None) -> JobError | None:
    """Return the error of two columns of a job, or None."""
    return None if code is None else JobError(code, message or "")


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The quarantine of a run's slot after the run's end.

    until_ms: its latest end.  resumes: if the job is queued to be resumed in that slot, the job keeps the slot instead.
    """

    reason: str
    until_ms: int
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A job that was just started, with everything that its worker needs.

    attempt: the fencing token, which guards all writes of this run (LEASE-3).
    remote_id: set if an earlier worker has sent the job to this server: the run is resumed, not repeated.
    """

    job: QueuedJob
    payload: str
    attempt: int
    failures: int
    crashes: int
    deadline_ms: int | None
    remote_id: str | None
    sent_ms: int | None  # when the server assigned `remote_id`
    server: str
    slot: str
    started_ms: int
    cancel_requested: bool
    envelope: str | None = None
    described_by: str | None = None  # how its server is called; None: by the slot protocol
    traceparent: str | None = None
    sent_to: str | None = None  # its server's address when it began; None: unknown
    terms: str | None = None  # as of its job
    last_error: JobError | None = None  # of the run before; None: this is the first, or the job was revived
    clock_offset_ms: int | None = field(default_factory=lambda: clock.offset_ms, compare=False)  # of its times

    def is_overdue(self, now_ms: int) -> bool:
        """Return whether its deadline has passed; of a run under which the clock was set, the database knows."""
        if self.deadline_ms is None or clock.moved_since(self.clock_offset_ms):
            return False
        return now_ms >= self.deadline_ms


class SignedResult(NamedTuple):
    """The verified envelope of a result, as JSON, and the node and key that signed it."""

    node: str
    key_id: str
    envelope: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(JobSpec):
    """One row of the table.  payload, result: JSON texts; None: not loaded, or none."""

    id: str
    seq: int
    state: State
    why: Reason
    attempt: int
    waits: int
    failures: int
    crashes: int
    created_ms: int
    started_ms: int | None
    finished_ms: int | None
    due_ms: int | None
    server: str | None
    slot: str | None
    lease: str | None
    remote_id: str | None
    sent_ms: int | None  # of its run
    cancel_requested_ms: int | None
    error_code: str | None
    error_message: str | None
    payload: str | None = None
    result: str | None = None
    described_by: str | None = None  # of its run
    sent_to: str | None = None  # of its run

    @property
    def error(self) -> JobError | None:
        """Why the last run did not succeed."""
        return stored_error(self.error_code, self.error_message)

    @property
    def queued(self) -> QueuedJob:
        """The fields that the queue in Redis uses."""
        return QueuedJob(
            self.id,
            self.seq,
            self.model,
            self.priority,
            self.tenant,
            self.created_ms,
            self.constraints,
            self.deadline_ms or 0,
        )

    @property
    def awaits_earlier_request(self) -> bool:
        """Whether a running job is not sent again yet: its server may be running an earlier attempt's request."""
        return self.remote_id is None and self.sent_ms is not None and self.sent_ms < (self.started_ms or 0)

    @property
    def requested_ms(self) -> int | None:
        """When the request of its run was sent, at the earliest: at the start, or when it was sent again."""
        return None if self.started_ms is None else max(self.started_ms, self.sent_ms or 0)

    @property
    def attempts(self) -> int:
        """Number of runs that a server accepted; starts that met a busy or unreachable server do not count."""
        return self.attempt - self.waits


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job, without payload and result.

    lease: of a running job, name and owner of its lease.  slot: of a queued job, the slot in which it is resumed.
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
