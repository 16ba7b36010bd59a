"""Fill an empty queue from the database and open it; bring a changed catalog to Redis."""

from collections.abc import Collection, Mapping, Sequence

import structlog
from redis.exceptions import OutOfMemoryError

from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance import quarantined_slots, restore_leases
from routing.queue.fleets import isolate_errors
from routing.queue.slots import SyncResult
from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.jobs import queue_epochs
from slotkeeper.redis.keys import QUEUE_FORMAT
from slotkeeper.registry.snapshot import CatalogSnapshot

log = structlog.get_logger(__name__)

JOBS_AT_ONCE = 1000
"""Queued jobs that are sent to Redis together."""
_JOBS_PER_PAGE = 5000  # A page asks the database once for each model.


def refresh_fleet(dispatcher: Dispatcher, fleet: str) -> None:
    """After a change of the catalog, bring it to Redis at once, and offer what it makes possible."""
    catalog = dispatcher.catalog.refresh()
    _rebuild_if_closed(dispatcher, fleet)
    sync_catalog(dispatcher, [fleet], catalog)
    _rebuild_if_closed(dispatcher, fleet)  # A model has moved to another fleet, and its jobs have to move.
    dispatcher.publish_offers(dispatcher.queues.offer_all(fleet))


def _rebuild_if_closed(dispatcher: Dispatcher, fleet: str) -> None:
    if not dispatcher.fleets.counts([fleet])[fleet].is_open:
        rebuild_queue(dispatcher, fleet)


def sync_catalog(
    dispatcher: Dispatcher, fleets: Sequence[str], catalog: CatalogSnapshot, repaired: Collection[str] = ()
) -> None:
    """Bring the catalog to these fleets, in few round trips.  `repaired`: those that may lack slots, too.

    A fleet that has a newer version, or belongs to another database, is left as it is; the next sweep fills it.  If its
    version is newer than the database's own, the database was restored from a backup since.
    """
    for fleet, result in dispatcher.slots.sync_all(fleets, catalog, repaired).items():
        with isolate_errors("sync_catalog", fleet=fleet):
            _handle_sync_result(dispatcher, fleet, result, catalog)


def _handle_sync_result(dispatcher: Dispatcher, fleet: str, result: SyncResult, catalog: CatalogSnapshot) -> None:
    if result.answer == "foreign":
        log.warning("queue_of_another_database", fleet=fleet, database_id=catalog.database_id)
        return
    if result.answer == "synced":
        return
    version = dispatcher.catalog.version()
    if version < result.newest and dispatcher.fleets.close(fleet, result.newest):
        log.warning("database_went_back", fleet=fleet, version=version, before=result.newest)


def rebuild_queue(dispatcher: Dispatcher, fleet: str) -> int:
    """Fill an empty queue: leases of running jobs, then queued jobs in order; then open it.  Return how many jobs.

    A closed queue offers nothing, so no late job overtakes an early one that is not in Redis yet (ORDER-1).
    """
    epochs = begin(dispatcher, [fleet])
    if not epochs:
        return 0
    filled = 0
    try:
        filled = fill(dispatcher, fleet)
    except OutOfMemoryError as error:  # The sweep counts too few jobs, and fills the rest when there is memory again.
        log.warning("queue_not_filled", fleet=fleet, error=str(error))
    end(dispatcher, epochs)
    dispatcher.publish_offers(dispatcher.queues.offer_all(fleet))
    return filled


def begin(dispatcher: Dispatcher, fleets: Sequence[str]) -> dict[str, int]:
    """Begin the rebuild of closed queues, and return the epochs of those that can be filled now.

    The epoch is claimed before running jobs are read: what starts afterwards has a lease of this filling.
    """
    if not fleets:
        return {}
    catalog = dispatcher.catalog.get()
    dispatcher.fleets.scripts.reconnect()  # Not by a connection that has stayed with a primary that was replaced.
    begun = dispatcher.fleets.begin_rebuild(fleets, catalog.database_id)
    for fleet in [fleet for fleet, one in begun.items() if one.answer == "cleared"]:
        log.warning("queue_discarded", fleet=fleet, because="Redis, or the database, is not what it was filled from")
    fillings = {fleet: queue_epochs.Filling(one.filling, one.epoch) for fleet, one in begun.items()}
    epochs = queue_epochs.claim(dispatcher.store.database, fillings, QUEUE_FORMAT, now_ms())
    for fleet in sorted(begun.keys() - epochs.keys()):
        log.warning("queue_of_a_newer_release", fleet=fleet)
    crash_at("rebuild_claimed")
    sync_catalog(dispatcher, list(epochs), catalog)  # Leases and jobs get their scores by its policies.
    restore_leases.restore_leases(dispatcher, epochs)
    quarantined_slots.restore_quarantine(dispatcher, epochs)
    restore_leases.restore_offers(dispatcher, epochs)
    crash_at("rebuild_leases")
    return epochs


def end(dispatcher: Dispatcher, epochs: Mapping[str, int]) -> None:
    """Open queues that are filled under these epochs."""
    if not epochs:
        return
    crash_at("rebuild_filled")
    for fleet in [fleet for fleet, opened in dispatcher.fleets.open(epochs).items() if opened]:
        log.info("queue_rebuilt", fleet=fleet, epoch=epochs[fleet])


def fill(dispatcher: Dispatcher, fleet: str) -> int:
    """Enqueue all queued jobs of a fleet that are missing in Redis, and return how many were."""
    models, seq, missing = dispatcher.catalog.get().models_of(fleet), 0, 0
    while page := dispatcher.store.list_queued(models, seq, _JOBS_PER_PAGE):
        for start in range(0, len(page), JOBS_AT_ONCE):
            missing += dispatcher.enqueue_missing(fleet, page[start : start + JOBS_AT_ONCE])
        seq = page[-1].seq
    return missing


def with_queued_jobs(dispatcher: Dispatcher, fleets: Sequence[str]) -> list[str]:
    """Return those of the fleets that have queued jobs in the database."""
    catalog = dispatcher.catalog.get()
    found = dispatcher.store.find_models_with_queued([model for fleet in fleets for model in catalog.models_of(fleet)])
    return [fleet for fleet in fleets if not found.isdisjoint(catalog.models_of(fleet))]
