"""What beat runs, as tasks/beat.py lists it.  Each task calls a plain function, and is harmless when run twice at once.

Each runs once at a time in a process.  One that lasts longer than its period is passed over by the next message, which
runs those after it: so none can hold up the others for longer.  Nothing is compared with beat's clock, so it does not
matter what that says.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial

import structlog

from routing.dispatch.outcome import OutcomeKind
from routing.maintenance import deadlines, decommission, invariants, quarantined_slots, task_runs
from routing.maintenance.reaper import Reaper, RenewalGrace
from routing.maintenance.restore_leases import MissingLeases
from routing.maintenance.server_checks import ServerChecks
from routing.maintenance.server_report import ServerReport
from routing.maintenance.sweep import Sweeper
from routing.queries.job_counters import EventCounter
from slotkeeper.clock import now_ms
from slotkeeper.config import StorageSettings
from slotkeeper.errors import SlotkeeperError
from slotkeeper.jobs import ledger, quarantine
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.jobs.states import State
from slotkeeper.outbox.retention import EventRetention
from slotkeeper.outbox.sink_cursors import SinkCursors
from slotkeeper.process import singleton
from slotkeeper.registry import server_descriptions
from slotkeeper.registry.values import Server as ServerRow
from slotkeeper.urls import refuses_connections
from tasks.beat import PERIODS_S
from tasks.celery_app import celery
from tasks.config import EventSettings
from tasks.ends import log_job_end
from tasks.health_checks import HealthChecks, PendingReports
from tasks.relay.sinks.sink import SinkUnavailable
from tasks.relay.sinks.task_events import TaskEventSink
from tasks.retries import decide_end
from tasks.security import vault
from tasks.server_adapters import Misconfigured, adapter_for, health_adapter
from tasks.servers import Call, HealthKind, ServerSession, call_server
from tasks.services import database, dispatcher, process_locks, result_notifier, scripts, task_run_recorder, workers

log = structlog.get_logger(__name__)

# An answer that is on its way to the worker when the server is asked has arrived after this.
_RECHECK_DELAY_S = 1.0
# How long deadlines and due jobs are worked on before the next second's turn.
_KEEP_TIME_LIMIT_S = 0.8
# How long a round waits for servers; what comes later is heeded by the next.
_REPORTS_LIMIT_S = 1.5
_BATCH_DELAY_S = 0.1
_STATUS_DEADLINE_S = 10.0  # for one question about a run
_REPORTS_WAIT_S = 3.0
_PURGE_LIMIT_S = 50.0  # of each minute, while anything is overdue
_COUNT_LIMIT_S = 4.0
_MIN_PERIOD_SHARE = 0.5  # of a task's period

_grace = RenewalGrace()


@singleton
def _sweeper() -> Sweeper:
    return Sweeper(dispatcher())


@singleton
def _reaper() -> Reaper:
    return Reaper(dispatcher(), _grace)


@singleton
def _missing_leases() -> MissingLeases:
    return MissingLeases(dispatcher(), _reaper().state)


@singleton
def _server_checks() -> ServerChecks:
    return ServerChecks(dispatcher())


class PeriodicTask:
    """A function that beat has run every so often, see EVERY_S; once at a time, also where it is called."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.__doc__ = function.__doc__
        self._name, self._function, self._period_s = name, function, PERIODS_S[name]
        self._running = threading.Lock()
        self._started_s = -self._period_s

    def __call__(self) -> None:
        """Run it, however soon after the last time, unless it is under way."""
        if not self._running.acquire(blocking=False):
            return
        try:
            self._started_s = time.monotonic()
            self._function()
            task_run_recorder().note(self._name, time.monotonic() - self._started_s)
        finally:
            self._running.release()

    def run_if_due(self) -> None:
        """Run it, unless it is under way or began just now: of messages that have piled up one is enough."""
        if time.monotonic() - self._started_s >= _MIN_PERIOD_SHARE * self._period_s:
            self()


_periodic: dict[str, PeriodicTask] = {}


def _periodic_task(name: str) -> Callable[[Callable[[], None]], PeriodicTask]:
    """Decorator of what beat runs under this name."""

    def decorate(function: Callable[[], None]) -> PeriodicTask:
        return _periodic.setdefault(name, PeriodicTask(name, function))

    return decorate


@celery.task(name="maintenance.run", ignore_result=True, send_events=False)
def run(names: Sequence[str]) -> None:
    """Run these tasks one after another; the error of one is no other's."""
    for name in names:
        try:
            _periodic[name].run_if_due()
        except Exception:
            log.exception("maintenance_failed", task=name)


@_periodic_task("sweep")
def sweep() -> None:
    """Offer what was missed, and rebuild queues that Redis has lost."""
    _sweeper().sweep()
    task_runs.mark_sweep(scripts())


@_periodic_task("keep_time")
def keep_time() -> None:
    """Promote the jobs that are due, and expire those past their deadlines; of very many a batch of each in turn."""
    until = time.monotonic() + _KEEP_TIME_LIMIT_S
    while deadlines.promote_due_jobs(dispatcher(), 0) + deadlines.expire_deadlines(dispatcher(), 0):
        if time.monotonic() >= until:
            return


@_periodic_task("reap")
def reap() -> None:
    """Take back expired offers and leases; restore leases that runs lack."""
    _reaper().reap()
    _missing_leases().restore(may_reap=not _grace.is_active)


@_periodic_task("reap_killed")
def reap_dead_workers() -> None:
    """Take back the leases of workers whose processes have ended on this machine.

    A task of its own, as it asks the file system, which may be slow to answer.
    """
    _reaper().reap_dead_workers(workers(), process_locks())


@_periodic_task("watch_runs")
def watch_runs() -> None:
    """End runs that exceed their longest time, sync leases of quarantined slots, and finish removals."""
    deadlines.end_overlong_runs(dispatcher(), decide_end)
    quarantined_slots.sync_leases(dispatcher())
    decommission.finish_removals(dispatcher())


@_periodic_task("check_servers")
def check_servers() -> None:
    """Ask all servers for their health.

    The slots of servers that are down are in cooldown, until these are back; leases of jobs that their server
    does not know are freed, and slots that others use are not offered.  Each report is heeded as it comes.
    """
    _check_health(dispatcher().catalog.get().servers)


@_periodic_task("check_urgent_servers")
def check_urgent_servers() -> None:
    """Ask the servers that were down, or whose workers went silent, as check_servers does."""
    _check_health(_server_checks().servers_to_check_now())


def _check_health(names: Iterable[str]) -> None:
    global _servers_with_quarantine
    servers, _servers_with_quarantine = (
        dispatcher().catalog.get().servers,
        frozenset(quarantined_slots.servers_to_ask(dispatcher())),
    )
    _check_quarantined_runs()
    for reports in reports_as_they_arrive(_health_checks().start(servers[name] for name in names)):
        _server_checks().apply_health(reports)
        _server_checks().apply_reports(reports, may_reap=not _grace.is_active)


@_periodic_task("sync_locks")
def sync_locks() -> None:
    """Free leases of jobs that their servers do not know, after a second look."""
    catalog = dispatcher().catalog.get()
    suspects = _server_checks().find_stale_runs(_read_reports(catalog.servers.values()))
    if suspects:
        time.sleep(_RECHECK_DELAY_S)
        names = {job.server for job in suspects}
        reports = _read_reports(server for server in catalog.servers.values() if server.name in names)
        _server_checks().end_stale_runs(suspects, reports)


@_periodic_task("reconcile")
def reconcile_all() -> None:
    """Bring back into Redis what only the database has."""
    _sweeper().reconcile()


@_periodic_task("tell_due")
def notify_overdue() -> None:
    """Tell Celery's clients of ends that they should have been told of by now."""
    result_notifier().notify_overdue()


@_periodic_task("publish_task_events")
def publish_task_events() -> None:
    """Publish the task events of jobs that wait or run again, for a Flower that started after they were published."""
    if "celery" not in EventSettings().sinks:
        return
    try:
        _task_event_sink().publish_active()
    except SinkUnavailable as error:
        log.warning("task_events_not_published", error=str(error))


@singleton
def _task_event_sink() -> TaskEventSink:
    return TaskEventSink(celery, database())


@_periodic_task("count")
def count() -> None:
    """Add what has happened to the figures, and say in the log which jobs have ended."""
    until = time.monotonic() + _COUNT_LIMIT_S
    while _event_counter().count_new_events() and time.monotonic() < until:
        pass


@_periodic_task("scan_dlq")
def scan_dlq() -> None:
    """Say how many jobs are dead, and remove what ended before the retention time."""
    dead = ledger.count_by_state(database())[State.DEAD]
    removed = deadlines.purge_ended_jobs(dispatcher(), StorageSettings().retention_s, _PURGE_LIMIT_S)
    _remove_old_events(StorageSettings(), EventSettings().durable_sinks)
    server_descriptions.delete_unused(database(), now_ms())
    vault.reseal_secrets()
    log.info("dlq_scanned", dead=dead, purged=removed)


@singleton
def _event_retention() -> EventRetention:
    return EventRetention(database())


def _remove_old_events(settings: StorageSettings, sinks: list[str]) -> None:
    """Those that have come of age, slice by slice, and none that a sink has not got yet."""
    until, now = time.monotonic() + _PURGE_LIMIT_S, now_ms()
    events_ms, acts_ms = now - settings.events_retention_s * 1000, now - settings.acts_retention_s * 1000
    last = SinkCursors(database()).find_slowest(sinks)
    while _event_retention().delete_next(events_ms, acts_ms, last) is not None:
        if time.monotonic() >= until:
            break


@_periodic_task("check_invariants")
def check_invariants() -> None:
    """Raise the gauges, and an event, for each difference that two looks find."""
    servers = dispatcher().catalog.get().servers.values()
    findings = invariants.find_violations(dispatcher(), _server_checks(), _reaper().state, _read_reports(servers))
    if findings:
        time.sleep(_RECHECK_DELAY_S)
        findings &= invariants.find_violations(dispatcher(), _server_checks(), _reaper().state, _read_reports(servers))
    counts = invariants.count_by_check(findings) | {ledger.DIFFERENCE: ledger.read(database()).difference}
    ledger.store_findings(
        database(), counts, {violation.subject: violation.check for violation in sorted(findings)}, now_ms()
    )
    for finding in sorted(findings):
        log.error("invariant_broken", check=finding.check, subject=finding.subject)


@singleton
def _event_counter() -> EventCounter:
    return EventCounter(database(), log_job_end)


# -- asking servers --------------------------------------------------------------------------------------------


@singleton
def _health_checks() -> HealthChecks:
    return HealthChecks(_read_report)


_late_reports: PendingReports = {}


def reports_as_they_arrive(pending: PendingReports) -> Iterator[Mapping[str, ServerReport]]:
    """The reports of these servers, and those that came too late for the last round, some at a time."""
    for name in list(_late_reports):
        pending.setdefault(name, _late_reports.pop(name))
    until = time.monotonic() + _REPORTS_LIMIT_S
    while pending:
        done, _ = wait(pending.values(), max(until - time.monotonic(), 0), FIRST_COMPLETED)
        if not done:
            _late_reports.update(pending)
            return
        wait(pending.values(), _BATCH_DELAY_S)
        yield _take_arrived(pending)


def _read_reports(servers: Iterable[ServerRow]) -> Mapping[str, ServerReport]:
    """Ask all these servers for their health; those that take long are left out."""
    pending = _health_checks().start(servers)
    wait(pending.values(), _REPORTS_WAIT_S)
    return _take_arrived(pending)


def _take_arrived(pending: PendingReports) -> Mapping[str, ServerReport]:
    """Take out the reports that are there; a server that could not be asked at all has none."""
    arrived = {name: pending.pop(name) for name, report in list(pending.items()) if report.done()}
    for name, report in arrived.items():
        if (error := report.exception()) is not None:
            log.error("server_not_asked", server=name, error=repr(error))
    return {name: report.result() for name, report in arrived.items() if report.exception() is None}


def _read_report(server: ServerRow) -> ServerReport:
    asked_ms = now_ms()
    adapter = health_adapter(dispatcher().catalog.get(), server)
    if adapter is None:
        return ServerReport(up=True, asked_ms=asked_ms, endpoints=server.endpoints)
    health = call_server(adapter, ServerSession.health)
    has_quarantine = server.name in _servers_with_quarantine and health.kind in (HealthKind.DOWN, HealthKind.UNKNOWN)
    return ServerReport(
        up=health.kind is not HealthKind.DOWN,
        active_jobs=health.active_jobs if health.running_count else None,
        job_ids=health.job_ids,
        asked_ms=asked_ms,
        endpoints=server.endpoints,
        connection_refused=has_quarantine and refuses_connections(adapter.endpoint),
        process_started=health.started,
        is_idle=health.is_idle,
    )


_servers_with_quarantine: frozenset[str] = frozenset()
"""Servers some of whose slots are withheld, when servers were last asked."""


def _check_quarantined_runs() -> None:
    """Ask for the status of runs whose slots are withheld, where their servers have given them ids."""
    for row in quarantine.list_all(database()):
        if row.remote_id is not None and (row.job_id, row.attempt) not in _runs_being_checked:
            _runs_being_checked.add((row.job_id, row.attempt))
            threading.Thread(target=_check_quarantined_run, args=(row,), name="ask", daemon=True).start()


_runs_being_checked: set[tuple[str, int]] = set()
_END_KINDS = frozenset(
    {OutcomeKind.DONE, OutcomeKind.FAILED, OutcomeKind.RETRY, OutcomeKind.CANCELED, OutcomeKind.LOST}
)


def _check_quarantined_run(row: QuarantinedSlot) -> None:
    try:
        job = dispatcher().store.get(row.job_id)
        server = dispatcher().catalog.get().servers.get(row.server)
        url = None if server is None else server.endpoints.get(row.model)
        if job is None or url is None or row.remote_id is None:
            return
        adapter = adapter_for(url, dispatcher().catalog.resolve(row.model), job.described_by)
        if adapter.description.mode in ("async", "auto"):
            call = Call(row.job_id, row.attempt, payload=None, deadline_s=_STATUS_DEADLINE_S)
            outcome = call_server(adapter, partial(ServerSession.status, call=call, remote_id=row.remote_id))
            if outcome.kind in _END_KINDS:
                quarantined_slots.release_run_slot(dispatcher(), row.job_id, row.attempt)
            elif outcome.kind is OutcomeKind.PENDING and not outcome.code:
                _server_checks().note_running(row)
    except (Misconfigured, SlotkeeperError) as error:
        log.warning("run_not_asked_about", job_id=row.job_id, error=str(error))
    finally:
        _runs_being_checked.discard((row.job_id, row.attempt))
