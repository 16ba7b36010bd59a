"""When waiting jobs should start, as the door tells it; and what the core tells about it: the observer of its jobs."""

from collections import deque
from collections.abc import Sequence

from routing.admission import constraints
from routing.admission.questions import Position
from routing.queries import interval
from routing.queries.forecasts import Forecasts
from routing.queries.interval import SOON, Estimate, Truth
from slotkeeper.clock import now_ms
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.registry.catalog_cache import CatalogCache
from slotkeeper.registry.snapshot import Model
from slotkeeper.registry.values import STOPPED_STATES

_MOST_STARTS = 10_000  # that wait to be learned from; Redis may be away
_LEARNED_AT_ONCE = 200


class Estimates:
    """Safe between threads; redis errors pass through."""

    def __init__(self, fleet: CatalogCache, forecasts: Forecasts) -> None:
        self._fleet = fleet
        self._forecasts = forecasts
        self._started: deque[tuple[str, str, str, int]] = deque(maxlen=_MOST_STARTS)

    def of(self, job: QueuedJob, position: Position, *, new: bool = False) -> Estimate | None:
        """When a waiting job should start; None: it cannot as things stand, or nothing is known of its model's runs.

        `new`: it has come just now, so what becomes of the estimate is learned from.
        """
        if position.offered:
            return SOON
        fleet, slots, now = self._fleet.resolve(job.model).fleet, self._slots_for(job), now_ms()
        if new:
            return self._forecasts.promise(fleet, job.model, job.id, position.ahead, slots, position.run_ms, now)
        return self._forecasts.estimate(fleet, job.model, position.ahead, slots, position.run_ms, now)

    def _slots_for(self, job: QueuedJob) -> int:
        """Slots that an estimate of its start can count on; 0: it is stopped, or no server that is online suits it."""
        catalog = self._fleet.get()
        for it in (catalog.models.get(job.model), catalog.tenants.get(job.tenant)):
            if it is not None and it.state in STOPPED_STATES:
                return 0
        suited = (
            constraints.eligible_servers(catalog.servers.values(), job.model, job.constraints)
            if job.constraints
            else ()
        )
        if job.constraints and not any(it.takes_jobs for it in suited):
            return 0
        return catalog.count_slots(job.model)

    def truths(self, model: Model) -> list[Truth | None]:
        """How this model's estimates have come true, by size of the wait."""
        return interval.truths(self._forecasts.memory(model.fleet, model.name))

    # -- what the core tells and asks --------------------------------------------------------------------------

    def started(self, fleet: str, model: str, job_id: str, started_ms: int) -> None:
        self._started.append((fleet, model, job_id, started_ms))

    def withdrawn(self, fleet: str, model: str, job_ids: Sequence[str]) -> None:
        self._forecasts.forget(fleet, model, *job_ids)

    def removed(self, fleet: str, model: str) -> None:
        self._forecasts.remove(fleet, model)

    def earliest_ms(self, model: Model, position: Position, now_ms: int) -> int | None:
        slots = self._fleet.get().count_slots(model.name)
        given = self._forecasts.estimate(model.fleet, model.name, position.ahead, slots, position.run_ms, now_ms)
        return None if given is None else given.low_ms

    def learn(self) -> None:
        """Hold the estimates of jobs that have started since against the truth."""
        self._forecasts.started([self._started.popleft() for _ in range(min(len(self._started), _LEARNED_AT_ONCE))])
