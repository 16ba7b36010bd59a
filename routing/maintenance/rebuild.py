"""The registry and the rules, brought to the fleets' rooms; and what a room tells of the record it was filled from."""

from collections.abc import Sequence

import structlog

from routing.dispatch.dispatcher import Dispatcher
from routing.queue.fleets import isolate_errors
from routing.queue.slots import SyncResult
from slotkeeper.registry.snapshot import CatalogSnapshot

log = structlog.get_logger(__name__)


def sync_catalog(dispatcher: Dispatcher, fleets: Sequence[str], catalog: CatalogSnapshot) -> None:
    """Bring the catalog to these fleets' rooms, in few round trips.

    One that has a newer version, or is not this record's, is left as it is; the next sweep fills it.  A room that has a
    newer version than the record itself was filled before the record was put back to a backup.
    """
    for fleet, synced in dispatcher.slots.sync_all(fleets, catalog).items():
        with isolate_errors("bring", fleet=fleet):
            _handle_sync_result(dispatcher, fleet, synced, catalog)


def _handle_sync_result(dispatcher: Dispatcher, fleet: str, found: SyncResult, catalog: CatalogSnapshot) -> None:
    if found.answer == "foreign":
        log.warning("queue_of_another_database", fleet=fleet, record=catalog.database_id)
        return
    if found.answer == "synced":
        return
    version = dispatcher.catalog.version()
    if version < found.newest and dispatcher.fleets.close(fleet, found.newest):
        log.warning("database_went_back", fleet=fleet, version=version, before=found.newest)
