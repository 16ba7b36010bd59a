"""Each offer looks at the constraints that wait, so there is a bound on how many different ones do."""

from collections.abc import Iterable

from routing.admission import questions
from routing.admission.bounds import too_various
from routing.admission.gates.gate import AdmissionRequest, Limit, LimitContext, Phase, RedisCheck
from routing.admission.questions import ConstraintCounts
from slotkeeper.errors import InvalidJob, TooManyRequests
from slotkeeper.registry.snapshot import Model

_RETRY_S = 10.0


def _check(submit: AdmissionRequest, known: LimitContext) -> Iterable[RedisCheck[ConstraintCounts]]:
    for name, tenant in submit.by_account:
        constraints = {
            job.constraints for job in submit.jobs if job.constraints and (job.model, job.tenant) == (name, tenant)
        }
        if constraints:
            yield _question(known, known.catalog.resolve(name), tenant, constraints)


def _question(known: LimitContext, model: Model, tenant: str, constraints: set[str]) -> RedisCheck[ConstraintCounts]:
    of_one, of_all = known.settings.most_constraints, known.settings.most_constraints_of_all

    def judge(found: ConstraintCounts) -> None:
        for count, limit, whose in ((found.own, of_one, tenant), (found.everyones, of_all, None)):
            if count <= limit:
                continue
            if len(constraints) > limit:  # However long it waited, this would never fit.
                raise InvalidJob(
                    "jobs",
                    f"{len(constraints)} different constraints at once are too many; at most {limit} are accepted.",
                )
            raise TooManyRequests(too_various(model.name, limit, whose), _RETRY_S, model=model.name)

    return RedisCheck(
        questions.count_constraints_command(known.queues, model.fleet, model.name, tenant, constraints), judge
    )


GATE = Limit("variety", Phase.READ, _check)
