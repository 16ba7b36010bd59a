"""Return a queued job's position in the queue, and estimate its start.

The estimate is plain arithmetic: (jobs of its model before it + 1) × mean slot time of the model's latest runs / slots.
It does not consider jobs that are accepted later and overtake this one, or that single runs differ in length.  Position
and mean come from Redis; while Redis does not answer they are unknown.
"""

from contextlib import suppress
from dataclasses import dataclass

from redis.exceptions import RedisError

from routing.admission import constraints
from routing.dispatch.dispatcher import Dispatcher
from routing.queue.queues import Position
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.registry.values import STOPPED_STATES


@dataclass(frozen=True, slots=True)
class StartEstimate:
    """When a job should start, in ms from now, and what this was computed from; see the module.

    A job that is offered has 0 jobs before it and starts at once; `run_ms` and `slots` are None then.
    """

    start_ms: int
    jobs_before: int
    run_ms: int | None
    slots: int | None


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A job's position.  `position`: 1 is next; None: the job has no place in the queue, or Redis does not answer.

    `offered`: it has a slot and is being started.
    """

    position: int | None = None
    estimate: StartEstimate | None = None
    offered: bool = False


def read_position(dispatcher: Dispatcher, workers: WorkerCapacity, job: QueuedJob) -> QueuePosition:
    """Return a queued job's position, with one call to Redis; an empty one if Redis does not answer."""
    queues, fleet = dispatcher.queues, dispatcher.catalog.resolve(job.model).fleet
    try:
        found = queues.call_if_available(lambda: queues.job_status(fleet, job))
    except RedisError:
        return QueuePosition()
    return queue_position(dispatcher, workers, job, found.position)


def queue_position(
    dispatcher: Dispatcher, workers: WorkerCapacity, job: QueuedJob, position: Position | None
) -> QueuePosition:
    """Return a job's position from the response of Redis; None: Redis does not answer.

    Without a living worker no start is estimated.
    """
    if position is None:
        return QueuePosition()
    estimate = None
    with suppress(RedisError):
        if workers.is_any_alive():
            estimate = estimate_start(dispatcher, job, position)
    return QueuePosition(None if position.offered else position.ahead + 1, estimate, position.offered)


def estimate_start(dispatcher: Dispatcher, job: QueuedJob, position: Position) -> StartEstimate | None:
    """Return when a waiting job should start; None: it cannot start at present, or no run of its model was measured."""
    if position.offered:
        return StartEstimate(0, 0, None, None)
    slots = _count_usable_slots(dispatcher, job)
    wait_ms = position.estimated_wait_ms(slots)
    return None if wait_ms is None else StartEstimate(wait_ms, position.ahead, position.run_ms, slots)


def _count_usable_slots(dispatcher: Dispatcher, job: QueuedJob) -> int:
    """Count the slots of the job's model; 0: model or tenant is stopped, or no online server meets its constraints."""
    catalog = dispatcher.catalog.get()
    for owner in (catalog.models.get(job.model), catalog.tenants.get(job.tenant)):
        if owner is not None and owner.state in STOPPED_STATES:
            return 0
    if job.constraints:
        suited = constraints.eligible_servers(catalog.servers.values(), job.model, job.constraints)
        if not any(server.takes_jobs for server in suited):
            return 0
    return dispatcher.queues.count_slots(catalog, job.model)
