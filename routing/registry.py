"""The registry and the rules, brought to a fleet's room; and what the room tells of the record it was filled from."""

import structlog

from jobs.catalog import Snapshot
from routing.dispatcher import Dispatcher

log = structlog.get_logger(__name__)


def bring(dispatcher: Dispatcher, fleet: str, catalog: Snapshot) -> bool:
    """Bring the catalog to the room.  False: it has a newer one, or is not this record's; then the next sweep fills it.

    A room that has a newer version than the record itself was filled before the record was put back to a backup.
    """
    found = dispatcher.slots.sync(fleet, catalog)
    if found.foreign:
        log.warning("room_of_another_record", fleet=fleet, record=catalog.record)
        return False
    if found.newer is None:
        return True
    version = dispatcher.fleet.read().version
    if version < found.newer and dispatcher.slots.close(fleet, found.newer):
        log.warning("record_went_back", fleet=fleet, version=version, before=found.newer)
    return False
