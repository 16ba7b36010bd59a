"""A gate that only tests have: a tenant's jobs are at most half of those that wait for a model, once ten do."""

from collections.abc import Iterable

from routing.admission import questions
from routing.admission.gates.gate import AdmissionRequest, Limit, LimitContext, Phase, RedisCheck
from routing.admission.questions import ModelStatus
from slotkeeper.errors import TooManyRequests


def _check(submit: AdmissionRequest, known: LimitContext) -> Iterable[RedisCheck]:
    for (name, tenant), more in submit.by_account.items():
        yield _question(known, name, tenant, more)


def _question(known: LimitContext, model: str, tenant: str, more: int) -> RedisCheck:
    def judge(found: ModelStatus) -> None:
        if found.everyones >= 10 and found.own + more > (found.everyones + more) / 2:
            raise TooManyRequests(
                f"Half of the jobs of model {model!r} are {tenant!r}'s; try again later.", 5.0, model=model
            )

    return RedisCheck(
        questions.model_status_command(known.queues, known.catalog.resolve(model).fleet, model, tenant), judge
    )


GATE = Limit("share", Phase.READ, _check)
