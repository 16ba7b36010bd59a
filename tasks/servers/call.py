"""What goes into an exchange with an inference server, and what its health check says."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

MAX_DEADLINE_S = 7 * 86_400.0  # sockets take no endless time-outs


class Call(NamedTuple):
    """One attempt of one job, as far as a server needs to know of it."""

    job_id: str
    attempt: int  # counted from 1
    payload: Any  # a JSON value; where nobody looks into it also an orjson.Fragment
    callback_url: str | None = None  # where the server may push its answer; ours, never the client's
    callback_token: str | None = None  # the secret that such a push must show
    traceparent: str | None = None  # W3C trace context
    deadline_s: float = 600.0  # seconds for one exchange in total, however it trickles
    listen_s: float = 0.0  # for how long the end of a submit is observed that was given up
    model: str = ""
    model_version: str = ""  # as the server was registered for it
    swap: bool = True  # the server's last job was of another model, or is not known

    @property
    def whole_deadline_s(self) -> int:
        """For a server that counts in seconds; at least 1, and else no later than ours."""
        return max(self.deadline_ms // 1000, 1)

    @property
    def deadline_ms(self) -> int:
        """At least 1."""
        return max(int(min(self.deadline_s, MAX_DEADLINE_S) * 1000), 1)

    @property
    def attempt_id(self) -> str:
        """Names this attempt among all attempts of all jobs."""
        return f"{self.job_id}-{self.attempt}"


class Limits(NamedTuple):
    """Bounds of one HTTP exchange."""

    connect_s: float
    read_s: float  # between two pieces of the answer; may be infinite
    deadline: float  # time.monotonic() at which it all ends
    max_bytes: int  # of the answer's body
    listen_s: float = 0.0  # for how long the end of an exchange is observed that is given up


class HealthKind(StrEnum):
    """What a health check can tell."""

    UP = "up"  # it answers, and as described
    BUSY = "busy"  # it is there but too occupied (or still loading) to say more: not dead
    DOWN = "down"  # it does not answer, or its answer says that it cannot run jobs
    FOREIGN = "foreign"  # something answers that does not know this health path
    GARBAGE = "garbage"  # it answers, but nothing that can be understood
    UNKNOWN = "unknown"  # its description has no health check


@dataclass(frozen=True, slots=True)
class Health:
    """A server's own report.  None means "it did not say", which is not zero."""

    kind: HealthKind
    active_jobs: int | None = None
    job_ids: frozenset[str] | None = None
    running_count: bool = False  # True: active_jobs counts running jobs, not waiting ones too
    is_idle: bool = False  # a place is free there; of a server with one slot: nothing runs there
    started: str | None = None  # another value: another process
    idempotent: bool = False  # a repeated request joins its run
    message: str = ""  # what it says of what is wrong; why it did not answer
    answered: bool = True  # False: no answer came, or not in time

    @property
    def is_silent(self) -> bool:
        """Whether it accepted the connection, and did not answer in time."""
        return self.kind is HealthKind.BUSY and not self.answered
