"""What a submit must pass before it is written down: who and what takes jobs, rate, capacity, placement, deadline.

Bounds that are counted in Redis are no promises: while it is away nothing is counted, and everything is admitted.
"""

from collections import Counter
from collections.abc import Sequence

import structlog
from redis.exceptions import RedisError

from jobs.catalog import Model
from jobs.errors import Conflict, InvalidJob, TooMany
from jobs.policies import POLICIES
from jobs.record import NewJob, Waiting
from jobs.states import CLOSED
from jobs.tenants import Tenant
from routing.config import RoutingSettings
from routing.fleet import Fleet
from routing.observer import Observer
from routing.policies import admission, placement
from routing.queues import Queues
from routing.scripts import Scripts

_VARIETY_RETRY_S = 10.0

log = structlog.get_logger(__name__)


class Admission:
    """Counts submits."""

    def __init__(
        self, scripts: Scripts, queues: Queues, fleet: Fleet, observer: Observer, settings: RoutingSettings
    ) -> None:
        self._settings = settings
        self._scripts = scripts
        self._queues = queues
        self._fleet = fleet
        self._observer = observer

    def check(self, new: Sequence[NewJob], tenant: Tenant | None, now_ms: int) -> None:
        """Whether all of these jobs can be accepted now.

        Raises Conflict: model or tenant takes none; TooMany, with the time to wait; InvalidJob: they could never be
        accepted as they are.
        """
        for job in new:
            self._check_open(job)
        if self._queues.away:
            return
        try:
            for (model, whose), more in Counter((job.model, job.tenant) for job in new).items():
                self._check_capacity(self._fleet.model(model), whose, more)
                self._check_variety(self._fleet.model(model), whose, new)
            for index, job in enumerate(new):
                self._check_deadline(index, job, now_ms)
            if tenant is not None and tenant.rate_per_s:
                self._check_rate(tenant, len(new))
        except RedisError as error:
            self._queues.note_away()
            log.warning("admission_unchecked", error=str(error))

    def check_placement(self, job: NewJob) -> bool:
        """Whether a known server meets the job's constraints.  Raises InvalidJob where the model wants it refused."""
        snapshot = self._fleet.snapshot()
        if not job.needs or placement.eligible(snapshot.servers.values(), job.model, job.needs):
            return True
        if self._fleet.model(job.model).config.unmatched == "refuse":
            why = placement.unmatched(job.model, job.needs)
            raise InvalidJob("constraints", f"constraints: {why}; change them, or register such a server first")
        return False

    def _check_open(self, job: NewJob) -> None:
        model, tenant = self._fleet.model(job.model), self._fleet.snapshot().tenants.get(job.tenant)
        for kind, name, it in (("Model", job.model, model), ("Tenant", job.tenant, tenant)):
            if it is not None and it.state in CLOSED:
                because = f" ({it.reason})" if it.reason else ""
                raise Conflict(
                    f"{kind} {name!r} is {it.state}{because}: no new jobs are accepted until somebody resumes it.",
                    model=job.model,
                    tenant=job.tenant,
                    state=it.state,
                )

    def _check_capacity(self, model: Model, tenant: str, more: int) -> None:
        slots = self._fleet.snapshot().slots_of(model.name)
        limit = admission.bound(model.config, slots)
        if limit is None:
            return
        by_tenant = POLICIES[model.config.policy].is_by_tenant
        found = self._queues.backlog(model.fleet, model.name, tenant)
        waiting = found.own if by_tenant else found.everyones
        room = limit + (found.free if found.everyones == 0 else 0)
        if waiting + more <= room:
            return
        if 1 < more > room:  # However long it waited, this would never fit.
            raise InvalidJob("jobs", f"{more} jobs at once never fit: model {model.name!r} holds {limit}; split them.")
        wait_s = admission.retry_after_s(waiting + more - room, slots, found.run_ms)
        raise TooMany(
            admission.refusal(model.name, waiting, limit, tenant if by_tenant else None),
            wait_s,
            model=model.name,
            waiting=waiting,
        )

    def _check_variety(self, model: Model, tenant: str, new: Sequence[NewJob]) -> None:
        """Each offer looks at the constraints that wait, so there is a bound on how many different ones do."""
        needs = {job.needs for job in new if job.needs and (job.model, job.tenant) == (model.name, tenant)}
        if not needs:
            return
        own, everyones = self._queues.variety(model.fleet, model.name, tenant, needs)
        settings = self._settings
        for count, limit, whose in (
            (own, settings.most_constraints, tenant),
            (everyones, settings.most_constraints_of_all, None),
        ):
            if count <= limit:
                continue
            if len(needs) > limit:  # However long it waited, this would never fit.
                raise InvalidJob("jobs", f"{len(needs)} different constraints at once never fit; at most {limit} do.")
            raise TooMany(admission.too_various(model.name, limit, whose), _VARIETY_RETRY_S, model=model.name)

    def _check_deadline(self, index: int, job: NewJob, now_ms: int) -> None:
        """A job that can hardly start in time is refused now, instead of expiring later."""
        if job.deadline_ms is None or job.not_before_ms is not None:
            return
        model = self._fleet.model(job.model)
        as_last = Waiting(job.id, 0, job.model, job.tier, job.tenant, now_ms, job.needs)
        position = self._queues.position(model.fleet, as_last, as_last=True)
        if position is None or not position.ahead:
            return
        earliest_ms = self._observer.earliest_ms(model, position, now_ms)
        ttl_ms = job.deadline_ms - now_ms
        if earliest_ms is not None and earliest_ms > ttl_ms:
            error = InvalidJob(
                "ttl",
                f"{position.ahead} jobs come before it, and it can hardly start within {ttl_ms / 1000:g} s: "
                f"{earliest_ms / 1000:.1f} s at best; give it a longer ttl, a higher priority, or try later",
            )
            error.facts.update(index=index, ahead=position.ahead, earliest_start_s=round(earliest_ms / 1000, 1))
            raise error

    def _check_rate(self, tenant: Tenant, count: int) -> None:
        assert tenant.rate_per_s is not None
        burst = max(tenant.burst or tenant.rate_per_s, 1)
        if count > burst:  # However long it waited, this would never fit.
            raise InvalidJob("jobs", f"Tenant {tenant.name!r} may submit {burst} at once, not {count}; split them.")
        wait_ms = self._scripts.admit(tenant.name, count, 1000 / tenant.rate_per_s, burst)
        if wait_ms:
            raise TooMany(
                f"Tenant {tenant.name!r} may submit {tenant.rate_per_s} jobs a second, {burst} at once; slow down.",
                retry_after_s=wait_ms / 1000,
                tenant=tenant.name,
            )
