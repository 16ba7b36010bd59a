"""The leases of runs, as the record knows them: written again where Redis has lost them."""

from collections import defaultdict
from collections.abc import Collection, Sequence

import structlog

from jobs.record import Job, Run
from jobs.states import State
from routing.dispatcher import Dispatcher, Task
from routing.each import alone
from routing.leases import Held, Restored

log = structlog.get_logger(__name__)


def recorded(dispatcher: Dispatcher) -> defaultdict[str, list[Restored]]:
    """The leases of all running jobs, by fleet."""
    models = dispatcher.fleet.snapshot().models
    found = defaultdict[str, list[Restored]](list)
    for job in dispatcher.store.running():
        if job.model in models and job.lease and job.slot:
            lease, owner = job.lease.split(" ", 1)
            fleet = models[job.model].fleet
            found[fleet].append(Restored(Held(fleet, job.id, lease, owner, job.slot), job.waiting))
    return found


def task_of(dispatcher: Dispatcher, job: Job) -> Task | None:
    """The run that `job` shows, as its worker knows it; None: the job does not run."""
    if job.state is not State.RUNNING or not job.lease or not job.slot or not job.server:
        return None
    lease, owner = job.lease.split(" ", 1)
    run = Run(
        job=job.waiting,
        payload=job.payload or "{}",
        attempt=job.attempt,
        failures=job.failures,
        crashes=job.crashes,
        deadline_ms=job.deadline_ms,
        remote_id=job.remote_id,
        sent_ms=None,
        server=job.server,
        slot=job.slot,
        started_ms=job.started_ms or job.created_ms,
        cancel_requested=job.cancel_requested_ms is not None,
        envelope=job.envelope,
    )
    return Task(run, Held(dispatcher.fleet.model(job.model).fleet, job.id, lease, owner, job.slot))


def restore_missing(dispatcher: Dispatcher) -> int:
    """Give each running job its lease again that had none at two looks in a row; answers how many.

    At one look it may be passing its slot on while its end is on the way to the record.

    Its worker, if it lives, renews it and goes on; if not, it expires and is reaped like any other: so a run always
    ends, whoever holds its slot by now.
    """
    written = 0
    # The record first: a lease is there before its run, and goes after it.
    runs = recorded(dispatcher)
    for fleet, leases in dispatcher.leases.all_of(list(runs)).items():
        with alone("restore", fleet=fleet):
            written += _restore(dispatcher, fleet, runs[fleet], {held.job_id for held, _ in leases})
    return written


def _restore(dispatcher: Dispatcher, fleet: str, runs: Sequence[Restored], leased: Collection[str]) -> int:
    lacking = [run for run in runs if run.held.job_id not in leased]
    before, dispatcher.seen.lacking[fleet] = dispatcher.seen.lacking.get(fleet, set()), {it.held for it in lacking}
    missing = [run for run in lacking if run.held in before]
    if not missing:
        return 0
    written = dispatcher.leases.restore(fleet, missing)
    _free_ended(dispatcher, missing)
    if written:
        log.warning("leases_were_lost", fleet=fleet, leases=written)
    return written


def _free_ended(dispatcher: Dispatcher, restored: Sequence[Restored]) -> None:
    """A run that ended after it was read has a lease now that nobody will free."""
    briefs = dispatcher.store.briefs([run.held.job_id for run in restored])
    for run in restored:
        found = briefs.get(run.held.job_id)
        if found is None or found.state is not State.RUNNING or found.lease != run.held.tag:
            dispatcher.free(run.held, back=found is not None and found.state is State.QUEUED)
