"""Each offer looks at the constraints that wait, so there is a bound on how many different ones do."""

from collections.abc import Iterable

from jobs.catalog import Model
from jobs.errors import InvalidJob, TooMany
from routing.gates.gate import Asks, Gate, Known, Question, Submit
from routing.policies.admission import too_various
from routing.queues import Variety

_RETRY_S = 10.0


def _check(submit: Submit, known: Known) -> Iterable[Question[Variety]]:
    for name, tenant in submit.by_account:
        needs = {job.needs for job in submit.jobs if job.needs and (job.model, job.tenant) == (name, tenant)}
        if needs:
            yield _question(known, known.fleet.model(name), tenant, needs)


def _question(known: Known, model: Model, tenant: str, needs: set[str]) -> Question[Variety]:
    of_one, of_all = known.settings.most_constraints, known.settings.most_constraints_of_all

    def judge(found: Variety) -> None:
        for count, limit, whose in ((found.own, of_one, tenant), (found.everyones, of_all, None)):
            if count <= limit:
                continue
            if len(needs) > limit:  # However long it waited, this would never fit.
                raise InvalidJob("jobs", f"{len(needs)} different constraints at once never fit; at most {limit} do.")
            raise TooMany(too_various(model.name, limit, whose), _RETRY_S, model=model.name)

    return Question(known.queues.asking_variety(model.fleet, model.name, tenant, needs), judge)


GATE = Gate("variety", "how many different constraints wait", Asks.LOOKS, _check)
