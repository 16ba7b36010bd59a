"""What is asked of the waiting room before a job comes in, and where one stands that has.

Commands, so that one round trip answers all that gates ask at once (`Queues.run_all`).  Redis errors pass through.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from routing.queue import lanes
from routing.queue.queues import Offer, OfferTerms, QueueEntry, Queues
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.redis.scripts import Command


@dataclass(frozen=True, slots=True)
class Position:
    """`ahead`: jobs of its model that come before it.  `run_ms`: mean slot time of the model's runs; None: unknown.

    `offered`: it waits no more, a slot is held for it.
    """

    ahead: int
    run_ms: int | None
    offered: bool = False

    def estimated_wait_ms(self, slots: int) -> int | None:
        """Return (jobs ahead + 1) × mean slot time / slots; None: no run was measured, or there is no slot."""
        if self.run_ms is None or slots <= 0:
            return None
        return round((self.ahead + 1) * self.run_ms / slots)


OFFERED = Position(0, None, offered=True)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Jobs that wait for a model: of one tenant, and of all.

    `run_ms`: mean slot time of its latest runs; None: unknown.  `free`: slots of its fleet that hold nothing.
    """

    own: int
    everyones: int
    run_ms: int | None
    free: int


class JobStatus(NamedTuple):
    """What stands between a job and its start, as lua/queue_status.lua says it."""

    place: Literal["waiting", "offered", "absent"]
    ahead: int
    run_ms: int | None
    obstacle: str
    held: int
    state: str
    breaker: Literal["closed", "open", "half_open", "probing"]
    open_until_ms: int
    open_why: str
    before: list[str]

    @property
    def position(self) -> Position | None:
        """None: it is not in the room."""
        if self.place == "offered":
            return OFFERED
        return Position(self.ahead, self.run_ms) if self.place == "waiting" else None


class ConstraintCounts(NamedTuple):
    """How many different constraints wait: of one tenant, of all."""

    own: int
    everyones: int


class _Entered(NamedTuple):
    offers: list[Offer]
    ahead: int | None
    run_ms: int | None


class QuestionScripts(Protocol):
    """What lua/ asks: a script each."""

    def enter(self, fleet: str, *, offering: OfferTerms, entry: QueueEntry) -> Command[_Entered]: ...
    def queue_status(self, fleet: str, *, job: QueuedJob, lane: str, as_last: bool) -> Command[JobStatus]: ...
    def admit(self, key: str, *, count: int, interval_ms: float, burst: int) -> Command[int]: ...
    def backlog(self, fleet: str, *, account: str) -> Command[ModelStatus]: ...
    def variety(self, fleet: str, *, account: str, classes: Sequence[str]) -> Command[ConstraintCounts]: ...


def _scripts(queues: Queues) -> QuestionScripts:
    found: QuestionScripts = queues.scripts.bind(QuestionScripts)
    return found


def model_status_command(queues: Queues, fleet: str, model: str, tenant: str) -> Command[ModelStatus]:
    """What waits for a model, of one tenant and of all."""
    return _scripts(queues).backlog(fleet, account=lanes.account_name(tenant, model))


def count_constraints_command(
    queues: Queues, fleet: str, model: str, tenant: str, constraints: Iterable[str]
) -> Command[ConstraintCounts]:
    """How many different constraints would wait if jobs with these came in."""
    classes = sorted({class_name(model, one) for one in constraints})
    return _scripts(queues).variety(fleet, account=lanes.account_name(tenant, model), classes=classes)


def class_name(model: str, constraints: str) -> str:
    """`<digest of the constraints>|<model>`, as the scripts know jobs that the same servers can run."""
    return f"{lanes.constraints_digest(constraints)}|{model}"


def rate_limit_command(queues: Queues, tenant: str, count: int, interval_ms: float, burst: int) -> Command[int]:
    """To count a tenant's submits; the answer is in how many ms they would be admitted, 0: they are."""
    key = queues.scripts.keys.rate(tenant)
    return _scripts(queues).admit(key, count=count, interval_ms=interval_ms, burst=burst)


def job_status_command(queues: Queues, fleet: str, job: QueuedJob, *, as_last: bool = False) -> Command[JobStatus]:
    """What a job waits for, or, `as_last`, would wait for if it came in now."""
    return _scripts(queues).queue_status(fleet, job=job, lane=lanes.lane_name(job), as_last=as_last)


def job_status(queues: Queues, fleet: str, job: QueuedJob) -> JobStatus:
    """What a job waits for."""
    (found,) = queues.run_all([job_status_command(queues, fleet, job)])
    return found


def enqueue_new(queues: Queues, fleet: str, job: QueuedJob) -> tuple[list[Offer], Position]:
    """Put one new job into the queue, and return the offers that this allows and the job's position.

    Raises redis errors.
    """
    entry = QueueEntry(lanes.lane_name(job), job)
    command = _scripts(queues).enter(fleet, offering=queues.usual_offering(), entry=entry)
    made, ahead, run_ms = queues.taken_in(queues.scripts.run(command))
    made = queues.with_the_rest(fleet, made)
    if ahead is None or any(offer.job_id == job.id for offer in made):
        return made, OFFERED
    return made, Position(ahead, run_ms)
