"""A job whose constraints no known server meets is refused where its model wants that; elsewhere it waits for one."""

from collections.abc import Iterable

from routing.admission import placement
from routing.admission.gates.gate import Asks, Gate, Known, Question, Submit
from routing.admission.submission import naming
from slotkeeper.errors import InvalidJob
from slotkeeper.jobs.values import NewJob
from slotkeeper.registry.catalog_cache import CatalogCache


def is_matched(job: NewJob, catalog: CatalogCache) -> bool:
    """Whether a known server meets the job's constraints."""
    return not job.constraints or bool(placement.eligible(catalog.get().servers.values(), job.model, job.constraints))


def _check(submit: Submit, known: Known) -> Iterable[Question]:
    for index, job in enumerate(submit.jobs):
        if known.catalog.resolve(job.model).config.unmatched == "refuse" and not is_matched(job, known.catalog):
            why = placement.unmatched(job.model, job.constraints)
            with naming(index):
                raise InvalidJob("constraints", f"constraints: {why}; change them, or register such a server first")
    return ()


GATE = Gate("placed", Asks.NOTHING, _check)
