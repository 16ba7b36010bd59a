"""Claim offers and start jobs in tests, with the commands and writes that a worker uses."""

from routing.dispatch.dispatcher import ActiveRun, Dispatcher
from routing.dispatch.run_steps import blocking_steps, run_blocking
from routing.queue.leases import Lease, Leases
from routing.queue.queues import Offer
from slotkeeper.jobs.queue_epochs import epoch_of_lease
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import Run


def claim_offer(leases: Leases, offer: Offer, owner: str) -> Offer | None:
    """Claim an open offer for `owner`; None: it is gone, or claimed already."""
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
    price: int | None = None,
) -> Run | None:
    """Store the start of a queued job; None: it is not queued, or the lease is from an older epoch of the queue.

    fleet: None: zimg, or for a lease without an epoch a fleet that never had a queue.
    """
    if fleet is None:
        fleet = "zimg" if epoch_of_lease(lease) else ""
    write = store.start_write(
        *(job_id, server, slot, lease, now_ms, offer, described_by), sent_to=sent_to, fleet=fleet, price=price
    )
    return store.database.commit(write)


def store_remote_id(store: JobStore, job_id: str, attempt: int, remote_id: str | None, now_ms: int) -> bool:
    """Store the server's own id of a running job, or that it has none.  False: this run is over."""
    return store.database.commit(store.remote_id_write(job_id, attempt, remote_id, now_ms))
