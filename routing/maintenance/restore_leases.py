"""Write leases of running jobs again that Redis has lost."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import structlog

from routing.dispatch.dispatcher import Dispatcher
from routing.dispatch.run_steps import blocking_steps, run_blocking
from routing.maintenance.pass_state import ReaperState
from routing.queue.fleets import isolate_errors
from routing.queue.leases import Lease, LeasedJob
from slotkeeper.clock import clock
from slotkeeper.jobs.states import State

log = structlog.get_logger(__name__)

_GRACE_MS = 2_000
"""For so long a run may have released its slot before its end is stored; after that it needs a lease."""


def restore_leases(dispatcher: Dispatcher, fleets: Collection[str]) -> None:
    """Write all leases of running jobs of these fleets, whose queues are being rebuilt."""
    for fleet, runs in _stored_leases(dispatcher).items():
        if fleet in fleets:
            with isolate_errors("restore_leases", fleet=fleet):
                _write(dispatcher, fleet, runs, dispatcher.settings.lease_ms)


def restore_offers(dispatcher: Dispatcher, epochs: Mapping[str, int]) -> None:
    """After Redis was emptied, offer queued jobs again in the slots whose servers may still run them.

    On another server they would run twice at once.  A job whose server was removed is left to be filled in.
    `epochs`: of the queues that are being filled, by fleet.
    """
    catalog, found = dispatcher.catalog.get(), defaultdict[str, list[LeasedJob]](list)
    for job, slot in dispatcher.store.list_resumable():
        lease = Lease("", job.id, "", "", slot)
        if job.model in catalog.models and lease.server in catalog.servers:
            found[catalog.models[job.model].fleet].append(LeasedJob(lease, job))
    for fleet in found.keys() & epochs.keys():
        with isolate_errors("restore_offers", fleet=fleet):
            dispatcher.leases.restore_offers(fleet, found[fleet], epochs[fleet])


def restore_for_owners(dispatcher: Dispatcher, owners: Collection[str]) -> set[str]:
    """Restore leases of these owners, whose processes have ended; return which of them have runs.

    A run whose job another process has a lease for gets none, and waits until that lease is gone.
    """
    stored = _stored_leases(dispatcher)
    theirs = {fleet: [run for run in runs if run.lease.owner in owners] for fleet, runs in stored.items()}
    _restore(dispatcher, _without_lease(dispatcher, theirs), dispatcher.settings.lease_ms)
    return {run.lease.owner for runs in theirs.values() for run in runs}


class MissingLeases:
    """Restores leases that Redis has not had for a while: a run releases its slot before its end is stored."""

    def __init__(self, dispatcher: Dispatcher, state: ReaperState) -> None:
        self._dispatcher, self._state = dispatcher, state

    def restore(self, *, may_reap: bool = True) -> int:
        """Restore leases that have been missing for _GRACE_MS, and return how many.

        A living worker has restored its lease itself by then, and renews this one.  It lasts for two renewals and no
        longer, so that the job of a worker that has died runs again soon.  may_reap: False while living workers could
        not renew; then it lasts as long as any lease.
        """
        now, since, settings = clock.steady_ms(), self._state.missing, self._dispatcher.settings
        missing = _without_lease(self._dispatcher, _stored_leases(self._dispatcher))
        since = {run.lease: since.get(run.lease, now) for runs in missing.values() for run in runs}
        self._state.missing = since
        due = {fleet: [run for run in runs if now - since[run.lease] >= _GRACE_MS] for fleet, runs in missing.items()}
        short_ms = min(settings.renew_every_ms * 9 // 4, settings.lease_ms)
        return _restore(self._dispatcher, due, short_ms if may_reap else settings.lease_ms)


def _stored_leases(dispatcher: Dispatcher) -> defaultdict[str, list[LeasedJob]]:
    """Return the leases of all running jobs as the database has them, by fleet."""
    models = dispatcher.catalog.get().models
    found = defaultdict[str, list[LeasedJob]](list)
    for job in dispatcher.store.list_running():
        if job.model in models and job.lease and job.slot:
            fleet = models[job.model].fleet
            found[fleet].append(LeasedJob(Lease.from_stored_text(fleet, job.id, job.lease, job.slot), job.queued))
    return found


def _without_lease(dispatcher: Dispatcher, runs: Mapping[str, Sequence[LeasedJob]]) -> dict[str, list[LeasedJob]]:
    """Return those runs, by fleet, whose jobs have no lease in Redis.

    The runs were read before: a lease exists before its run.
    """
    leased = dispatcher.leases.have_lease({fleet: [run.lease.job_id for run in found] for fleet, found in runs.items()})
    return {
        fleet: [run for run, has_one in zip(found, leased[fleet], strict=True) if not has_one]
        for fleet, found in runs.items()
    }


def _restore(dispatcher: Dispatcher, missing: Mapping[str, Sequence[LeasedJob]], ttl_ms: int) -> int:
    restored = 0
    for fleet, runs in missing.items():
        if runs:
            with isolate_errors("restore_leases", fleet=fleet):
                written = _write(dispatcher, fleet, runs, ttl_ms)
                log.warning("leases_were_lost", fleet=fleet, leases=written)
                restored += written
    return restored


def _write(dispatcher: Dispatcher, fleet: str, runs: Sequence[LeasedJob], ttl_ms: int) -> int:
    """Write leases, and return how many were missing.

    A run that has ended since it was read has one now that no other process would free: give it up.
    """
    written = dispatcher.leases.restore(fleet, runs, ttl_ms)
    statuses = dispatcher.store.get_statuses([run.lease.job_id for run in runs])
    for run in runs:
        status = statuses.get(run.lease.job_id)
        if status is None or status.state is not State.RUNNING or status.lease != run.lease.stored_text:
            run_blocking(blocking_steps(dispatcher).give_up(run.lease))
    return written
