"""The registry and the rules, brought to the fleets' rooms; and what a room tells of the record it was filled from."""

from collections.abc import Sequence

import structlog

from jobs.catalog import Snapshot
from routing.dispatcher import Dispatcher
from routing.each import alone
from routing.slots import Synced

log = structlog.get_logger(__name__)


def bring(dispatcher: Dispatcher, fleet: str, catalog: Snapshot) -> bool:
    """Bring the catalog to the room.  False: it has a newer one, or is not this record's; then the next sweep fills it.

    A room that has a newer version than the record itself was filled before the record was put back to a backup.
    """
    return _heed(dispatcher, fleet, dispatcher.slots.sync(fleet, catalog), catalog)


def bring_all(dispatcher: Dispatcher, fleets: Sequence[str], catalog: Snapshot) -> None:
    """The same for many, in few round trips."""
    for fleet, synced in dispatcher.slots.sync_all(fleets, catalog).items():
        with alone("bring", fleet=fleet):
            _heed(dispatcher, fleet, synced, catalog)


def _heed(dispatcher: Dispatcher, fleet: str, found: Synced, catalog: Snapshot) -> bool:
    if found.foreign:
        log.warning("room_of_another_record", fleet=fleet, record=catalog.record)
        return False
    if found.newer is None:
        return True
    version = dispatcher.fleet.version()
    if version < found.newer and dispatcher.slots.close(fleet, found.newer):
        log.warning("record_went_back", fleet=fleet, version=version, before=found.newer)
    return False
