"""The waiting room against the record: what was missed is offered, what Redis lost is brought back."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

import structlog
from redis.exceptions import OutOfMemoryError

from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance import quarantined_slots, restore_leases
from routing.maintenance.pass_state import Shortfall, seen_by
from routing.maintenance.rebuild import sync_catalog
from routing.queue.fleets import QueueCounts, isolate_errors
from routing.queue.leases import QUARANTINE_OWNER
from slotkeeper.crash_points import crash_at
from slotkeeper.errors import UnknownModel
from slotkeeper.jobs import ledger
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.outbox import event_reader
from slotkeeper.registry.snapshot import CatalogSnapshot

log = structlog.get_logger(__name__)

_CHUNK = 1000
# How long one sweep reads the record before it leaves the rest to the next.
_READS_S = 1.5
# A fleet that looks whole gets its catalog again after so long.
_SYNC_EVERY_S = 20.0
# On PostgreSQL a row becomes visible when its transaction commits, which may be after that of a later row.
_VISIBLE_WITHIN_S = {"postgresql": 10.0}
# Counting what is queued may take this share of the time; and how long a room that was filled in vain is trusted.
_COUNTING_SHARE = 0.05
_TRUSTED_S, _TRUSTED_MOST_S = 10.0, 300.0


# -- the sweep -------------------------------------------------------------------------------------------------


def sweep(dispatcher: Dispatcher) -> int:
    """Offer whatever can be offered, in every fleet; bring back what a room has lost (SLOT-2, QUEUE-1).

    Answers offers made.  A fleet without jobs costs its share of one round trip.
    """
    catalog = dispatcher.catalog.get()
    rooms = dispatcher.fleets.counts(catalog.fleets())
    until = time.monotonic() + _READS_S
    with isolate_errors("catch_up"):
        _enqueue_from_events(dispatcher, rooms, until)
    with isolate_errors("rebuild"):
        _rebuild_on(dispatcher, [fleet for fleet, room in rooms.items() if not room.is_open], until)
    with isolate_errors("count"):
        _fill_short_queues(dispatcher, catalog)
    _fill_each(dispatcher, set(seen_by(dispatcher).filling) - seen_by(dispatcher).rebuilding, until)
    return _offer_all(dispatcher, catalog)


def _offer_all(dispatcher: Dispatcher, catalog: CatalogSnapshot) -> int:
    made, rooms = 0, dispatcher.fleets.counts(catalog.fleets())
    _sync(dispatcher, catalog, rooms)
    for fleet, room in rooms.items():
        if room.waiting or room.cooling:
            with isolate_errors("offer", fleet=fleet):
                offers = dispatcher.queues.offer_all(fleet)
                dispatcher.publish_offers(offers)
                made += len(offers)
    return made


def _sync(dispatcher: Dispatcher, catalog: CatalogSnapshot, rooms: Mapping[str, QueueCounts]) -> None:
    """Bring the catalog to the rooms, where it has changed or their slots are not those that it says."""
    synced, now = seen_by(dispatcher).synced, time.monotonic()

    def is_due(fleet: str, room: QueueCounts) -> bool:
        version, at = synced.get(fleet, (None, 0.0))
        slots = sum(server.slots for server in catalog.servers_of(fleet) if server.takes_jobs)
        is_whole = room.free + room.cooling + room.taken == slots
        return version != catalog.version or not is_whole or now - at > _SYNC_EVERY_S

    due = [fleet for fleet, room in rooms.items() if is_due(fleet, room)]
    sync_catalog(dispatcher, due, catalog)
    synced.update(dict.fromkeys(due, (catalog.version, now)))


def refresh_fleet(dispatcher: Dispatcher, fleet: str) -> None:
    """After a change of the catalog: bring it to Redis now, and offer what it makes possible."""
    catalog = dispatcher.catalog.refresh()
    if not dispatcher.fleets.counts([fleet])[fleet].is_open:
        rebuild_queue(dispatcher, fleet)
    sync_catalog(dispatcher, [fleet], catalog)
    # A model has another name, by which its jobs have to come in again.
    if not dispatcher.fleets.counts([fleet])[fleet].is_open:
        rebuild_queue(dispatcher, fleet)
    dispatcher.publish_offers(dispatcher.queues.offer_all(fleet))


# -- what was queued and did not reach the room ----------------------------------------------------------------


def _enqueue_from_events(dispatcher: Dispatcher, fleets: Collection[str], until: float) -> None:
    """Enqueue what has been queued since the last sweep, by whatever act: who did it may have died, or found Redis
    away (QUEUE-1).  The outbox tells, so that jobs that have waited for long are not read again."""
    seen, database = seen_by(dispatcher), dispatcher.store.database
    late_s = _VISIBLE_WITHIN_S.get(database.engine.dialect.name, 0.0)
    with database.read() as connection:
        last = event_reader.get_last_id(connection)
    after = seen.after(last)
    while batch := event_reader.list_queued_between(database, after, last, _CHUNK):
        after = batch[-1][0]
        _enqueue(dispatcher, fleets, [job for event, job in batch if event not in seen.events])
        seen.events |= {event for event, _ in batch}
    seen.note_look(last, late_s)
    _scan(dispatcher, fleets, until)


def _scan(dispatcher: Dispatcher, fleets: Collection[str], until: float) -> None:
    """Once in each process's life all queued jobs are looked at."""
    seen = seen_by(dispatcher)
    while seen.scanned is not None:
        batch = dispatcher.store.list_queued(None, seen.scanned, _CHUNK)
        _enqueue(dispatcher, fleets, batch)
        seen.scanned = batch[-1].seq if batch else None
        if time.monotonic() >= until:
            return


def _enqueue(dispatcher: Dispatcher, fleets: Collection[str], jobs: Iterable[QueuedJob]) -> None:
    """Put these jobs into the rooms of `fleets`, where they are missing."""
    for fleet, its in _by_fleet(dispatcher, jobs).items():
        taken = False
        if fleet in fleets:
            with isolate_errors("enqueue", fleet=fleet):
                _fill_queue(dispatcher, fleet, its)
                taken = True
        if not taken:  # It is filled as a whole later.
            seen_by(dispatcher).filling.setdefault(fleet, 0)


def _fill_queue(dispatcher: Dispatcher, fleet: str, jobs: Sequence[QueuedJob]) -> int:
    """Enqueue jobs where they are missing, and return how many were.

    Their commit may be visible before the disk has it: a power cut must not leave a job in Redis alone.
    """
    dispatcher.store.database.sync_for_readers()
    return dispatcher.queues.fill(fleet, jobs)


def _by_fleet(dispatcher: Dispatcher, jobs: Iterable[QueuedJob]) -> dict[str, list[QueuedJob]]:
    found: dict[str, list[QueuedJob]] = defaultdict(list)
    for job in jobs:
        with suppress(UnknownModel):
            found[dispatcher.catalog.resolve(job.model).fleet].append(job)
    return found


# -- counts ----------------------------------------------------------------------------------------------------


def _fill_short_queues(dispatcher: Dispatcher, catalog: CatalogSnapshot) -> None:
    """Fill the room of a fleet in which two looks in a row find fewer jobs than the record has queued."""
    seen, began = seen_by(dispatcher), time.monotonic()
    if began < seen.counted_at or seen.scanned is not None:
        return
    short = short_queues(dispatcher, catalog)
    now = time.monotonic()
    seen.counted_at = now + (now - began) / _COUNTING_SHARE
    for fleet in list(seen.doubts):
        if fleet not in short and now > seen.doubts[fleet].until:
            del seen.doubts[fleet]
    for fleet in short:
        doubt = seen.doubts.setdefault(fleet, Shortfall())
        doubt.looks += 1
        if doubt.looks >= 2 and now >= doubt.until and fleet not in seen.filling:
            # A busy room may look short although it is not: each time it was filled for nothing it is trusted longer.
            doubt.pause_s = min(max(2 * doubt.pause_s, _TRUSTED_S), _TRUSTED_MOST_S)
            doubt.until, doubt.looks = now + doubt.pause_s, 0
            seen.filling[fleet] = 0


def short_queues(dispatcher: Dispatcher, catalog: CatalogSnapshot) -> set[str]:
    """Fleets of which the record has more jobs queued than wait in the room or are under offer, at this moment."""
    queued = ledger.queued_by_model(dispatcher.store.database)
    recorded = {fleet: sum(queued[model] for model in catalog.models_of(fleet)) for fleet in catalog.fleets()}
    rooms = dispatcher.fleets.counts([fleet for fleet, count in recorded.items() if count])
    short = {fleet for fleet, room in rooms.items() if room.is_open and recorded[fleet] > sum(room.waiting.values())}
    leases = dispatcher.leases.list_all(sorted(short))
    running = {job.id for job in dispatcher.store.list_running()} if leases else set()
    for fleet, held in leases.items():
        offered = sum(1 for lease, _ in held if lease.job_id not in running and lease.owner != QUARANTINE_OWNER)
        if recorded[fleet] <= sum(rooms[fleet].waiting.values()) + offered:
            short.discard(fleet)
    return short & leases.keys()


# -- a room that is new ----------------------------------------------------------------------------------------


def reconcile(dispatcher: Dispatcher) -> int:
    """Bring back what the record knows and Redis does not; answers how many jobs (QUEUE-1)."""
    fleets = dispatcher.catalog.refresh().fleets()
    found, rooms = restore_leases.restore(dispatcher), dispatcher.fleets.counts(fleets)
    for fleet in _having_queued(dispatcher, [fleet for fleet, room in rooms.items() if room.is_open]):
        with isolate_errors("reconcile", fleet=fleet):
            found += _fill(dispatcher, fleet)
            crash_at("reconcile_filled")
            dispatcher.publish_offers(dispatcher.queues.offer_all(fleet))
    for fleet in [fleet for fleet, room in rooms.items() if not room.is_open]:
        with isolate_errors("reconcile", fleet=fleet):
            found += rebuild_queue(dispatcher, fleet)
    for fleet in dispatcher.fleets.remove_unknown(dispatcher.catalog.refresh().fleets()):
        log.info("queue_removed", fleet=fleet)
    return found


def rebuild_queue(dispatcher: Dispatcher, fleet: str) -> int:
    """Fill an empty room from the record: leases of running jobs, then queued jobs in order; then open it.

    Until it is open it offers nothing, so no late job overtakes an early one that is not back yet (ORDER-1).
    """
    if not _begin_rebuild(dispatcher, [fleet]):
        return 0
    filled = 0
    try:
        filled = _fill(dispatcher, fleet)
    except OutOfMemoryError as error:  # The sweep fills the rest when what is there has made room.
        log.warning("queue_not_filled", fleet=fleet, error=str(error))
        seen_by(dispatcher).filling[fleet] = 0
    _end_rebuild(dispatcher, [fleet])
    dispatcher.publish_offers(dispatcher.queues.offer_all(fleet))
    return filled


def _rebuild_on(dispatcher: Dispatcher, closed: Collection[str], until: float) -> None:
    """Go on with the rebuilds of rooms that are closed until all are done, or it is `until`.

    However many there are, each step is taken for all of them together, so that all are there again soon after Redis
    was emptied; then those are filled that have something to fill.
    """
    seen = seen_by(dispatcher)
    seen.rebuilding &= set(closed)
    begun = _begin_rebuild(dispatcher, [fleet for fleet in closed if fleet not in seen.rebuilding])
    seen.rebuilding |= set(begun)
    seen.filling.update(dict.fromkeys(_having_queued(dispatcher, begun), 0))
    full = _fill_each(dispatcher, seen.rebuilding & seen.filling.keys(), until)
    # A room for which Redis has no more memory opens with its oldest jobs: to wait would free nothing.
    filled = sorted(seen.rebuilding - seen.filling.keys() | full)
    seen.rebuilding.difference_update(filled)  # Before the end: if that fails, the next sweep begins anew.
    _end_rebuild(dispatcher, filled)


def _begin_rebuild(dispatcher: Dispatcher, fleets: Sequence[str]) -> list[str]:
    """Answers those whose rooms can be filled now."""
    if not fleets:
        return []
    catalog = dispatcher.catalog.get()
    begun = dispatcher.fleets.begin_rebuild(fleets, catalog.database_id)
    for fleet in [fleet for fleet, cleared in begun.items() if cleared]:
        log.warning("queue_forgotten", fleet=fleet, because="Redis, or the record, is not what it was filled from")
    restore_leases.restore_leases(dispatcher, begun)
    quarantined_slots.restore_quarantine(dispatcher, begun)
    restore_leases.restore_offers(dispatcher, begun)
    crash_at("rebuild_leases")
    sync_catalog(dispatcher, list(begun), catalog)
    return list(begun)


def _end_rebuild(dispatcher: Dispatcher, fleets: Sequence[str]) -> None:
    if not fleets:
        return
    crash_at("rebuild_filled")
    # Once more: of runs that began after the first look, their start was on its way when Redis was emptied.
    restore_leases.restore_leases(dispatcher, fleets)
    for fleet in [fleet for fleet, opened in dispatcher.fleets.open(fleets).items() if opened]:
        log.info("queue_rebuilt", fleet=fleet)


def _having_queued(dispatcher: Dispatcher, fleets: Sequence[str]) -> list[str]:
    """Those of the fleets that have queued jobs."""
    catalog = dispatcher.catalog.get()
    found = dispatcher.store.find_models_with_queued([model for fleet in fleets for model in catalog.models_of(fleet)])
    return [fleet for fleet in fleets if not found.isdisjoint(catalog.models_of(fleet))]


def _fill(dispatcher: Dispatcher, fleet: str) -> int:
    """Enqueue all of a fleet's queued jobs; those that are there already stay as they are.

    Answers how many there are.
    """
    models, seq, filled = dispatcher.catalog.get().models_of(fleet), 0, 0
    while batch := dispatcher.store.list_queued(models, seq, _CHUNK):
        _fill_queue(dispatcher, fleet, batch)
        seq, filled = batch[-1].seq, filled + len(batch)
    return filled


def _fill_each(dispatcher: Dispatcher, fleets: Collection[str], until: float) -> set[str]:
    """Go on filling these rooms.  Returns those for which Redis has no more memory; the next sweep goes on there."""
    full: set[str] = set()
    for fleet in sorted(fleets):
        with isolate_errors("fill", fleet=fleet):
            try:
                _fill_on(dispatcher, fleet, until)
            except OutOfMemoryError as error:
                log.warning("queue_not_filled", fleet=fleet, error=str(error))
                full.add(fleet)
    return full


def _fill_on(dispatcher: Dispatcher, fleet: str, until: float) -> None:
    """Go on filling a fleet's room until all is done, or it is `until`."""
    seen, models = seen_by(dispatcher), dispatcher.catalog.get().models_of(fleet)
    while batch := dispatcher.store.list_queued(models, seen.filling[fleet], _CHUNK):
        missing = _fill_queue(dispatcher, fleet, batch)
        if missing and fleet in seen.doubts:
            seen.doubts[fleet].pause_s = 0.0
        seen.filling[fleet] = batch[-1].seq
        if time.monotonic() >= until:
            return
    del seen.filling[fleet]
