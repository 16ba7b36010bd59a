"""A model or a tenant that is being drained, paused or frozen takes no new jobs."""

from collections.abc import Iterable

from jobs.errors import Conflict
from jobs.states import CLOSED
from routing.gates.gate import Asks, Gate, Known, Question, Submit


def _check(submit: Submit, known: Known) -> Iterable[Question]:
    for job in submit.jobs:
        model, tenant = known.fleet.model(job.model), known.fleet.snapshot().tenants.get(job.tenant)
        for kind, name, it in (("Model", job.model, model), ("Tenant", job.tenant, tenant)):
            if it is not None and it.state in CLOSED:
                because = f" ({it.reason})" if it.reason else ""
                raise Conflict(
                    f"{kind} {name!r} is {it.state}{because}: no new jobs are accepted until somebody resumes it.",
                    model=job.model,
                    tenant=job.tenant,
                    state=it.state,
                )
    return ()


GATE = Gate("state", "whether model and tenant take new jobs", Asks.NOTHING, _check)
