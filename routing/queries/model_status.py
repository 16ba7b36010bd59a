"""What waits for a model at this moment, and what that means for a job that comes in now."""

from dataclasses import dataclass

from routing.admission import bounds, questions
from routing.dispatch.dispatcher import Dispatcher
from slotkeeper.jobs.values import PRIORITY_DEFAULT, QueuedJob
from slotkeeper.registry.snapshot import Model

_NOBODY = ""  # a tenant and a job that there is not: what is asked for concerns the model alone


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """`run_ms`: mean slot time of the model's latest runs; `work_ms`: how long its slots are busy with what waits.

    None: not known.  `limit`: jobs that may wait, of each tenant under `fair`; None: any number.  `breaker`: closed,
    open, half_open, probing; open until `open_until_ms`, ms since the epoch, 0: it is not open, and by `open_why`, as
    for servers (routing/queries/server_status.py: ServerStatus).
    """

    waiting: int
    run_ms: int | None
    work_ms: int | None
    limit: int | None
    breaker: str
    open_until_ms: int
    open_why: str


def read_model_load(dispatcher: Dispatcher, model: Model) -> QueueLoad:
    """In two calls to Redis, whatever waits.  Raises redis errors."""
    queues = dispatcher.queues
    (found,) = queues.run_all([questions.model_status_command(queues, model.fleet, model.name, _NOBODY)])
    facts = questions.job_status(queues, model.fleet, QueuedJob(_NOBODY, 0, model.name, PRIORITY_DEFAULT, _NOBODY))
    slots = dispatcher.catalog.get().count_slots(model.name)
    known = found.run_ms is not None and slots > 0
    return QueueLoad(
        found.everyones,
        found.run_ms,
        round(found.everyones * found.run_ms / slots) if known and found.run_ms else None,
        bounds.queue_limit(model.config, slots),
        facts.breaker,
        facts.open_until_ms,
        facts.open_why,
    )
