"""What came of one exchange with an inference server: a plain value.

The server adapters produce it, routing.dispatch.decision says what it means for the job and its slot.
"""

from enum import Enum, StrEnum
from typing import Any, NamedTuple

BAD_ANSWER = "bad_answer"
"""Code of an outcome whose answer is whole, and cannot be read or is none that the server's description knows."""
STREAM_UNENDED = "stream_unended"
"""Code of an outcome whose stream the server ended in order, without the end that the server's description names."""

RUN_DIED = "run_died"
"""Code of LOST: the server had the run, and its process ended under it."""


class OutcomeKind(StrEnum):
    """What an exchange can mean for a job."""

    DONE = "done"  # the server has a result
    PENDING = "pending"  # accepted, still running: poll, or wait for the push
    FAILED = "failed"  # the request itself is wrong, or its result cannot be kept: final, no retry
    RETRY = "retry"  # the server answered with an error or nonsense, or took too long: costs one retry
    OVERDUE = "overdue"  # the job's own deadline has passed: it is not tried again
    BUSY = "busy"  # no free slot there: costs nothing
    CANCELED = "canceled"  # the server canceled the job on request
    LOST = "lost"  # the server does not know the job (any more)
    UNKNOWN = "unknown"  # sent, but no answer came: it may be running, the slot must be held
    UNREACHABLE = "unreachable"  # certainly not sent: costs the job nothing, the server a cooldown


class Outcome(NamedTuple):
    """One exchange, judged.  Which fields are set depends on `kind`."""

    kind: OutcomeKind
    result: Any = None  # DONE: the JSON value the server gave
    code: str = ""  # a stable word for programs, e.g. "server_error"
    message: str = ""  # one sentence for people
    remote_id: str | None = None  # PENDING: the server's own id of the job, if it gave one
    retry_after_s: float | None = None  # BUSY, RETRY: the server's wish, in seconds
    progress: Any = None  # PENDING: how far it is, as the server says it
    server_still_running: bool = (
        False  # CANCELED, FAILED, LOST, OVERDUE, RETRY: it ends here, and its server may go on with it all the same
    )
    # DONE: the signed envelope of the result as JSON, if the server's description names its place; once it is
    # verified, a SignedResult.
    envelope: Any = None
    is_faulty_json: bool = False  # PENDING, BAD_ANSWER: the server will answer the same if it is asked again


class StopReason(Enum):
    """Why a worker does not go on with a run that goes on."""

    LOST = "lost"  # Another worker has this job now, or none: what this one did is dropped.
    STOPPED = "stopped"  # This worker is going down; another can go on with the job.
    UNSENT = "unsent"  # The lease was lost before the request was sent.
