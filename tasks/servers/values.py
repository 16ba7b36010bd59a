"""The data of one run that requests contain, the limits of an exchange, and the report of a health check."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

MAX_DEADLINE_S = 7 * 86_400.0  # sockets accept no infinite time-out


class RunDetails(NamedTuple):
    """One attempt of one job: all values that a request to a server can contain."""

    job_id: str
    attempt: int  # counted from 1
    payload: Any  # a JSON value, or an orjson.Fragment if no template reads it
    callback_url: str | None = None  # the dispatcher's address for a push of the result; never the client's
    callback_token: str | None = None  # the secret that such a push must contain
    traceparent: str | None = None  # W3C trace context
    deadline_s: float = 600.0  # seconds for one exchange in total, also for a slow response
    listen_s: float = 0.0  # seconds for which an abandoned submit is still observed
    model: str = ""
    model_version: str = ""  # with which the server was registered for the model
    expected_output: int | None = None  # the job's own word for the size of its result
    swap: bool = True  # whether the server has to change its model; true also if that is unknown

    @property
    def whole_deadline_s(self) -> int:
        """Return the deadline in whole seconds: at least 1, otherwise rounded down."""
        return max(self.deadline_ms // 1000, 1)

    @property
    def deadline_ms(self) -> int:
        """Return the deadline in milliseconds: at least 1."""
        return max(int(min(self.deadline_s, MAX_DEADLINE_S) * 1000), 1)

    @property
    def attempt_id(self) -> str:
        """Return an id of this attempt that is unique among all jobs."""
        return f"{self.job_id}-{self.attempt}"


class Limits(NamedTuple):
    """Bounds of one HTTP exchange."""

    connect_s: float
    read_s: float  # seconds between two pieces of the response; may be infinite
    deadline: float  # time.monotonic() at which the exchange ends
    max_bytes: int  # of the response's body
    listen_s: float = 0.0  # seconds for which an abandoned exchange is still observed


class HealthKind(StrEnum):
    """The possible verdicts of a health check."""

    UP = "up"  # the server responds as described
    BUSY = "busy"  # the server runs, but is too busy to report more, or still loads its model
    DOWN = "down"  # the server does not respond, or responds that it cannot run jobs
    FOREIGN = "foreign"  # another program responds, which does not have this health path
    GARBAGE = "garbage"  # the response is not as described
    UNKNOWN = "unknown"  # the description has no health check


@dataclass(frozen=True, slots=True)
class Health:
    """The report of a server.  None: the server did not report the value, which is not zero."""

    kind: HealthKind
    active_jobs: int | None = None
    job_ids: frozenset[str] | None = None
    running_count: bool = False  # True: active_jobs includes all running jobs
    is_idle: bool = False  # the server has a free place; on a server with one slot: nothing runs
    started: str | None = None  # a different value means another process
    idempotent: bool = False  # a repeated request joins its run
    message: str = ""  # what is wrong by its own report, or why it did not respond
    answered: bool = True  # False: no response was received in time

    @property
    def is_silent(self) -> bool:
        """Return whether the server accepted the connection, and did not respond in time."""
        return self.kind is HealthKind.BUSY and not self.answered
