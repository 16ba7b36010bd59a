"""Removals of models and servers: what the database began is ended, and Redis follows.

Whatever was cut in between is ended by the next turn: each asks the record anew what is to be done, and a room follows
the catalog by itself (lua/sync_catalog.lua).
"""

from collections.abc import Sequence

import structlog
from redis.exceptions import RedisError

from routing.dispatch.decision import Decision
from routing.dispatch.dispatcher import Dispatcher, active_run_of
from routing.dispatch.run_steps import end_run
from routing.maintenance.sweep import refresh_fleet
from routing.queue.fleets import isolate_errors
from slotkeeper.clock import now_ms
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.closed_models import ClosingReason
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.values import Job, JobError, Quarantine
from slotkeeper.registry import catalog_removal
from slotkeeper.registry.catalog_removal import Removal

log = structlog.get_logger(__name__)


def finish_removals(dispatcher: Dispatcher) -> list[Removal]:
    """End the removals that nothing is in the way of any more; returns those."""
    snapshot = dispatcher.catalog.refresh()
    ended: list[Removal] = []
    for name, closed in snapshot.closed.items():
        if closed.because is ClosingReason.REMOVING:
            with isolate_errors("remove_model", model=name):
                if (it := catalog_removal.finish_model_removal(dispatcher.store.database, name, now_ms())) is not None:
                    forget_model(dispatcher, it)
                    ended.append(it)
    for server in snapshot.servers.values():
        if server.leaving_ms is not None:
            with isolate_errors("leave", server=server.name):
                if (found := finish_server_removal(dispatcher, server.name, server.fleet)) is not None:
                    ended.append(found)
    end_runs_of_removed_servers(dispatcher)
    return ended


def forget_model(dispatcher: Dispatcher, it: Removal) -> None:
    """Remove from Redis what concerns a model that was removed."""
    try:
        catalog = dispatcher.catalog.refresh()
        if it.fleet in catalog.fleets():
            refresh_fleet(dispatcher, it.fleet)
        else:
            dispatcher.fleets.remove_unknown(catalog.fleets())
    except RedisError as error:  # The sweep brings it, and forgets rooms that are gone.
        log.warning("removal_postponed", model=it.name, error=str(error))
    log.info("model_removed", model=it.name)


def finish_server_removal(dispatcher: Dispatcher, server: str, fleet: str) -> Removal | None:
    """Remove a server that is leaving, if none of its slots is held or offered; None: not yet."""
    refresh_fleet(dispatcher, fleet)  # Before the look: from now on nothing is offered there.
    leases = dispatcher.leases.list_all([fleet])
    if fleet not in leases or any(it.server == server for it, _ in leases[fleet]):
        return None
    found = catalog_removal.finish_server_removal(dispatcher.store.database, server)
    if found is None:
        return None
    forget_server(dispatcher, found)
    return found


def forget_server(dispatcher: Dispatcher, it: Removal) -> None:
    """Remove from Redis what concerns a server that was removed."""
    try:
        refresh_fleet(dispatcher, it.fleet)
        catalog = dispatcher.catalog.get()
        if it.fleet not in catalog.fleets():
            dispatcher.fleets.remove_unknown(catalog.fleets())
    except RedisError as error:
        log.warning("removal_postponed", server=it.name, error=str(error))
    log.info("server_removed", server=it.name)


def end_runs_of_removed_servers(dispatcher: Dispatcher) -> int:
    """Take runs of servers that were removed under them for lost: their jobs run again elsewhere.  Answers how many."""
    servers = dispatcher.catalog.get().servers
    lost = [job for job in dispatcher.store.list_running() if job.server not in servers]
    if not lost:
        return 0
    servers = dispatcher.catalog.refresh().servers  # One that was registered just now is none.
    return sum(_end_lost(dispatcher, job) for job in lost if job.server not in servers)


def _end_lost(dispatcher: Dispatcher, job: Job) -> bool:
    with isolate_errors("end_lost", job_id=job.id):
        active = active_run_of(dispatcher, job)
        if active is None:
            return False
        decision = Decision(
            Reason.SERVER_UNREACHABLE,  # An operator has done that, so it costs the job nothing.
            error=JobError("server_removed", f"Server {job.server} was removed while it ran the job."),
            quarantine=Quarantine("server_lost", now_ms() + dispatcher.settings.withhold_max_ms),
        )
        return end_run(dispatcher, active, decision) is not None
    return False


def end_runs_now(dispatcher: Dispatcher, job_ids: Sequence[str]) -> None:
    """At once what maintenance does for runs of a server that was just removed.  If the record is away, it does it."""
    if not job_ids:
        return
    try:
        end_runs_of_removed_servers(dispatcher)
    except (DatabaseUnavailable, RedisError) as error:
        log.warning("lost_runs_postponed", jobs=len(job_ids), error=str(error))
