"""A job whose constraints no known server meets is refused where its model wants that; elsewhere it waits for one."""

from collections.abc import Iterable

from routing.admission import constraints
from routing.admission.gates.gate import AdmissionRequest, Limit, LimitContext, Phase, RedisCheck
from routing.admission.submission import error_index
from slotkeeper.errors import InvalidJob
from slotkeeper.jobs.values import NewJob
from slotkeeper.registry.catalog_cache import CatalogCache


def has_eligible_server(job: NewJob, catalog: CatalogCache) -> bool:
    """Whether a known server meets the job's constraints."""
    return not job.constraints or bool(
        constraints.eligible_servers(catalog.get().servers.values(), job.model, job.constraints)
    )


def _check(submit: AdmissionRequest, known: LimitContext) -> Iterable[RedisCheck]:
    for index, job in enumerate(submit.jobs):
        if known.catalog.resolve(job.model).config.unmatched == "refuse" and not has_eligible_server(
            job, known.catalog
        ):
            why = constraints.no_server_message(job.model, job.constraints)
            with error_index(index):
                raise InvalidJob("constraints", f"constraints: {why}; change them, or register such a server first")
    return ()


GATE = Limit("placed", Phase.LOCAL, _check)
