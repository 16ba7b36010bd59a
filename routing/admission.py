"""The bounds that a submit must pass before it is written down: the tenant's rate, the model's queue.

They are bounds, not promises: while Redis is away nothing is counted, and everything is admitted.
"""

from collections import Counter
from collections.abc import Sequence

import structlog
from redis.exceptions import RedisError

from jobs.errors import InvalidJob, TooMany
from jobs.record import NewJob
from jobs.tenants import Tenant
from routing.fleet import Fleet
from routing.policies import admission
from routing.queues import Queues
from routing.scripts import Scripts

log = structlog.get_logger(__name__)


class Admission:
    """Counts submits."""

    def __init__(self, scripts: Scripts, queues: Queues, fleet: Fleet) -> None:
        self._scripts = scripts
        self._queues = queues
        self._fleet = fleet

    def check(self, new: Sequence[NewJob], tenant: Tenant | None) -> None:
        """Raises TooMany, with the time to wait, if these jobs are too many now; InvalidJob: too many at any time."""
        if self._queues.away:
            return
        try:
            for model, more in Counter(job.model for job in new).items():
                self._check_queue(model, more)
            if tenant is not None and tenant.rate_per_s:
                self._check_rate(tenant, len(new))
        except RedisError as error:
            self._queues.note_away()
            log.warning("admission_unchecked", error=str(error))

    def _check_queue(self, name: str, more: int) -> None:
        model = self._fleet.model(name)
        if model.config.max_waiting is None:
            return
        waiting = self._queues.depths(model.fleet).waiting(name)
        refused = admission.refusal(name, waiting, more, model.config)
        if refused is not None:
            raise TooMany(*refused, model=name, waiting=waiting)

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
