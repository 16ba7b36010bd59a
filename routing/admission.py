"""What a submit must pass before it is written down: the gates, asked together."""

from collections.abc import Sequence

import structlog
from redis.exceptions import RedisError

from jobs.errors import Conflict, InvalidJob, TooMany
from jobs.record import NewJob
from jobs.tenants import Tenant
from routing import gates
from routing.config import RoutingSettings
from routing.fleet import Fleet
from routing.gates.gate import Asks, Known, Question, Submit
from routing.observer import Observer
from routing.queues import Queues

log = structlog.get_logger(__name__)


class Admission:
    """Passes submits through the gates."""

    def __init__(self, queues: Queues, fleet: Fleet, observer: Observer, settings: RoutingSettings) -> None:
        self._queues = queues
        self._known = Known(fleet, queues, observer, settings)

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
        questions, refusal = self._questions(submit, asks)
        answers = self._queues.ask([question.command for question in questions]) if questions else []
        for question, answer in zip(questions, answers, strict=True):
            question.judge(answer)
        if refusal is not None:
            raise refusal

    def _questions(self, submit: Submit, asks: Asks) -> tuple[list[Question], Exception | None]:
        """What gates ask, up to the first that needs no answer to refuse, and its refusal."""
        questions: list[Question] = []
        try:
            for gate in gates.GATES:
                if gate.asks is asks:
                    for question in gate.check(submit, self._known):
                        questions.append(question)
        except (Conflict, InvalidJob, TooMany) as refusal:
            return questions, refusal
        return questions, None
