"""Only so many jobs wait: of a model, or of each of its tenants where its policy keeps those apart."""

from collections.abc import Iterable

from routing.admission import questions
from routing.admission.bounds import bound, refusal, retry_after_s
from routing.admission.gates.gate import Asks, Gate, Known, Question, Submit
from routing.admission.questions import Backlog
from slotkeeper.errors import InvalidJob, TooManyRequests
from slotkeeper.registry.catalog import Model
from slotkeeper.registry.policies import POLICIES


def _check(submit: Submit, known: Known) -> Iterable[Question[Backlog]]:
    for (name, tenant), more in submit.by_account.items():
        model, slots = known.catalog.resolve(name), known.catalog.get().count_slots(name)
        limit = bound(model.config, slots)
        if limit is not None:
            yield _question(known, model, tenant, more, limit, slots)


def _question(known: Known, model: Model, tenant: str, more: int, limit: int, slots: int) -> Question[Backlog]:
    def judge(found: Backlog) -> None:
        by_tenant = POLICIES[model.config.policy].is_by_tenant
        waiting = found.own if by_tenant else found.everyones
        room = limit + (found.free if found.everyones == 0 else 0)
        if waiting + more <= room:
            return
        if 1 < more > room:  # However long it waited, this would never fit.
            raise InvalidJob("jobs", f"{more} jobs at once never fit: model {model.name!r} holds {limit}; split them.")
        raise TooManyRequests(
            refusal(model.name, waiting, limit, tenant if by_tenant else None),
            retry_after_s(waiting + more - room, slots, found.run_ms),
            model=model.name,
            waiting=waiting,
        )

    return Question(questions.backlog(known.queues, model.fleet, model.name, tenant), judge)


GATE = Gate("capacity", Asks.LOOKS, _check)
