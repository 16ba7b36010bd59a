"""Runs of the jobs that were accepted shortly before and after a job: who held slots while it waited."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from routing.queries import looks
from routing.queries.attempts import Attempt, attempts
from routing.queries.looks import Nearby
from slotkeeper.clock import now_ms
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import Job

_REACH = 1_000
_MOST_LOOKED_INTO = 50
_WENT_WRONG = frozenset({Reason.SERVER_ERROR, Reason.RETRIES_EXHAUSTED, Reason.SERVER_LOST, Reason.CRASHES_EXHAUSTED})


@dataclass(frozen=True, slots=True)
class Failure:
    at_ms: int
    server: str | None


@dataclass(frozen=True, slots=True)
class NeighbourRun:
    """A job's last run, and when earlier ones of it failed."""

    model: str
    tenant: str
    server: str | None
    from_ms: int
    to_ms: int
    completed: bool
    failures: tuple[Failure, ...]

    @property
    def lasted_ms(self) -> int:
        return self.to_ms - self.from_ms


def load_neighbours(store: JobStore, job: Job) -> list[NeighbourRun]:
    """Of other jobs, in order of acceptance; up to a thousand to each side.  Raises DatabaseUnavailable."""
    found = [it for it in looks.around(store.database, job.seq, _REACH) if it.id != job.id]
    tried = [it.id for it in found if it.has_failed][-_MOST_LOOKED_INTO:]
    tries = {job_id: attempts(store.list_events(job_id)) for job_id in tried}
    return [_run(it, tries) for it in found if it.started_ms is not None]


def _run(it: Nearby, tries: Mapping[str, Sequence[Attempt]]) -> NeighbourRun:
    failures = tuple(
        Failure(one.ended_ms, one.server)
        for one in tries.get(it.id, ())
        if one.ended_ms is not None and one.outcome in _WENT_WRONG
    )
    ended = it.finished_ms if it.state is not State.RUNNING else None
    begun = it.started_ms or 0
    return NeighbourRun(it.model, it.tenant, it.server, begun, ended or now_ms(), it.state is State.COMPLETED, failures)
