"""A model or a tenant that is being drained or frozen takes no new jobs, nor does a model that is being removed."""

from collections.abc import Iterable

from routing.admission.gates.gate import AdmissionRequest, Limit, LimitContext, Phase, RedisCheck
from slotkeeper.errors import Conflict
from slotkeeper.jobs.closed_models import ModelClosed
from slotkeeper.registry.values import CLOSED_STATES


def _check(submit: AdmissionRequest, known: LimitContext) -> Iterable[RedisCheck]:
    for job in submit.jobs:
        model, catalog = known.catalog.resolve(job.model), known.catalog.get()
        tenant = catalog.tenants.get(job.tenant)
        if catalog.is_being_removed(model.name):
            raise ModelClosed(catalog.closed[model.name].explain(), model=model.name, state="removing")
        for kind, name, it in (("Model", job.model, model), ("Tenant", job.tenant, tenant)):
            if it is not None and it.state in CLOSED_STATES:
                because = f" ({it.reason})" if it.reason else ""
                raise Conflict(
                    f"{kind} {name!r} is {it.state}{because}: no new jobs are accepted until an operator resumes it.",
                    model=job.model,
                    tenant=job.tenant,
                    state=it.state,
                )
    return ()


GATE = Limit("state", Phase.LOCAL, _check)
