"""Claims and starts for tests, by the commands and writes with which a worker claims and starts."""

from routing.dispatch.dispatcher import ActiveRun, Dispatcher
from routing.dispatch.run_steps import blocking_steps, run_blocking
from routing.queue.leases import Lease, Leases
from routing.queue.queues import Offer
from slotkeeper.jobs.queue_epochs import epoch_of_lease
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import Run


def claim_offer(leases: Leases, offer: Offer, owner: str) -> Offer | None:
    """Make an open offer `owner`'s own; None: it is gone, another's, or its own already."""
    return leases.scripts.run(leases.claim_command(offer, owner))


def begin_run(dispatcher: Dispatcher, offer: Offer, owner: str) -> ActiveRun | None:
    """Begin the offered job as a worker does; None: the offer or the job is gone.  An open offer is claimed first."""
    steps = blocking_steps(dispatcher)
    claimed = offer if offer.owner == owner else run_blocking(steps.claim(offer, owner))
    return None if claimed is None else run_blocking(steps.start(claimed, Lease.from_offer(claimed, owner)))


def store_start(
    store: JobStore,
    job_id: str,
    server: str,
    slot: str,
    lease: str,
    now_ms: int,
    offer: int = 0,
    described_by: str | None = None,
    sent_to: str | None = None,
    fleet: str | None = None,
) -> Run | None:
    """Give a queued job to the caller; None: it is not queued, or its lease is of an older queue of the fleet.

    fleet: None: zimg, or, for a lease without an epoch, one that never had a queue.
    """
    if fleet is None:
        fleet = "zimg" if epoch_of_lease(lease) else ""
    write = store.start_write(job_id, server, slot, lease, now_ms, offer, described_by, sent_to=sent_to, fleet=fleet)
    return store.database.commit(write)


def store_remote_id(store: JobStore, job_id: str, attempt: int, remote_id: str, now_ms: int) -> bool:
    """Store the server's own id of a running job.  False: this run is over."""
    return store.database.commit(store.remote_id_write(job_id, attempt, remote_id, now_ms))
