"""Only so many jobs wait: of a model, or of each of its tenants where its policy keeps those apart."""

from collections.abc import Iterable

from routing.admission import questions
from routing.admission.bounds import queue_limit, refusal, retry_after_s
from routing.admission.gates.gate import AdmissionRequest, Limit, LimitContext, Phase, RedisCheck
from routing.admission.questions import ModelStatus
from slotkeeper.errors import InvalidJob, TooManyRequests
from slotkeeper.registry.policies import POLICIES
from slotkeeper.registry.snapshot import Model


def _check(submit: AdmissionRequest, known: LimitContext) -> Iterable[RedisCheck[ModelStatus]]:
    for (name, tenant), more in submit.by_account.items():
        model, slots = known.catalog.resolve(name), known.catalog.get().count_slots(name)
        limit = queue_limit(model.config, slots)
        if limit is not None:
            yield _question(known, model, tenant, more, limit, slots)


def _question(
    known: LimitContext, model: Model, tenant: str, more: int, limit: int, slots: int
) -> RedisCheck[ModelStatus]:
    def judge(found: ModelStatus) -> None:
        by_tenant = POLICIES[model.config.policy].is_by_tenant
        waiting = found.own if by_tenant else found.everyones
        room = limit + (found.free if found.everyones == 0 else 0)
        if waiting + more <= room:
            return
        if 1 < more > room:  # However long it waited, this would never fit.
            raise InvalidJob(
                "jobs", f"{more} jobs at once exceed the limit of model {model.name!r}, which is {limit}; split them."
            )
        raise TooManyRequests(
            refusal(model.name, waiting, limit, tenant if by_tenant else None),
            retry_after_s(waiting + more - room, slots, found.run_ms),
            model=model.name,
            waiting=waiting,
        )

    return RedisCheck(questions.model_status_command(known.queues, model.fleet, model.name, tenant), judge)


GATE = Limit("capacity", Phase.READ, _check)
