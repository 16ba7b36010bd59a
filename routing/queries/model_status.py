"""Show the waiting jobs of a model, lane by lane, and the model's load."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError

from routing.admission.submit_limits import queue_limit
from routing.dispatch.dispatcher import Dispatcher
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.registry.policies import POLICIES
from slotkeeper.registry.snapshot import Model

_MAX_JOBS = 1000
_MAX_LANES = 50


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The load of a model at one moment.  `waiting`: jobs of all tenants in its queue.

    `run_ms`: mean slot time of the model's latest runs; `work_ms`: how long the waiting jobs keep its slots busy.
    None: unknown.  `limit`: jobs that may wait, of each tenant if the policy is by tenant; None: any number.
    `breaker`: closed, open, half_open or probing; open until `open_until_ms`, ms since the epoch (0: it is closed),
    because of `open_why`, as for servers, see routing/queries/server_status.py: ServerStatus.
    """

    waiting: int
    run_ms: int | None
    work_ms: int | None
    limit: int | None
    breaker: str
    open_until_ms: int
    open_why: str


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """The waiting jobs of a model with the same tenant, priority and constraints.  `first`: the next of them.

    `waiting`: how many of the first thousand jobs of the model are in this lane.  `ahead`: jobs of the model that come
    before `first`; None: unknown.  `blocked_by`: why the tenant cannot start another job, a code; "": it can.
    `held`: slots that the tenant holds; None: unknown.
    """

    first: QueuedJob
    waiting: int
    ahead: int | None = None
    blocked_by: str = ""
    held: int | None = None


def read_model_load(dispatcher: Dispatcher, model: Model) -> ModelLoad:
    """Return a model's load, with one call to Redis.  Raises redis errors."""
    queues = dispatcher.queues
    (status,) = queues.run_all([queues.model_status_command(model.fleet, model.name)])
    slots = queues.count_slots(dispatcher.catalog.get(), model.name)
    return ModelLoad(
        status.all_tenants,
        status.run_ms,
        round(status.all_tenants * status.run_ms / slots) if status.run_ms and slots > 0 else None,
        queue_limit(model.config, slots),
        status.breaker,
        status.open_until_ms,
        status.open_why,
    )


def read_lanes(dispatcher: Dispatcher, model: Model) -> tuple[list[LaneStatus], bool]:
    """Return the lanes of a model, the next in turn first, and whether they hold all waiting jobs.

    Reads at most 1,000 jobs, those that were accepted first, and 50 lanes.  While Redis does not answer, `ahead` and
    `held` are unknown.  Raises DatabaseUnavailable.
    """
    waiting = dispatcher.store.list_queued([model.name], limit=_MAX_JOBS)
    by_lane: dict[tuple[str, int, str], list[QueuedJob]] = defaultdict(list)
    for job in waiting:
        by_lane[(job.tenant, job.priority, job.constraints)].append(job)
    place = _place_by_deadline if POLICIES[model.config.policy].is_by_deadline else _place_by_acceptance
    firsts = [(min(jobs, key=place), len(jobs)) for jobs in by_lane.values()]
    lanes = _read_status(dispatcher, model, firsts[:_MAX_LANES])
    lanes.sort(key=lambda lane: (bool(lane.blocked_by), lane.ahead if lane.ahead is not None else 0, lane.first.seq))
    return lanes, len(waiting) < _MAX_JOBS and len(firsts) <= _MAX_LANES


def _place_by_acceptance(job: QueuedJob) -> tuple[float, int]:
    return 0, job.seq


def _place_by_deadline(job: QueuedJob) -> tuple[float, int]:
    """As routing/lua/lib/policies/edf.lua compares jobs."""
    return job.deadline_ms // 100 if job.deadline_ms else math.inf, job.seq


def _read_status(dispatcher: Dispatcher, model: Model, firsts: Sequence[tuple[QueuedJob, int]]) -> list[LaneStatus]:
    queues = dispatcher.queues
    commands = [queues.job_status_command(model.fleet, job) for job, _ in firsts]
    try:
        found = queues.call_if_available(lambda: queues.run_all(commands))
    except RedisError:
        return [LaneStatus(job, count) for job, count in firsts]
    return [
        LaneStatus(job, count, status.ahead if status.location == "waiting" else None, status.blocked_by, status.held)
        for (job, count), status in zip(firsts, found, strict=True)
    ]
