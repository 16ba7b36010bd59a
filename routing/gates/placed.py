"""A job whose constraints no known server meets is refused where its model wants that; elsewhere it waits for one."""

from collections.abc import Iterable

from jobs.errors import InvalidJob
from jobs.record import NewJob
from routing.fleet import Fleet
from routing.gates.gate import Asks, Gate, Known, Question, Submit
from routing.policies import placement
from routing.submission import naming


def is_matched(job: NewJob, fleet: Fleet) -> bool:
    """Whether a known server meets the job's constraints."""
    return not job.needs or bool(placement.eligible(fleet.snapshot().servers.values(), job.model, job.needs))


def _check(submit: Submit, known: Known) -> Iterable[Question]:
    for index, job in enumerate(submit.jobs):
        if known.fleet.model(job.model).config.unmatched == "refuse" and not is_matched(job, known.fleet):
            why = placement.unmatched(job.model, job.needs)
            with naming(index):
                raise InvalidJob("constraints", f"constraints: {why}; change them, or register such a server first")
    return ()


GATE = Gate("placed", "whether a known server meets what a job needs", Asks.NOTHING, _check)
