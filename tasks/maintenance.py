"""What beat runs: each task is one call of a plain function in routing, and harmless when run twice at once."""

import math
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog
from redis.exceptions import RedisError

from jobs import ledger
from jobs.config import ModelConfig, RecordSettings
from jobs.record import Server as ServerRow
from jobs.record import now_ms
from jobs.states import State
from routing import audit, reconcile, runs
from routing.policies.identity import ServerReport
from tasks.celery_app import celery
from tasks.runner import server_for
from tasks.servers import HealthKind
from tasks.wiring import database, dispatcher

log = structlog.get_logger(__name__)

# An answer that is on its way to the worker when the server is asked has arrived after this.
_SECOND_LOOK_S = 1.0
# The reaper looks twice a second; Redis, or beat, was away if it could not for so long.
_NOT_LOOKED_S = 2.5
_sweeping = threading.Lock()


# Without results and events: several of them run each second, and Flower shall show jobs.
_quiet = partial(celery.task, ignore_result=True, send_events=False)


@_quiet(name="maintenance.sweep")
def sweep() -> None:
    """Every 2 s: offer what was missed; rebuild a room that turns out to be new."""
    if not _sweeping.acquire(blocking=False):
        return  # Filling a large room takes longer than 2 s, and longer still if each sweep joins in.
    try:
        reconcile.sweep(dispatcher())
    finally:
        _sweeping.release()


@_quiet(name="maintenance.keep_time")
def keep_time() -> None:
    """Every second: deadlines, then delayed jobs whose time has come."""
    reconcile.expire_overdue(dispatcher())
    reconcile.promote_due(dispatcher())


class _Patience:
    """Keeps the reaper from leases whose living holders could not renew them, as long as those need to do so now.

    Redis was away if a look failed, or, as it is the broker too, if there was no look for a while.
    """

    def __init__(self) -> None:
        self._looked = math.inf  # nobody has looked yet, and no time has gone by since
        self._until: float | None = None

    def has_ended(self, now: float, pause_s: float) -> bool:
        """Whether to look now (monotonic seconds); `pause_s`: how long to wait after Redis was away."""
        away, self._looked = now - self._looked > _NOT_LOOKED_S, now
        if self._until is None and away:
            self._until = now + pause_s
        if self._until is not None and now < self._until:
            return False
        self._until = None
        return True

    def note_failure(self) -> None:
        self._looked = -math.inf


_patience = _Patience()


@_quiet(name="maintenance.reap")
def reap() -> None:
    """Twice a second: leases that were not renewed, offers that nobody took up."""
    if not _patience.has_ended(time.monotonic(), 2 * dispatcher().settings.renew_every_ms / 1000):
        return
    try:
        reconcile.reap(dispatcher())
    except RedisError:
        _patience.note_failure()
        raise


@_quiet(name="maintenance.check_servers")
def check_servers(all_of_them: bool = True) -> None:
    """Every 10 s all servers, every 2 s those that were down or whose workers went silent.

    Runs that Redis has lost sight of get their leases again.  Slots of servers that are down rest, those of servers
    that are back are woken; leases of jobs that their server does not know are freed, and slots that others use are
    not offered.
    """
    runs.restore_missing(dispatcher())
    servers = dispatcher().fleet.snapshot().servers
    names = set(servers) if all_of_them else reconcile.urgent_servers(dispatcher())
    reports = _reports(servers[name] for name in names & set(servers))
    reconcile.note_health(dispatcher(), reports)
    reconcile.heed_reports(dispatcher(), reports)


@_quiet(name="maintenance.sync_locks")
def sync_locks() -> None:
    """Every 30 s: free leases of jobs that their servers do not know, after a second look."""
    catalog = dispatcher().fleet.snapshot()
    suspects = reconcile.suspects(dispatcher(), _reports(catalog.servers.values()))
    if suspects:
        time.sleep(_SECOND_LOOK_S)
        again = {job.server for job in suspects}
        reports = _reports(server for server in catalog.servers.values() if server.name in again)
        reconcile.free_ghosts(dispatcher(), suspects, reports)


@_quiet(name="maintenance.reconcile")
def reconcile_all() -> None:
    """Every 5 min: bring back what the record knows and Redis does not."""
    reconcile.reconcile(dispatcher())


@_quiet(name="maintenance.scan_dlq")
def scan_dlq() -> None:
    """Every 60 s: say how many jobs are dead, and remove what ended before the retention time."""
    dead = dispatcher().store.counts()[State.DEAD]
    removed = reconcile.purge(dispatcher(), RecordSettings().retention_s)
    log.info("dlq_scanned", dead=dead, purged=removed)


@_quiet(name="maintenance.audit")
def check_invariants() -> None:
    """Every 60 s: raise the gauges, and an event, for each difference that two looks find."""
    servers = dispatcher().fleet.snapshot().servers.values()
    findings = audit.look(dispatcher(), _reports(servers))
    if findings:
        time.sleep(_SECOND_LOOK_S)
        findings &= audit.look(dispatcher(), _reports(servers))
    ledger.note_findings(database(), audit.count(findings), {it.subject: it.check for it in sorted(findings)}, now_ms())
    for finding in sorted(findings):
        log.error("invariant_broken", check=finding.check, subject=finding.subject)


def _reports(servers: Iterable[ServerRow]) -> Mapping[str, ServerReport]:
    """Ask all servers at once for their health."""
    asked = [server for server in servers if server.endpoints]
    if not asked:
        return {}
    with ThreadPoolExecutor(min(len(asked), 16)) as pool:
        return dict(zip((server.name for server in asked), pool.map(_report, asked), strict=True))


def _report(server: ServerRow) -> ServerReport:
    model, url = min(server.endpoints.items())
    known = dispatcher().fleet.snapshot().models.get(model)
    health = server_for(url, known.config if known else ModelConfig()).health()
    return ServerReport(
        up=health.kind is not HealthKind.DOWN,
        active_jobs=health.active_jobs if health.running_count else None,
        job_ids=health.job_ids,
    )
