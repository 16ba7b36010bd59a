"""The leases of runs, as the record knows them: written again where Redis has lost them."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import structlog

from routing.dispatch.dispatcher import Dispatcher
from routing.dispatch.run_steps import blocking_steps, run_blocking
from routing.maintenance.pass_state import seen_by
from routing.queue.fleets import isolate_errors
from routing.queue.leases import Lease, LeasedJob
from slotkeeper.clock import now_ms
from slotkeeper.jobs.states import State

log = structlog.get_logger(__name__)

_GRACE_MS = 2_000
"""So long a run may have passed its slot on while its end is on the way to the record; then it needs a lease."""


def _recorded(dispatcher: Dispatcher) -> defaultdict[str, list[LeasedJob]]:
    """The leases of all running jobs, by fleet."""
    models = dispatcher.catalog.get().models
    found = defaultdict[str, list[LeasedJob]](list)
    for job in dispatcher.store.list_running():
        if job.model in models and job.lease and job.slot:
            fleet = models[job.model].fleet
            found[fleet].append(LeasedJob(Lease.from_stored_text(fleet, job.id, job.lease, job.slot), job.queued))
    return found


def restore(dispatcher: Dispatcher) -> int:
    """Give each running job its lease again where Redis has none; answers how many had none.

    Its worker, if it lives, renews it and goes on; if not, it expires and is reaped like any other: so a run always
    ends, whoever holds its slot by now.
    """
    return _restore(dispatcher, _without_lease(dispatcher, _recorded(dispatcher)), dispatcher.settings.lease_ms)


def restore_leases(dispatcher: Dispatcher, fleets: Collection[str]) -> None:
    """The same where Redis has lost these fleets' rooms, and they are filled again."""
    for fleet, its in _recorded(dispatcher).items():
        if fleet in fleets:
            with isolate_errors("restore", fleet=fleet):
                _write(dispatcher, fleet, its, dispatcher.settings.lease_ms)


def restore_offers(dispatcher: Dispatcher, fleets: Collection[str]) -> None:
    """Offer queued jobs whose servers may still run them in their slots again, after Redis was emptied.

    On any other server they would run twice at once.  A job whose server was removed is left to be filled in.
    """
    catalog, found = dispatcher.catalog.get(), defaultdict[str, list[LeasedJob]](list)
    for job, slot in dispatcher.store.list_resumable():
        lease = Lease("", job.id, "", "", slot)
        if job.model in catalog.models and lease.server in catalog.servers:
            found[catalog.models[job.model].fleet].append(LeasedJob(lease, job))
    for fleet in found.keys() & set(fleets):
        with isolate_errors("restore", fleet=fleet):
            dispatcher.leases.restore_offers(fleet, found[fleet])


def restore_missed(dispatcher: Dispatcher, *, may_reap: bool = True) -> int:
    """The same for those that have had none for a while: a run passes its slot on before its end is in the record.

    A worker that lives has by then written its lease again itself, and renews this one.  It lasts for two renewals, so
    that one may be late, and no longer: the job of a worker that died in between is run again soon.
    `silence_proves`: not while Redis was away.
    """
    now, since = now_ms(), seen_by(dispatcher).missed
    missing = _without_lease(dispatcher, _recorded(dispatcher))
    since = {run.lease: since.get(run.lease, now) for runs in missing.values() for run in runs}
    seen_by(dispatcher).missed = since
    settings = dispatcher.settings
    missed = {fleet: [run for run in runs if now - since[run.lease] >= _GRACE_MS] for fleet, runs in missing.items()}
    short_ms = min(settings.renew_every_ms * 9 // 4, settings.lease_ms)
    return _restore(dispatcher, missed, short_ms if may_reap else settings.lease_ms)


def restore_for_owners(dispatcher: Dispatcher, owners: Collection[str]) -> set[str]:
    """The same at once for runs of these owners, whose processes have ended; answers which of them had runs.

    A run whose job another has a lease for has none of its own, and waits until that is gone.
    """
    recorded = _recorded(dispatcher)
    theirs = {fleet: [run for run in runs if run.lease.owner in owners] for fleet, runs in recorded.items()}
    _restore(dispatcher, _without_lease(dispatcher, theirs), dispatcher.settings.lease_ms)
    return {run.lease.owner for runs in theirs.values() for run in runs}


def _without_lease(dispatcher: Dispatcher, runs: Mapping[str, Sequence[LeasedJob]]) -> dict[str, list[LeasedJob]]:
    """Those of the record's runs, by fleet, whose jobs have no lease in Redis."""
    # The record first: a lease is there before its run.
    leased = dispatcher.leases.have_lease({fleet: [run.lease.job_id for run in found] for fleet, found in runs.items()})
    return {
        fleet: [run for run, has_one in zip(found, leased[fleet], strict=True) if not has_one]
        for fleet, found in runs.items()
    }


def _restore(dispatcher: Dispatcher, missing: Mapping[str, Sequence[LeasedJob]], lasts_ms: int) -> int:
    written = 0
    for fleet, runs in missing.items():
        if runs:
            with isolate_errors("restore", fleet=fleet):
                restored = _write(dispatcher, fleet, runs, lasts_ms)
                log.warning("leases_were_lost", fleet=fleet, leases=restored)
                written += restored
    return written


def _write(dispatcher: Dispatcher, fleet: str, runs: Sequence[LeasedJob], lasts_ms: int) -> int:
    """Answers for how many jobs there was no lease.  A run that ended after it was read has one then that nobody else
    will free."""
    written = dispatcher.leases.restore(fleet, runs, lasts_ms)
    briefs = dispatcher.store.get_statuses([run.lease.job_id for run in runs])
    steps = blocking_steps(dispatcher)
    for run in runs:
        found = briefs.get(run.lease.job_id)
        if found is not None and found.state is State.QUEUED and found.slot == run.lease.slot:
            run_blocking(steps.reopen_offer(run.lease, found.job.model))
        elif found is None or found.state is not State.RUNNING or found.lease != run.lease.stored_text:
            run_blocking(steps.free(run.lease, return_to_lane=found is not None and found.state is State.QUEUED))
    return written
