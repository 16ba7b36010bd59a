"""The limits on submits: a function each, and the table LIMITS in the order in which they apply.

A limit raises a refusal that says what is wrong and what to do: Conflict (no jobs are accepted now), TooManyRequests
(with the time to wait) or InvalidJob (the job could never be accepted as it is).  One that needs Redis yields commands,
each with a function that judges its result, so that the commands of all limits take one round trip.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from routing.admission import constraints
from routing.admission.submission import error_index
from routing.admission.waiting_counts import WaitingCounts
from routing.config import RoutingSettings
from routing.queue import lanes
from routing.queue.queues import JobStatus, ModelStatus, Queues
from slotkeeper.clock import iso_time
from slotkeeper.errors import Conflict, InvalidJob, TooManyRequests
from slotkeeper.jobs.closed_models import ModelClosed
from slotkeeper.jobs.values import PRIORITY_LEAST_URGENT, NewJob, QueuedJob
from slotkeeper.redis.scripts import Command, Scripts
from slotkeeper.registry.identity import Identity
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.policies import POLICIES
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.tenant_limits import NO_LIMITS, RateLimit, TenantLimits
from slotkeeper.registry.usage import DAY_MS, SlotTime, SlotTimes, month_end_ms, month_start_ms
from slotkeeper.registry.values import CLOSED_STATES, TenantState

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


class LimitStatus(NamedTuple):
    """What is left of a limit after a submit: `left` of `quota` in `window_s`, and all of it after `reset_s`.

    unit: of quota and left; "": jobs.
    """

    name: str
    quota: int
    window_s: int
    left: int
    reset_s: int
    unit: str = ""


@dataclass(frozen=True)
class AdmissionRequest:
    """Jobs that are accepted all or none.  `sender`: who submits them; they may be those of other tenants.

    statuses: filled with what is left of each rate.
    """

    jobs: Sequence[NewJob]
    sender: Identity
    now_ms: int
    statuses: list[LimitStatus] = field(default_factory=list)

    @cached_property
    def by_account(self) -> dict[tuple[str, str], list[NewJob]]:
        """(model, tenant) -> their jobs."""
        found: dict[tuple[str, str], list[NewJob]] = {}
        for job in self.jobs:
            found.setdefault((job.model, job.tenant), []).append(job)
        return found

    @cached_property
    def counts_by_tenant(self) -> dict[str, int]:
        """Tenant -> how many of the jobs it submits."""
        found = defaultdict[str, int](int)
        for (_, tenant), jobs in self.by_account.items():
            found[tenant] += len(jobs)
        return found


class ConstraintCounts(NamedTuple):
    """How many different constraints would wait."""

    own: int
    all_tenants: int


class RateBucket(NamedTuple):
    """A rate that counts a submit.  name: tenant, key:<id> or model:<name>."""

    name: str
    jobs: int
    interval_ms: float
    burst: int


class RateAnswer(NamedTuple):
    """What one rate says: the time to wait in ms, or 0, and how many jobs are left."""

    wait_ms: int
    left: int


class LimitScripts(Protocol):
    """The scripts of this module."""

    def rate_limit(self, key: str, *, buckets: Sequence[RateBucket]) -> Command[list[RateAnswer]]: ...
    def tenant_waiting(self, fleet: str, *, accounts: Sequence[str]) -> Command[int]: ...
    def count_constraints(
        self, fleet: str, *, account: str, models: Sequence[str], classes: Sequence[str]
    ) -> Command[ConstraintCounts]: ...


class LimitContext:
    """What limits read: the catalog as it was for this submit, the queues, the settings, and the scripts that count.

    slot_times: what tenants have used.  waiting: what Redis counted a moment ago.
    """

    def __init__(
        self,
        catalog: CatalogSnapshot,
        queues: Queues,
        settings: RoutingSettings,
        slot_times: SlotTimes,
        waiting: WaitingCounts,
    ) -> None:
        self.catalog, self.queues, self.settings = catalog, queues, settings
        self.slot_times, self.waiting = slot_times, waiting
        self._scripts: Scripts = queues.scripts
        self._lua: LimitScripts = queues.scripts.bind(LimitScripts)

    def rate_limit_command(self, tenant: str, buckets: Sequence[RateBucket]) -> Command[list[RateAnswer]]:
        """Return the command that counts a submit of a tenant in all of these rates, or, if one refuses, in none."""
        return self._lua.rate_limit(self._scripts.keys.rate(tenant), buckets=buckets)

    def tenant_waiting_command(self, fleet: str, tenant: str) -> Command[int]:
        """Return the command that counts the tenant's jobs that wait in a fleet."""
        accounts = [lanes.account_name(tenant, model) for model in self.catalog.models_of(fleet)]
        return self._lua.tenant_waiting(fleet, accounts=accounts)

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
    catalog, checked = context.catalog, list[NewJob]()
    with error_index(checked):
        for job in request.jobs:
            refuses = catalog.resolve(job.model).config.unmatched == "refuse"
            if refuses and job.constraints and not has_eligible_server(job, catalog):
                why = constraints.no_server_message(catalog.servers.values(), job.model, job.constraints)
                raise InvalidJob("constraints", f"constraints: {why}; change them, or register such a server first")
            checked.append(job)
    return ()


# -- what the tenant may submit ------------------------------------------------------------------------------------


def check_allowed(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck[Any]]:
    """Refuse jobs of a model, a priority or a size that their tenant may not submit."""
    checked: list[NewJob] = []
    with error_index(checked):
        for job in request.jobs:
            limits = context.catalog.limits_of(job.tenant)
            if limits is not NO_LIMITS or job.constraints:
                _check_job(job, limits)
            checked.append(job)
    return ()


def _check_job(job: NewJob, limits: TenantLimits) -> None:
    ask = "ask the operator for more"
    if limits.models is not None and job.model not in limits.models:
        models = ", ".join(limits.models) or "none"
        raise InvalidJob("model", f"Tenant {job.tenant!r} may submit jobs of these models: {models}; {ask}.")
    if limits.most_urgent is not None and job.priority < limits.most_urgent:
        allowed = f"{limits.most_urgent} to {PRIORITY_LEAST_URGENT}"
        detail = f"Tenant {job.tenant!r} may use priorities {allowed}; {ask}, or send {limits.most_urgent}."
        raise InvalidJob("priority", detail)
    if constraints.environment_of(job.constraints) not in limits.allowed_environments:
        allowed = ", ".join(limits.allowed_environments)
        detail = f"Jobs of tenant {job.tenant!r} may run in these environments: {allowed}; {ask}, or send another."
        raise InvalidJob("environment", detail)
    if limits.max_payload_bytes is not None and len(job.payload.encode()) > limits.max_payload_bytes:
        detail = f"Payloads of tenant {job.tenant!r} may have {limits.max_payload_bytes} bytes; {ask}, or send less."
        raise InvalidJob("payload", detail)


# -- the model and the tenant accept jobs --------------------------------------------------------------------------


def check_states(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck[Any]]:
    """Refuse jobs of a model or tenant that is draining or frozen, and of a model that is being removed."""
    catalog = context.catalog
    for name, tenant in request.by_account:
        model = catalog.resolve(name)
        if catalog.is_being_removed(name):
            raise ModelClosed(catalog.closed[name].explain(), model=name, state="removing")
        for kind, owner_name, owner in (("Model", name, model), ("Tenant", tenant, catalog.tenants.get(tenant))):
            if owner is not None and owner.state in CLOSED_STATES:
                explanation = _explain_closed(kind, owner_name, owner)
                raise Conflict(explanation, model=name, tenant=tenant, state=owner.state)
    return ()


def explain_closed_model(catalog: CatalogSnapshot, model: Model) -> str | None:
    """Return why a model accepts no jobs now; None: it does."""
    if catalog.is_being_removed(model.name):
        return catalog.closed[model.name].explain()
    return _explain_closed("Model", model.name, model) if model.state in CLOSED_STATES else None


def _explain_closed(kind: str, name: str, owner: Model | TenantState) -> str:
    because = f" ({owner.reason})" if owner.reason else ""
    return f"{kind} {name!r} is {owner.state}{because}: no new jobs are accepted until an operator resumes it."


# -- time of slots -------------------------------------------------------------------------------------------------


def check_quota(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck[Any]]:
    """Limit the slot time of a tenant a day and a month.  Jobs that were accepted before run all the same."""
    for tenant in request.counts_by_tenant:
        limits = context.catalog.limits_of(tenant)
        if limits.slot_s_per_day is not None or limits.slot_s_per_month is not None:
            _check_slot_time(request, tenant, limits, context.slot_times.of(tenant, request.now_ms))
    return ()


def _check_slot_time(request: AdmissionRequest, tenant: str, limits: TenantLimits, used: SlotTime) -> None:
    now = request.now_ms
    day_began, month_began = now - now % DAY_MS, month_start_ms(now)
    for word, quota_s, used_ms, began_ms, ends_ms in (
        ("day", limits.slot_s_per_day, used.day_ms, day_began, day_began + DAY_MS),
        ("month", limits.slot_s_per_month, used.month_ms, month_began, month_end_ms(now)),
    ):
        if quota_s is None:
            continue
        left_s, reset_s = max(math.ceil(quota_s - used_ms / 1000), 0), math.ceil((ends_ms - now) / 1000)
        window_s = (ends_ms - began_ms) // 1000
        status = LimitStatus(f"slot-seconds-{word}", math.ceil(quota_s), window_s, left_s, reset_s, unit="slot-seconds")
        request.statuses.append(status)
        if used_ms >= 1000 * quota_s:
            raise TooManyRequests(
                f"Tenant {tenant!r} has used {used_ms / 1000:.0f} seconds of slots this {word} (UTC), and may use "
                f"{quota_s:g}; it may submit again at {iso_time(ends_ms)}.",
                retry_after_s=reset_s,
                tenant=tenant,
                limit=f"slot_s_per_{word}",
            )


# -- how many jobs wait --------------------------------------------------------------------------------------------


def check_capacity(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck[ModelStatus]]:
    """Limit how many jobs wait: of a model, or of each of its tenants where its policy separates them."""
    counts = defaultdict[tuple[str, str | None], int](int)
    for (name, tenant), jobs in request.by_account.items():
        by_tenant = POLICIES[context.catalog.resolve(name).config.policy].is_by_tenant
        counts[name, tenant if by_tenant else None] += len(jobs)
    for (name, whose), count in counts.items():
        model, slots = context.catalog.resolve(name), context.queues.count_slots(context.catalog, name)
        limit = queue_limit(model.config, slots)
        if limit is not None and not context.waiting.has_room((name, whose), count, limit, request.now_ms):
            yield _capacity_check(request, context, model, whose, count, limit, slots)


def check_tenant_waiting(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck[int]]:
    """Limit how many jobs of a tenant wait, of all models together."""
    for tenant, count in request.counts_by_tenant.items():
        limit = context.catalog.limits_of(tenant).max_waiting
        if limit is not None:
            yield from _tenant_waiting_checks(context, tenant, count, limit)


def _tenant_waiting_checks(context: LimitContext, tenant: str, count: int, limit: int) -> Iterable[RedisCheck[int]]:
    if count > limit:  # It would never fit.
        detail = f"{count} jobs at once exceed the limit of tenant {tenant!r}, of which {limit} may wait; split them."
        raise InvalidJob("jobs", detail)
    total = 0

    def judge(waiting: int) -> None:
        nonlocal total
        total += waiting
        if total + count > limit:
            raise TooManyRequests(
                f"{total} jobs of tenant {tenant!r} wait, and {limit} may; try again when some have started.",
                _RETRY_UNKNOWN_S,
                tenant=tenant,
                waiting=total,
            )

    for fleet in context.catalog.fleets():
        if context.catalog.models_of(fleet):
            yield RedisCheck(fleet, context.tenant_waiting_command(fleet, tenant), judge)


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
    request: AdmissionRequest,
    context: LimitContext,
    model: Model,
    tenant: str | None,
    count: int,
    limit: int,
    slots: int,
) -> RedisCheck[ModelStatus]:
    """Return the check of one limit; `tenant` None: it is the model's."""

    def judge(status: ModelStatus) -> None:
        waiting = status.all_tenants if tenant is None else status.own
        capacity = limit + status.free  # Jobs that start at once do not wait.
        if waiting + count <= capacity:
            context.waiting.note((model.name, tenant), waiting + count, request.now_ms)
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
        wait_ms = position.estimated_wait_ms(context.queues.count_slots(context.catalog, model.name))
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


def check_rate(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck[list[RateAnswer]]]:
    """Limit how many jobs a tenant submits a second, and how many at once: in all, of a model, and with a key."""
    sender = request.sender
    limits, whose = context.catalog.limits_of(sender.tenant.name), f"Tenant {sender.tenant.name!r}"
    rates: list[tuple[str, str, RateLimit, int]] = []  # name, sentence, rate, how many jobs it counts
    if limits.rate_per_s:
        rates.append(("tenant", f"{whose} may submit", limits, len(request.jobs)))
    if sender.key_rate.rate_per_s:
        sentence = f"With key {sender.key_id}, tenant {sender.tenant.name!r} may submit"
        rates.append((f"key:{sender.key_id}", sentence, sender.key_rate, len(request.jobs)))
    if limits.model_rates:
        for model, count in Counter(job.model for job in request.jobs).items():
            if (rate := limits.model_rates.get(model)) is not None and rate.rate_per_s:
                rates.append((f"model:{model}", f"{whose} may submit for model {model!r}", rate, count))
    if rates:
        yield _rate_check(request, context, sender.tenant.name, rates)


def _rate_check(
    request: AdmissionRequest, context: LimitContext, tenant: str, rates: list[tuple[str, str, RateLimit, int]]
) -> RedisCheck[list[RateAnswer]]:
    buckets = []
    for name, sentence, rate, count in rates:
        if count > rate.at_once:  # It would never fit.
            raise InvalidJob("jobs", f"{sentence} {rate.at_once} at once, not {count}; split them.")
        buckets.append(RateBucket(name, count, 1000 / (rate.rate_per_s or 1), rate.at_once))

    def judge(answers: list[RateAnswer]) -> None:
        for bucket, answer in zip(buckets, answers, strict=True):
            request.statuses.append(_rate_status(bucket, answer))
        slowest = max(range(len(answers)), key=lambda n: answers[n].wait_ms)
        if answers[slowest].wait_ms:
            _, sentence, rate, _ = rates[slowest]
            raise TooManyRequests(
                f"{sentence} {rate.rate_per_s:g} jobs a second, {rate.at_once} at once; slow down.",
                retry_after_s=answers[slowest].wait_ms / 1000,
                tenant=tenant,
                limit=buckets[slowest].name,
            )

    return RedisCheck(None, context.rate_limit_command(tenant, buckets), judge)


def _rate_status(bucket: RateBucket, answer: RateAnswer) -> LimitStatus:
    spent_ms = (bucket.burst - answer.left) * bucket.interval_ms
    window_s = max(math.ceil(bucket.burst * bucket.interval_ms / 1000), 1)
    return LimitStatus(bucket.name.partition(":")[0], bucket.burst, window_s, answer.left, math.ceil(spent_ms / 1000))


DEADLINE = Limit("deadline", Phase.READ, check_deadlines)
LIMITS: tuple[Limit, ...] = (
    Limit("allowed", Phase.LOCAL, check_allowed),
    Limit("placed", Phase.LOCAL, check_servers),
    Limit("state", Phase.LOCAL, check_states),
    Limit("quota", Phase.LOCAL, check_quota),
    Limit("waiting", Phase.READ, check_tenant_waiting),
    Limit("capacity", Phase.READ, check_capacity),
    Limit("variety", Phase.READ, check_constraints),
    DEADLINE,
    Limit("rate", Phase.COUNT, check_rate),
)
"""In the order in which they apply; a client gets the first that refuses."""
