"""Offer what was missed, and bring queued jobs into Redis that are not there."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

import structlog
from redis.exceptions import OutOfMemoryError

from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance import rebuild
from routing.maintenance.pass_state import Shortfall, SweepState
from routing.queue.fleets import QueueCounts, isolate_errors
from routing.queue.leases import QUARANTINE_OWNER
from routing.queue.presence import Presence
from slotkeeper.crash_points import crash_at
from slotkeeper.errors import UnknownModel
from slotkeeper.jobs import ledger, queue_epochs
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.outbox import event_reader
from slotkeeper.registry.snapshot import CatalogSnapshot

log = structlog.get_logger(__name__)

_READ_S = 1.5  # One sweep reads the database for so long, and leaves the rest to the next.
_NEVER = (None, 0.0, 0.0)
_REPAIR_S_PER_SERVER = 0.06  # A repair looks at each slot: 0.04 ms of Redis a server.
_SYNC_EVERY_S = 20.0  # A fleet gets its catalog, and its times are checked, at least so often.
# On PostgreSQL a row becomes visible when its transaction commits, which may be after that of a later row.
_VISIBLE_WITHIN_S = {"postgresql": 10.0}
_COUNTING_SHARE = 0.05  # of the time, at most, for counting queued jobs
_TRUSTED_S, _TRUSTED_MOST_S = 10.0, 300.0  # how long a queue is trusted that was filled in vain


class Sweeper:
    """Sweeps all fleets.  It remembers what it has seen, so that a sweep reads only what is new."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.state = SweepState()

    def sweep(self) -> int:
        """Offer whatever can be offered, and bring back what Redis has lost (SLOT-2, QUEUE-1); return offers made.

        A fleet without jobs costs its share of one round trip.
        """
        dispatcher, state = self._dispatcher, self.state
        catalog = dispatcher.catalog.get()
        counts = dispatcher.fleets.counts(catalog.fleets())
        until = time.monotonic() + _READ_S
        with isolate_errors("stale_queues"):
            self._leave_stale_queues(counts)
        with isolate_errors("enqueue_from_events"):
            self._enqueue_from_events(counts, catalog)
        with isolate_errors("rebuild"):
            self._continue_rebuilds([fleet for fleet, count in counts.items() if not count.is_open], until)
        with isolate_errors("count"):
            self._fill_short_queues(catalog)
        self._continue_filling(state.filling.keys() - state.rebuilding.keys(), until)
        return self._offer_all(catalog)

    def reconcile(self) -> int:
        """Fill queues that count fewer jobs than the database, remove unknown fleets; return how many jobs were added.

        The sweep waits for a second count, and pauses after it has filled a queue in vain; this does neither (QUEUE-1).
        """
        dispatcher, found = self._dispatcher, 0
        catalog = dispatcher.catalog.refresh()
        for fleet, count in dispatcher.fleets.counts(catalog.fleets()).items():
            if not count.is_open:
                with isolate_errors("reconcile", fleet=fleet):
                    found += rebuild.rebuild_queue(dispatcher, fleet)
        for fleet in sorted(short_queues(dispatcher, catalog)):
            with isolate_errors("reconcile", fleet=fleet):
                found += rebuild.fill(dispatcher, fleet)
                crash_at("reconcile_filled")
                dispatcher.publish_offers(dispatcher.queues.offer_all(fleet))
        for fleet in dispatcher.fleets.remove_unknown(dispatcher.catalog.refresh().fleets()):
            log.info("queue_removed", fleet=fleet)
        return found

    def _leave_stale_queues(self, counts: Mapping[str, QueueCounts]) -> None:
        """Leave a Redis whose queue is older than the newest that was filled: its primary was replaced.

        By the next sweep the connections are new.  A Redis that still has the older queue is the right one, such as
        one that was restored, and its queue is filled again.
        """
        dispatcher, state = self._dispatcher, self.state
        newest = queue_epochs.read_numbers(dispatcher.store.database)
        stale = {fleet: count.epoch for fleet, count in counts.items() if count.epoch < newest.get(fleet, 0)}
        stale = {fleet: epoch for fleet, epoch in stale.items() if counts[fleet].is_open}
        for fleet in [fleet for fleet, epoch in stale.items() if state.stale.get(fleet) == epoch]:
            if dispatcher.fleets.discard(fleet, stale[fleet]):
                log.warning("stale_queue_discarded", fleet=fleet, epoch=stale[fleet], newest=newest[fleet])
        if stale:
            dispatcher.fleets.scripts.reconnect()
        state.stale = stale

    # -- offers ----------------------------------------------------------------------------------------------

    def _offer_all(self, catalog: CatalogSnapshot) -> int:
        dispatcher, made = self._dispatcher, 0
        counts = dispatcher.fleets.counts(catalog.fleets())
        self._sync_catalog(catalog, counts)
        for fleet, count in counts.items():
            if count.waiting or count.cooling:
                with isolate_errors("offer", fleet=fleet):
                    offers = dispatcher.queues.offer_all(fleet)
                    dispatcher.publish_offers(offers)
                    made += len(offers)
        return made

    def _sync_catalog(self, catalog: CatalogSnapshot, counts: Mapping[str, QueueCounts]) -> None:
        """Bring the catalog to fleets that may have another; end what lasts too long, as their clock was set back.

        Due are fleets with an older version or other slots than the catalog, and now and then all the others.
        """
        dispatcher, synced, now = self._dispatcher, self.state.synced, time.monotonic()
        with_nodes = {server.fleet for server in catalog.servers.values() if server.node}
        present = Presence(dispatcher.slots.scripts).list_present(with_nodes) if with_nodes else {}

        def is_complete(fleet: str, count: QueueCounts) -> bool:
            slots = sum(
                server.slots
                for server in catalog.servers_of(fleet)
                if server.takes_jobs and (server.node is None or server.name in present.get(fleet, ()))
            )
            return count.free + count.cooling + count.taken == slots

        def is_due(fleet: str) -> bool:
            version, synced_at, _ = synced.get(fleet, _NEVER)
            return version != catalog.version or now - synced_at > _SYNC_EVERY_S

        def is_repair_due(fleet: str) -> bool:
            _, _, repaired_at = synced.get(fleet, _NEVER)
            return now - repaired_at > max(_SYNC_EVERY_S, _REPAIR_S_PER_SERVER * len(catalog.servers_of(fleet)))

        repaired = {fleet for fleet, count in counts.items() if not is_complete(fleet, count) or is_repair_due(fleet)}
        due = [fleet for fleet in counts if fleet in repaired or is_due(fleet)]
        for fleet, times in dispatcher.fleets.clamp_times(due).items():
            if times:
                log.warning("times_clamped", fleet=fleet, how_many=times)
        rebuild.sync_catalog(dispatcher, due, catalog, repaired)
        for fleet in due:
            _, _, repaired_at = synced.get(fleet, _NEVER)
            synced[fleet] = (catalog.version, now, now if fleet in repaired else repaired_at)

    # -- jobs that were queued and are not in Redis ----------------------------------------------------------

    def _enqueue_from_events(self, fleets: Collection[str], catalog: CatalogSnapshot) -> None:
        """Enqueue what was queued since the last sweep: the process that did it may have died, or found Redis away.

        The outbox names these jobs, so that those which have waited for long are not read again (QUEUE-1).
        """
        state, database = self.state, self._dispatcher.store.database
        with database.read() as connection:
            last = event_reader.get_last_id(connection)
        after = state.read_after(last)
        if not state.has_begun:
            state.filling |= dict.fromkeys(rebuild.with_queued_jobs(self._dispatcher, catalog.fleets()), 0)
            state.has_begun = True
        while batch := event_reader.list_queued_between(database, after, last, rebuild.JOBS_AT_ONCE):
            after = batch[-1][0]
            self._enqueue(fleets, [job for event, job in batch if event not in state.events])
            state.events |= {event for event, _ in batch}
        state.note_read(last, _VISIBLE_WITHIN_S.get(database.engine.dialect.name, 0.0))

    def _enqueue(self, fleets: Collection[str], jobs: Iterable[QueuedJob]) -> None:
        """Enqueue jobs of `fleets` that are missing in Redis; other fleets are filled as a whole later."""
        for fleet, queued in self._by_fleet(jobs).items():
            enqueued = False
            if fleet in fleets:
                with isolate_errors("enqueue", fleet=fleet):
                    self._dispatcher.enqueue_missing(fleet, queued)
                    enqueued = True
            if not enqueued:
                self.state.filling.setdefault(fleet, 0)

    def _by_fleet(self, jobs: Iterable[QueuedJob]) -> dict[str, list[QueuedJob]]:
        found: dict[str, list[QueuedJob]] = defaultdict(list)
        for job in jobs:
            with suppress(UnknownModel):
                found[self._dispatcher.catalog.resolve(job.model).fleet].append(job)
        return found

    # -- counts ----------------------------------------------------------------------------------------------

    def _fill_short_queues(self, catalog: CatalogSnapshot) -> None:
        """Fill the queue of a fleet in which two passes in a row count fewer jobs than the database has.

        This is the only check that finds a job which Redis lost without being emptied.
        """
        state, began = self.state, time.monotonic()
        if began < state.counted_at:
            return
        short = short_queues(self._dispatcher, catalog)
        now = time.monotonic()
        state.counted_at = now + (now - began) / _COUNTING_SHARE
        for fleet in list(state.shortfalls):
            if fleet not in short and now > state.shortfalls[fleet].until:
                del state.shortfalls[fleet]
        for fleet in short:
            shortfall = state.shortfalls.setdefault(fleet, Shortfall())
            shortfall.passes += 1
            if shortfall.passes >= 2 and now >= shortfall.until and fleet not in state.filling:
                # A busy queue may look short although it is not: after each useless filling it is trusted longer.
                shortfall.pause_s = min(max(2 * shortfall.pause_s, _TRUSTED_S), _TRUSTED_MOST_S)
                shortfall.until, shortfall.passes = now + shortfall.pause_s, 0
                state.filling[fleet] = 0

    # -- queues that are rebuilt or filled -------------------------------------------------------------------

    def _continue_rebuilds(self, closed: Collection[str], until: float) -> None:
        """Continue the rebuilds of closed queues until all are done, or the time is over.

        Each step is taken for all fleets together, however many there are, so that all are open again soon after Redis
        was emptied; then those are filled that have queued jobs.
        """
        dispatcher, state = self._dispatcher, self.state
        state.rebuilding = {fleet: epoch for fleet, epoch in state.rebuilding.items() if fleet in closed}
        begun = rebuild.begin(dispatcher, [fleet for fleet in closed if fleet not in state.rebuilding])
        state.rebuilding |= begun
        state.filling.update(dict.fromkeys(rebuild.with_queued_jobs(dispatcher, list(begun)), 0))
        full = self._continue_filling(state.rebuilding.keys() & state.filling.keys(), until)
        # A queue for which Redis has no more memory opens with its oldest jobs: waiting would free nothing.
        filled = sorted(state.rebuilding.keys() - state.filling.keys() | full)
        # Removed before `end`: if that fails, the next sweep begins again.
        rebuild.end(dispatcher, {fleet: state.rebuilding.pop(fleet) for fleet in filled})

    def _continue_filling(self, fleets: Collection[str], until: float) -> set[str]:
        """Continue to fill queues.  Return those for which Redis has no more memory; the next sweep continues there."""
        full: set[str] = set()
        for fleet in sorted(fleets):
            with isolate_errors("fill", fleet=fleet):
                try:
                    self._fill_until(fleet, until)
                except OutOfMemoryError as error:
                    log.warning("queue_not_filled", fleet=fleet, error=str(error))
                    full.add(fleet)
        return full

    def _fill_until(self, fleet: str, until: float) -> None:
        """Fill a fleet's queue until it is complete, or the time is over."""
        dispatcher, state = self._dispatcher, self.state
        models = dispatcher.catalog.get().models_of(fleet)
        while batch := dispatcher.store.list_queued(models, state.filling[fleet], rebuild.JOBS_AT_ONCE):
            missing = dispatcher.enqueue_missing(fleet, batch)
            if missing and fleet in state.shortfalls:
                state.shortfalls[fleet].pause_s = 0.0
            state.filling[fleet] = batch[-1].seq
            if time.monotonic() >= until:
                return
        del state.filling[fleet]


def short_queues(dispatcher: Dispatcher, catalog: CatalogSnapshot) -> set[str]:
    """Return fleets of which the database has more queued jobs than Redis has waiting or offered now."""
    queued = ledger.queued_by_model(dispatcher.store.database)
    stored = {fleet: sum(queued[model] for model in catalog.models_of(fleet)) for fleet in catalog.fleets()}
    counts = dispatcher.fleets.counts([fleet for fleet, count in stored.items() if count])
    short = {fleet for fleet, count in counts.items() if count.is_open and stored[fleet] > sum(count.waiting.values())}
    leases = dispatcher.leases.list_all(sorted(short))
    running = {job.id for job in dispatcher.store.list_running()} if leases else set()
    for fleet, held in leases.items():
        offered = sum(1 for lease, _ in held if lease.job_id not in running and lease.owner != QUARANTINE_OWNER)
        if stored[fleet] <= sum(counts[fleet].waiting.values()) + offered:
            short.discard(fleet)
    return short & leases.keys()
