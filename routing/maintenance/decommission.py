"""Finish removals of models and servers.

The API begins a removal in the database.  Each pass reads from the database what is left to do, so an interrupted
removal is finished by the next pass; Redis follows the catalog (lua/sync_catalog.lua).
"""

from collections.abc import Sequence

import structlog
from redis.exceptions import RedisError

from routing.dispatch.decision import Decision
from routing.dispatch.dispatcher import Dispatcher, active_run_of
from routing.dispatch.run_steps import end_run
from routing.maintenance.rebuild import refresh_fleet
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
    """Finish the removals that nothing holds up any more, and return them."""
    snapshot = dispatcher.catalog.refresh()
    finished: list[Removal] = []
    for name, closed in snapshot.closed.items():
        if closed.because is ClosingReason.REMOVING:
            with isolate_errors("remove_model", model=name):
                removal = catalog_removal.finish_model_removal(dispatcher.store.database, name, now_ms())
                if removal is not None:
                    forget_model(dispatcher, removal)
                    finished.append(removal)
    for server in snapshot.servers.values():
        if server.leaving_ms is not None:
            with isolate_errors("remove_server", server=server.name):
                removal = finish_server_removal(dispatcher, server.name, server.fleet)
                if removal is not None:
                    finished.append(removal)
    end_runs_of_removed_servers(dispatcher)
    return finished


def forget_model(dispatcher: Dispatcher, removal: Removal) -> None:
    """Remove a removed model from Redis."""
    try:
        catalog = dispatcher.catalog.refresh()
        if removal.fleet in catalog.fleets():
            refresh_fleet(dispatcher, removal.fleet)
        else:
            dispatcher.fleets.remove_unknown(catalog.fleets())
    except RedisError as error:  # The sweep syncs the catalog, and `reconcile` removes unknown fleets.
        log.warning("removal_postponed", model=removal.name, error=str(error))
    log.info("model_removed", model=removal.name)


def forget_server(dispatcher: Dispatcher, removal: Removal) -> None:
    """Remove a removed server from Redis."""
    try:
        refresh_fleet(dispatcher, removal.fleet)
        catalog = dispatcher.catalog.get()
        if removal.fleet not in catalog.fleets():
            dispatcher.fleets.remove_unknown(catalog.fleets())
    except RedisError as error:
        log.warning("removal_postponed", server=removal.name, error=str(error))
    log.info("server_removed", server=removal.name)


def finish_server_removal(dispatcher: Dispatcher, server: str, fleet: str) -> Removal | None:
    """Remove a draining server if none of its slots is held or offered; None: not yet."""
    refresh_fleet(dispatcher, fleet)  # Before leases are read: from now on nothing is offered there.
    leases = dispatcher.leases.list_all([fleet])
    if fleet not in leases or any(lease.server == server for lease, _ in leases[fleet]):
        return None
    removal = catalog_removal.finish_server_removal(dispatcher.store.database, server)
    if removal is not None:
        forget_server(dispatcher, removal)
    return removal


def end_runs_of_removed_servers(dispatcher: Dispatcher) -> int:
    """End runs whose server was removed under them, so that their jobs run again elsewhere; return how many."""
    servers = dispatcher.catalog.get().servers
    lost = [job for job in dispatcher.store.list_running() if job.server not in servers]
    if not lost:
        return 0
    servers = dispatcher.catalog.refresh().servers  # The server may have been registered just now.
    return sum(_end_lost(dispatcher, job) for job in lost if job.server not in servers)


def _end_lost(dispatcher: Dispatcher, job: Job) -> bool:
    with isolate_errors("end_lost_run", job_id=job.id):
        active = active_run_of(dispatcher, job)
        if active is None:
            return False
        decision = Decision(
            Reason.SERVER_UNREACHABLE,  # An operator removed the server, so it costs the job nothing.
            error=JobError("server_removed", f"Server {job.server} was removed while it ran the job."),
            quarantine=Quarantine("server_lost", now_ms() + dispatcher.settings.withhold_max_ms),
        )
        return end_run(dispatcher, active, decision) is not None
    return False


def end_runs_now(dispatcher: Dispatcher, job_ids: Sequence[str]) -> None:
    """End runs of a server that was just removed.  If this fails, maintenance does it."""
    if not job_ids:
        return
    try:
        end_runs_of_removed_servers(dispatcher)
    except (DatabaseUnavailable, RedisError) as error:
        log.warning("lost_runs_postponed", jobs=len(job_ids), error=str(error))
