"""What a submit must pass before it is written down: the gates, asked together."""

from collections.abc import Callable, Sequence

import structlog
from redis.exceptions import RedisError

from routing.admission import gates
from routing.admission.gates.gate import AdmissionRequest, Limit, LimitContext, Phase, RedisCheck
from routing.config import RoutingSettings
from routing.queue.queues import Queues
from slotkeeper.errors import Conflict, InvalidJob, TooManyRequests
from slotkeeper.jobs.values import NewJob
from slotkeeper.registry.catalog_cache import CatalogCache
from slotkeeper.registry.tenants import Tenant

log = structlog.get_logger(__name__)

_REFUSALS = (Conflict, InvalidJob, TooManyRequests)


class Admission:
    """Passes submits through the gates.  `refused`: is told which gate refuses how many jobs."""

    def __init__(
        self,
        queues: Queues,
        catalog: CatalogCache,
        settings: RoutingSettings,
        refused: Callable[[str, int], object] = lambda gate, jobs: None,
    ) -> None:
        self._queues = queues
        self._on_refusal = refused
        self._known = LimitContext(catalog, queues, settings)

    def check(self, new: Sequence[NewJob], tenant: Tenant | None, now_ms: int) -> None:
        """Check whether all of these jobs can be accepted now.  At most two round trips to Redis.

        Raises Conflict if the model or tenant accepts no jobs; TooManyRequests, with the time to wait; InvalidJob if a
        job could never be accepted as it is.
        """
        submit = AdmissionRequest(new, tenant, now_ms)
        self._run_phase(submit, Phase.LOCAL)
        if self._queues.away:
            return
        try:
            self._run_phase(submit, Phase.READ)
            self._run_phase(submit, Phase.COUNT)
        except RedisError as error:
            self._queues.mark_unavailable()
            log.warning("admission_unchecked", error=str(error))

    def _run_phase(self, submit: AdmissionRequest, asks: Phase) -> None:
        """Through all gates that ask Redis this much.  Raises what the first of them refuses."""
        questions, refusing = self._questions(submit, asks)
        answers = self._queues.run_all([question.command for _, question in questions]) if questions else []
        for (gate, question), answer in zip(questions, answers, strict=True):
            try:
                question.judge(answer)
            except _REFUSALS:
                self._on_refusal(gate.name, len(submit.jobs))
                raise
        if refusing is not None:
            gate, refusal = refusing
            self._on_refusal(gate.name, len(submit.jobs))
            raise refusal

    def _questions(
        self, submit: AdmissionRequest, asks: Phase
    ) -> tuple[list[tuple[Limit, RedisCheck]], tuple[Limit, Exception] | None]:
        """What gates ask, up to the first that needs no answer to refuse, and its refusal."""
        questions: list[tuple[Limit, RedisCheck]] = []
        for gate in gates.LIMITS:
            try:
                if gate.asks is asks:
                    for question in gate.check(submit, self._known):
                        questions.append((gate, question))
            except _REFUSALS as refusal:
                return questions, (gate, refusal)
        return questions, None
