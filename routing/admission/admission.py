"""Check jobs against all limits, with at most two round trips to Redis."""

from collections.abc import Callable, Collection, Sequence

import structlog
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from routing.admission import submit_limits
from routing.admission.submit_limits import (
    DEADLINE,
    AdmissionRequest,
    Limit,
    LimitContext,
    LimitScripts,
    LimitStatus,
    Phase,
    RedisCheck,
)
from routing.admission.waiting_counts import WaitingCounts
from routing.config import RoutingSettings
from routing.queue.queues import Queues
from slotkeeper.errors import Conflict, InvalidJob, TooManyRequests
from slotkeeper.jobs.values import NewJob, QueuedJob
from slotkeeper.registry.identity import LOCAL_IDENTITY, Identity
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.usage import SlotTimes

log = structlog.get_logger(__name__)

REFUSALS = (Conflict, InvalidJob, TooManyRequests)
"""What a limit raises."""


class Admission:
    """Checks submits.  `on_refusal`: called with the name of the limit and the number of jobs that it refuses."""

    def __init__(
        self,
        queues: Queues,
        settings: RoutingSettings,
        slot_times: SlotTimes,
        on_refusal: Callable[[str, int], object] = lambda limit, jobs: None,
    ) -> None:
        self._queues = queues
        self._on_refusal = on_refusal
        self._settings, self._slot_times, self._waiting = settings, slot_times, WaitingCounts()
        queues.scripts.bind(LimitScripts)  # Now, and not at the first submit, if a header differs.

    def check(
        self,
        new: Sequence[NewJob],
        sender: Identity,
        catalog: CatalogSnapshot,
        now_ms: int,
        *,
        are_lines: bool = False,
        are_held: bool = False,
    ) -> list[LimitStatus]:
        """Check whether all of these jobs, whose models are in the catalog, can be accepted now.

        are_lines: of a batch, which expire by its window: they are not refused by an estimate of their starts.
        are_held: they do not enter a queue yet, so that limits on jobs that wait apply when they are released.

        Returns what is left of the sender's rates, and of the slot time of the jobs' tenants.

        Raises Conflict if the model or tenant accepts no jobs; TooManyRequests, with the time to wait; InvalidJob if a
        job could never be accepted as it is.
        """
        request, context = AdmissionRequest(new, sender, now_ms), self._context(catalog)
        self._run_phase(request, context, Phase.LOCAL)
        phases = (Phase.COUNT,) if are_held else (Phase.READ, Phase.COUNT)
        self._run_redis_phases(request, context, phases, {DEADLINE.name} if are_lines else ())
        return request.statuses

    def check_release(self, held: Sequence[QueuedJob], catalog: CatalogSnapshot, now_ms: int) -> None:
        """Check whether all of these jobs, which are on hold, may enter their queues now.

        Raises TooManyRequests; InvalidJob: so many at once never may.  A job whose model was removed may: it waits.
        """
        new = [
            NewJob(
                id=job.id,
                model=job.model,
                payload="",
                priority=job.priority,
                tenant=job.tenant,
                constraints=job.constraints,
            )
            for job in held
            if job.model in catalog.models
        ]
        if new:
            request = AdmissionRequest(new, LOCAL_IDENTITY, now_ms)
            self._run_redis_phases(request, self._context(catalog), (Phase.READ,), {DEADLINE.name})

    def find_refusal(self, job: NewJob, sender: Identity, catalog: CatalogSnapshot, now_ms: int) -> InvalidJob | None:
        """Return why this job could never be accepted as it is, as far as that is known without Redis.

        Raises as `check`.
        """
        try:
            self._run_phase(AdmissionRequest([job], sender, now_ms), self._context(catalog), Phase.LOCAL)
        except InvalidJob as refusal:
            return refusal
        return None

    def _context(self, catalog: CatalogSnapshot) -> LimitContext:
        return LimitContext(catalog, self._queues, self._settings, self._slot_times, self._waiting)

    def _run_redis_phases(
        self, request: AdmissionRequest, context: LimitContext, phases: Sequence[Phase], without: Collection[str]
    ) -> None:
        """Apply phases that need Redis; none while it is unavailable.  Raises as `_run_phase`."""
        if self._queues.is_unavailable():
            return
        try:
            for phase in phases:
                self._run_phase(request, context, phase, without)
        except RedisError as error:
            self._queues.mark_unavailable()
            log.warning("limits_not_checked", error=str(error))

    def _run_phase(
        self, request: AdmissionRequest, context: LimitContext, phase: Phase, without: Collection[str] = ()
    ) -> None:
        """Apply the limits of a phase, without those of these names.  Raises the refusal of the first, in the order of
        LIMITS.
        """
        checks, refused = self._collect_checks(request, context, phase, without)
        if checks:
            self._run_checks(request, checks)
        if refused is not None:
            limit, refusal = refused
            raise self._count_refusal(limit, request, refusal)

    def _run_checks(self, request: AdmissionRequest, checks: Sequence[tuple[Limit, RedisCheck]]) -> None:
        """Ask Redis for all checks at once, and judge its results.  Raises the first refusal."""
        due = {n: check for n, (_, check) in enumerate(checks) if not self._queues.is_unavailable(check.fleet)}
        results, failed = self._queues.run_each({n: check.command for n, check in due.items()})
        for n, error in failed.items():
            self._skip(due[n].fleet, error)
        for n, result in results.items():
            limit, check = checks[n]
            try:
                check.judge(result)
            except REFUSALS as error:
                raise self._count_refusal(limit, request, error) from None

    def _count_refusal(self, limit: Limit, request: AdmissionRequest, refusal: Exception) -> Exception:
        """Count a refusal, and return it with what is left of the limits that count."""
        if isinstance(refusal, TooManyRequests):
            refusal.rates = tuple(request.statuses)
        self._on_refusal(limit.name, len(request.jobs))
        return refusal

    def _skip(self, fleet: str | None, error: RedisError) -> None:
        """Leave a limit unchecked.  The failure of one fleet, or of one command, keeps no other jobs out of Redis."""
        log.warning("limit_not_checked", fleet=fleet, error=str(error))
        if fleet is not None or isinstance(error, ConnectionError | TimeoutError):
            self._queues.mark_unavailable(fleet, error)

    def _collect_checks(
        self, request: AdmissionRequest, context: LimitContext, phase: Phase, without: Collection[str]
    ) -> tuple[list[tuple[Limit, RedisCheck]], tuple[Limit, Exception] | None]:
        """Return the checks of limits up to the first that refuses without Redis, and its refusal."""
        checks: list[tuple[Limit, RedisCheck]] = []
        for limit in submit_limits.LIMITS:
            if limit.phase is not phase or limit.name in without:
                continue
            try:
                for check in limit.check(request, context):
                    checks.append((limit, check))
            except REFUSALS as refusal:
                return checks, (limit, refusal)
        return checks, None
