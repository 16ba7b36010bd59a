"""Who waits for a model, lane by lane: whose turn is next, and what each lane's first job waits for."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError

from routing.admission import questions
from routing.dispatch.dispatcher import Dispatcher
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.registry.snapshot import Model

_MOST_JOBS = 1000
_MOST_LANES = 50


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """Jobs alike in tenant, priority and constraints.  `waiting` counts those among the first thousand that wait.

    `ahead`: jobs of the model that come before its first; None: not known.  `obstacle`: what is in its tenant's way,
    "": nothing; `held`: slots that its tenant holds there.
    """

    first: QueuedJob
    waiting: int
    ahead: int | None = None
    obstacle: str = ""
    held: int | None = None


def read_lanes(dispatcher: Dispatcher, model: Model) -> tuple[list[LaneStatus], bool]:
    """Lanes, the next in turn first, and whether all that waits is in them.  Raises DatabaseUnavailable."""
    waiting = dispatcher.store.list_queued([model.name], limit=_MOST_JOBS)
    by_lane: dict[tuple[str, int, str], list[QueuedJob]] = defaultdict(list)
    for job in waiting:
        by_lane[(job.tenant, job.priority, job.constraints)].append(job)
    firsts = [(jobs[0], len(jobs)) for jobs in by_lane.values()]
    found = _with_facts(dispatcher, model, firsts[:_MOST_LANES])
    found.sort(key=lambda lane: (bool(lane.obstacle), lane.ahead if lane.ahead is not None else 0, lane.first.seq))
    return found, len(waiting) < _MOST_JOBS and len(firsts) <= _MOST_LANES


def _with_facts(dispatcher: Dispatcher, model: Model, firsts: Sequence[tuple[QueuedJob, int]]) -> list[LaneStatus]:
    asked = [questions.job_status_command(dispatcher.queues, model.fleet, job) for job, _ in firsts]
    try:
        facts = dispatcher.queues.call_if_available(lambda: dispatcher.queues.run_all(asked))
    except RedisError:
        return [LaneStatus(job, count) for job, count in firsts]
    return [
        LaneStatus(job, count, it.ahead if it.place == "waiting" else None, it.obstacle, it.held)
        for (job, count), it in zip(firsts, facts, strict=True)
    ]
