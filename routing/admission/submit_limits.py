"""The limits on submits: a function each, and the table LIMITS in the order in which they apply.

A limit raises a refusal that says what is wrong and what to do: Conflict (no jobs are accepted now), TooManyRequests
(with the time to wait) or InvalidJob (the job could never be accepted as it is).  One that needs Redis yields commands,
each with a function that judges its result, so that the commands of all limits take one round trip.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from routing.admission import constraints
from routing.admission.submission import error_index
from routing.config import RoutingSettings
from routing.queue import lanes
from routing.queue.queues import JobStatus, ModelStatus, Queues
from slotkeeper.errors import Conflict, InvalidJob, TooManyRequests
from slotkeeper.jobs.closed_models import ModelClosed
from slotkeeper.jobs.values import NewJob, QueuedJob
from slotkeeper.redis.scripts import Command, Scripts
from slotkeeper.registry.identity import Tenant
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.policies import POLICIES
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import CLOSED_STATES

T = TypeVar("T")

_RETRY_CONSTRAINTS_S = 10.0
_RETRY_UNKNOWN_S = 30
_MAX_RETRY_S = 3600


class Phase(Enum):
    """What a limit asks of Redis, in the order in which the phases run."""

    LOCAL = auto()
    READ = auto()
    """It changes nothing.  Such a limit is no promise: while Redis is unavailable, every job is admitted."""
    COUNT = auto()
    """It counts the submit, so it runs when no other limit refuses."""


@dataclass(frozen=True)
class AdmissionRequest:
    """Jobs that are accepted all or none.  `tenant`: who submits them, if known; the jobs may belong to others."""

    jobs: Sequence[NewJob]
    tenant: Tenant | None
    now_ms: int

    @cached_property
    def by_account(self) -> dict[tuple[str, str], list[NewJob]]:
        """(model, tenant) -> their jobs."""
        found: dict[tuple[str, str], list[NewJob]] = {}
        for job in self.jobs:
            found.setdefault((job.model, job.tenant), []).append(job)
        return found


class ConstraintCounts(NamedTuple):
    """How many different constraints would wait."""

    own: int
    all_tenants: int


class LimitScripts(Protocol):
    """The scripts of this module."""

    def rate_limit(self, key: str, *, count: int, interval_ms: float, burst: int) -> Command[int]: ...
    def count_constraints(
        self, fleet: str, *, account: str, models: Sequence[str], classes: Sequence[str]
    ) -> Command[ConstraintCounts]: ...


class LimitContext:
    """What limits read: the catalog as it was for this submit, the queues, the settings, and the scripts that count."""

    def __init__(self, catalog: CatalogSnapshot, queues: Queues, settings: RoutingSettings) -> None:
        self.catalog, self.queues, self.settings = catalog, queues, settings
        self._scripts: Scripts = queues.scripts
        self._lua: LimitScripts = queues.scripts.bind(LimitScripts)

    def rate_limit_command(self, tenant: str, count: int, interval_ms: float, burst: int) -> Command[int]:
        """Return the command that counts a tenant's submits; its result is the time to wait in ms, or 0."""
        key = self._scripts.keys.rate(tenant)
        return self._lua.rate_limit(key, count=count, interval_ms=interval_ms, burst=burst)

    def count_constraints_command(
        self, fleet: str, model: str, tenant: str, wanted: Iterable[str]
    ) -> Command[ConstraintCounts]:
        """Return the command that counts the different constraints that would wait with these."""
        classes = sorted({lanes.class_name(model, one) for one in wanted})
        account, models = lanes.account_name(tenant, model), self.catalog.models_of(fleet)
        return self._lua.count_constraints(fleet, account=account, models=models, classes=classes)


@dataclass(frozen=True, slots=True)
class RedisCheck(Generic[T]):
    """`judge` raises a refusal if the result of the command is a reason for one.  fleet None: it concerns none."""

    fleet: str | None
    command: Command[T]
    judge: Callable[[T], None]


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on submits.  `name` labels the metric of refusals."""

    name: str
    phase: Phase
    check: Callable[[AdmissionRequest, LimitContext], Iterable[RedisCheck[Any]]]


# -- some server meets the constraints -----------------------------------------------------------------------------


def has_eligible_server(job: NewJob, catalog: CatalogSnapshot) -> bool:
    """Return whether a registered server serves the job's model and meets the job's constraints."""
    return any(constraints.can_run(server, job.model, job.constraints) for server in catalog.servers.values())


def check_servers(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck[Any]]:
    """Refuse a job whose constraints no registered server meets, if its model wants that; others wait for a server."""
    for index, job in enumerate(request.jobs):
        refuses = context.catalog.resolve(job.model).config.unmatched == "refuse"
        if refuses and job.constraints and not has_eligible_server(job, context.catalog):
            why = constraints.no_server_message(job.model, job.constraints)
            with error_index(index):
                raise InvalidJob("constraints", f"constraints: {why}; change them, or register such a server first")
    return ()


# -- the model and the tenant accept jobs --------------------------------------------------------------------------


def check_states(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck[Any]]:
    """Refuse jobs of a model or tenant that is draining or frozen, and of a model that is being removed."""
    catalog = context.catalog
    for job in request.jobs:
        model = catalog.resolve(job.model)
        if catalog.is_being_removed(model.name):
            raise ModelClosed(catalog.closed[model.name].explain(), model=model.name, state="removing")
        for kind, name, owner in (("Model", job.model, model), ("Tenant", job.tenant, catalog.tenants.get(job.tenant))):
            if owner is not None and owner.state in CLOSED_STATES:
                because = f" ({owner.reason})" if owner.reason else ""
                raise Conflict(
                    f"{kind} {name!r} is {owner.state}{because}: no new jobs are accepted until an operator resumes "
                    "it.",
                    model=job.model,
                    tenant=job.tenant,
                    state=owner.state,
                )
    return ()


# -- how many jobs wait --------------------------------------------------------------------------------------------


def check_capacity(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck[ModelStatus]]:
    """Limit how many jobs wait: of a model, or of each of its tenants where its policy separates them."""
    counts = Counter[tuple[str, str | None]]()
    for (name, tenant), jobs in request.by_account.items():
        by_tenant = POLICIES[context.catalog.resolve(name).config.policy].is_by_tenant
        counts[name, tenant if by_tenant else None] += len(jobs)
    for (name, whose), count in counts.items():
        model, slots = context.catalog.resolve(name), context.catalog.count_slots(name)
        limit = queue_limit(model.config, slots)
        if limit is not None:
            yield _capacity_check(context, model, whose, count, limit, slots)


def queue_limit(config: ModelConfig, slots: int) -> int | None:
    """Return how many jobs may wait: of each tenant where the policy is by tenant, else of the model; None: any number.

    `slots`: of online servers.  Without any the limit is that of one slot, so that an outage does not turn clients away
    at once.
    """
    configured = [capacity for capacity in (config.capacity, config.capacity_per_slot) if capacity is not None]
    if not configured:
        return config.max_waiting
    wanted = max(configured) * max(slots, 1)
    return wanted if config.max_waiting is None else min(wanted, config.max_waiting)


def _capacity_check(
    context: LimitContext, model: Model, tenant: str | None, count: int, limit: int, slots: int
) -> RedisCheck[ModelStatus]:
    """Return the check of one limit; `tenant` None: it is the model's."""

    def judge(status: ModelStatus) -> None:
        waiting = status.all_tenants if tenant is None else status.own
        capacity = limit + status.free  # Jobs that start at once do not wait.
        if waiting + count <= capacity:
            return
        if 1 < count > capacity:  # It would never fit.
            raise InvalidJob(
                "jobs", f"{count} jobs at once exceed the limit of model {model.name!r}, which is {limit}; split them."
            )
        whose = "jobs" if tenant is None else f"jobs of tenant {tenant!r}"
        raise TooManyRequests(
            f"{waiting} {whose} wait for model {model.name!r}, and it is configured to hold {limit}; "
            "try again later, or raise capacity or max_waiting at /admin/model-configs.",
            retry_after_s(waiting + count - capacity, slots, status.run_ms),
            model=model.name,
            waiting=waiting,
        )

    command = context.queues.model_status_command(model.fleet, model.name, tenant or "", max_free=count)
    return RedisCheck(model.fleet, command, judge)


def retry_after_s(over: int, slots: int, run_ms: float | None) -> int:
    """Return whole seconds, 1 to 3600, until `over` jobs have ended: the Retry-After of a full queue."""
    if slots <= 0 or not run_ms:
        return _RETRY_UNKNOWN_S
    return math.ceil(min(max(over * run_ms / (slots * 1000), 1), _MAX_RETRY_S))


# -- how many different constraints wait ---------------------------------------------------------------------------


def check_constraints(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck[ConstraintCounts]]:
    """Limit how many different constraints wait: each may need another group, and an offer reads all groups."""
    for (name, tenant), jobs in request.by_account.items():
        wanted = {job.constraints for job in jobs if job.constraints}
        if wanted:
            yield _constraints_check(context, context.catalog.resolve(name), tenant, wanted)


def _constraints_check(
    context: LimitContext, model: Model, tenant: str, wanted: set[str]
) -> RedisCheck[ConstraintCounts]:
    limits: Mapping[str, int] = {
        f"tenant {tenant!r}": context.settings.most_constraints,
        "all tenants": context.settings.most_constraints_of_all,
    }

    def judge(counts: ConstraintCounts) -> None:
        for count, (whose, limit) in zip(counts, limits.items(), strict=True):
            if count > limit:
                refuse(whose, limit)

    def refuse(whose: str, limit: int) -> NoReturn:
        if len(wanted) > limit:  # It would never fit.
            message = f"{len(wanted)} different constraints at once are too many; at most {limit} are accepted."
            raise InvalidJob("jobs", message)
        raise TooManyRequests(
            f"Jobs of {whose} with {limit} different constraints wait for model {model.name!r} and those that share "
            "its servers, and no more kinds are taken; use constraints that wait already, or try again later.",
            _RETRY_CONSTRAINTS_S,
            model=model.name,
        )

    command = context.count_constraints_command(model.fleet, model.name, tenant, wanted)
    return RedisCheck(model.fleet, command, judge)


# -- deadlines -----------------------------------------------------------------------------------------------------


def check_deadlines(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck[JobStatus]]:
    """Refuse a job whose estimated start is far behind its deadline, instead of letting it expire later.

    The estimate is rough (see routing/queries/positions.py), so only a job is refused that would have to start in less
    than half of the estimated time.  Of jobs that would stand at the same place, the one with the first deadline is
    checked.
    """
    checked: dict[tuple[object, ...], tuple[int, int]] = {}  # place -> deadline and index of its first job
    for index, job in enumerate(request.jobs):
        if job.deadline_ms is not None and job.not_before_ms is None:
            policy = POLICIES[context.catalog.resolve(job.model).config.policy]
            place = job.model, job.tenant, job.priority, job.constraints, policy.is_by_deadline and job.deadline_ms
            checked[place] = min(checked.get(place, (job.deadline_ms, index)), (job.deadline_ms, index))
    for deadline_ms, index in checked.values():
        yield _deadline_check(request, context, index, request.jobs[index], deadline_ms - request.now_ms)


def _deadline_check(
    request: AdmissionRequest, context: LimitContext, index: int, job: NewJob, ttl_ms: int
) -> RedisCheck[JobStatus]:
    model = context.catalog.resolve(job.model)
    as_last = QueuedJob(
        job.id, 0, job.model, job.priority, job.tenant, request.now_ms, job.constraints, job.deadline_ms or 0
    )

    def judge(status: JobStatus) -> None:
        position = status.position
        if position is None or not position.ahead:
            return
        wait_ms = position.estimated_wait_ms(context.catalog.count_slots(model.name))
        if wait_ms is not None and wait_ms > 2 * ttl_ms:
            refusal = InvalidJob(
                "ttl",
                f"{position.ahead} jobs come before it, so it probably cannot start within {ttl_ms / 1000:g} s: the "
                f"estimate is {wait_ms / 1000:.1f} s; give it a longer ttl, a higher priority, or try later",
            )
            refusal.facts.update(index=index, ahead=position.ahead, estimated_start_s=round(wait_ms / 1000, 1))
            raise refusal

    return RedisCheck(model.fleet, context.queues.job_status_command(model.fleet, as_last, as_last=True), judge)


# -- requests per second -------------------------------------------------------------------------------------------


def check_rate(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck[int]]:
    """Limit how many jobs a tenant submits a second, and how many at once."""
    tenant = request.tenant
    if tenant is not None and tenant.rate_per_s:
        yield _rate_check(context, tenant, tenant.rate_per_s, len(request.jobs))


def _rate_check(context: LimitContext, tenant: Tenant, rate_per_s: int, count: int) -> RedisCheck[int]:
    burst = max(tenant.burst or rate_per_s, 1)
    if count > burst:  # It would never fit.
        raise InvalidJob("jobs", f"Tenant {tenant.name!r} may submit {burst} at once, not {count}; split them.")

    def judge(wait_ms: int) -> None:
        if wait_ms:
            raise TooManyRequests(
                f"Tenant {tenant.name!r} may submit {rate_per_s} jobs a second, {burst} at once; slow down.",
                retry_after_s=wait_ms / 1000,
                tenant=tenant.name,
            )

    return RedisCheck(None, context.rate_limit_command(tenant.name, count, 1000 / rate_per_s, burst), judge)


LIMITS: tuple[Limit, ...] = (
    Limit("placed", Phase.LOCAL, check_servers),
    Limit("state", Phase.LOCAL, check_states),
    Limit("capacity", Phase.READ, check_capacity),
    Limit("variety", Phase.READ, check_constraints),
    Limit("deadline", Phase.READ, check_deadlines),
    Limit("rate", Phase.COUNT, check_rate),
)
"""In the order in which they apply; a client gets the first that refuses."""
