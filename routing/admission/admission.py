"""What a submit must pass before it is written down: the gates, asked together."""

from collections.abc import Callable, Sequence

import structlog
from redis.exceptions import RedisError

from routing.admission import gates
from routing.admission.gates.gate import Asks, Gate, Known, Outlook, Question, Submit
from routing.queue.config import RoutingSettings
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
        outlook: Outlook,
        settings: RoutingSettings,
        refused: Callable[[str, int], object] = lambda gate, jobs: None,
    ) -> None:
        self._queues = queues
        self._refused = refused
        self._known = Known(catalog, queues, outlook, settings)

    def check(self, new: Sequence[NewJob], tenant: Tenant | None, now_ms: int) -> None:
        """Whether all of these jobs can be accepted now; two round trips to Redis at most, and most often one or none.

        Raises Conflict: model or tenant takes none; TooMany, with the time to wait; InvalidJob: they could never be
        accepted as they are.
        """
        submit = Submit(new, tenant, now_ms)
        self._pass(submit, Asks.NOTHING)
        if self._queues.away:
            return
        try:
            self._pass(submit, Asks.LOOKS)
            self._pass(submit, Asks.COUNTS)
        except RedisError as error:
            self._queues.note_away()
            log.warning("admission_unchecked", error=str(error))

    def _pass(self, submit: Submit, asks: Asks) -> None:
        """Through all gates that ask Redis this much.  Raises what the first of them refuses."""
        questions, refusing = self._questions(submit, asks)
        answers = self._queues.ask([question.command for _, question in questions]) if questions else []
        for (gate, question), answer in zip(questions, answers, strict=True):
            try:
                question.judge(answer)
            except _REFUSALS:
                self._refused(gate.name, len(submit.jobs))
                raise
        if refusing is not None:
            gate, refusal = refusing
            self._refused(gate.name, len(submit.jobs))
            raise refusal

    def _questions(
        self, submit: Submit, asks: Asks
    ) -> tuple[list[tuple[Gate, Question]], tuple[Gate, Exception] | None]:
        """What gates ask, up to the first that needs no answer to refuse, and its refusal."""
        questions: list[tuple[Gate, Question]] = []
        for gate in gates.GATES:
            try:
                if gate.asks is asks:
                    for question in gate.check(submit, self._known):
                        questions.append((gate, question))
            except _REFUSALS as refusal:
                return questions, (gate, refusal)
        return questions, None
