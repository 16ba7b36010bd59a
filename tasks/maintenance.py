"""The maintenance tasks that tasks/periods.py lists.  Each calls a plain function, and may run twice at once.

In a process, each runs once at a time.  The next message passes over a task that lasts longer than its period, and runs
those after it.  No time is compared with beat's clock, which may be wrong.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count as count_up

import structlog

from routing.config import RoutingSettings
from routing.dispatch import batch_control
from routing.maintenance import (
    deadlines,
    decommission,
    invariants,
    quarantined_slots,
    task_runs,
    validation_jobs,
    watched,
)
from routing.maintenance.node_connections import NodeKeeper
from routing.maintenance.reaper import Reaper, RenewalGrace
from routing.maintenance.restore_leases import MissingLeases
from routing.maintenance.sweep import Sweeper
from routing.queries.job_counters import EndedJob, EventCounter
from slotkeeper.clock import clock, now_ms
from slotkeeper.config import StorageSettings
from slotkeeper.jobs import credits, ledger
from slotkeeper.jobs.states import State
from slotkeeper.outbox.retention import EventRetention
from slotkeeper.outbox.sink_cursors import SinkCursors
from slotkeeper.outbox.subscriptions import Subscription, Subscriptions
from slotkeeper.process import singleton
from slotkeeper.registry import server_descriptions, usage
from slotkeeper.trace_context import find_trace
from tasks.celery_app import celery
from tasks.config import EventSettings
from tasks.health_checks import health_checks, read_reports, server_checks, start_checks
from tasks.periods import PERIODS_S
from tasks.relay.sinks.sink import SinkUnavailable
from tasks.relay.sinks.task_events import TaskEventSink
from tasks.retries import decide_end
from tasks.security.vault import reseal, reseal_signing_secret
from tasks.services import (
    batches,
    catalog,
    credit_accounts,
    database,
    dispatcher,
    nodes,
    process_locks,
    result_notifier,
    scripts,
    task_run_recorder,
    validations,
    workers,
)

log = structlog.get_logger(__name__)

# A response that is on its way to the worker when the server is asked arrives within this time.
_RECHECK_DELAY_S = 1.0
_NO_LIMIT = 1_000_000
_KEEP_TIME_LIMIT_S = 0.8  # of one pass of `keep_time`
_DRIVE_LIMIT_S = 1.5
_PURGE_LIMIT_S = 50.0  # of each minute, while anything is overdue
_ANSWERS_KEPT_MS = 30 * 86_400_000  # of validations
_CARRY_LIMIT_S, _CARRIED_AT_ONCE = 20.0, 500
_MOST_SKEW_MS = 3_600_000  # of this host's clock; above it, nothing is deleted by its age
_COUNT_LIMIT_S = 4.0
_MIN_PERIOD_SHARE = 0.5  # of a task's period

_TRANSFERS_IN = 5  # One check of invariants in so many adds up all transfers of credits.

_grace = RenewalGrace()
_checks = count_up()
_unbalanced: set[invariants.Finding] = set()  # of the last check that did


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
def _node_keeper() -> NodeKeeper:
    return NodeKeeper(dispatcher(), nodes())


class PeriodicTask:
    """A function that beat has run once in each period (PERIODS_S), once at a time in this process."""

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
            with clock.pin_offset():
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
    """Decorate the function that beat runs under this name."""

    def decorate(function: Callable[[], None]) -> PeriodicTask:
        return _periodic.setdefault(name, PeriodicTask(name, function))

    return decorate


@celery.task(name="maintenance.run", ignore_result=True, send_events=False)
def run(names: Sequence[str]) -> None:
    """Run these tasks one after another; an error in one does not stop the others."""
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
    """Promote jobs that are due, expire those past their deadlines, and cancel those whose clients have left.

    Of very many, a batch of each in turn.
    """
    until = time.monotonic() + _KEEP_TIME_LIMIT_S
    watched.cancel_unwatched(dispatcher())
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

    A separate task, because it reads the file system, which may be slow.
    """
    _reaper().reap_dead_workers(workers(), process_locks())


@_periodic_task("watch_runs")
def watch_runs() -> None:
    """End runs that exceed their longest time, sync leases of quarantined slots, and finish removals."""
    deadlines.end_overlong_runs(dispatcher(), decide_end)
    quarantined_slots.sync_leases(dispatcher())
    decommission.finish_removals(dispatcher())


@_periodic_task("drive_batches")
def drive_batches() -> None:
    """Hold, release or cancel jobs of batches, and end batches whose jobs have all ended."""
    batch_control.drive_all(dispatcher(), batches(), dispatcher().settings.batch_open_s, _DRIVE_LIMIT_S)


@_periodic_task("check_servers")
def check_servers() -> None:
    """Ask servers for their health; those that are stopped, or ask for that, only if they run something.

    The slots of servers that are down are in cooldown, until these are back; leases of jobs that their server
    does not know are freed, and slots that others use are not offered.  Each report is applied as it arrives.
    """
    _check_health(dispatcher().catalog.get().servers)


@_periodic_task("check_urgent_servers")
def check_urgent_servers() -> None:
    """Ask the servers that were down, or whose workers went silent, as check_servers does."""
    _check_health(server_checks().servers_to_check_now())


def _check_health(names: Iterable[str]) -> None:
    servers = dispatcher().catalog.get().servers
    health_checks().check_quarantined_runs()
    pending = start_checks(servers[name] for name in names)
    for reports in health_checks().reports_as_they_arrive(pending):
        server_checks().apply_health(reports)
        server_checks().apply_reports(reports, may_reap=not _grace.is_active)


@_periodic_task("keep_nodes")
def keep_nodes() -> None:
    """End the presence of nodes whose gateway has died, and bring the endpoints of nodes in line with models."""
    _node_keeper().drop_lost_gateways()
    _node_keeper().apply_models()


@_periodic_task("validate_servers")
def validate_servers() -> None:
    """Submit the jobs of validations that are due, and judge servers by the results of earlier ones."""
    most_wrong = RoutingSettings().validation_max_wrong
    validation_jobs.judge_answers(dispatcher(), validations(), catalog(), most_wrong)
    validation_jobs.submit_due(dispatcher(), validations())


@_periodic_task("sync_locks")
def sync_locks() -> None:
    """Free leases of jobs that their servers do not know, after a second look."""
    catalog = dispatcher().catalog.get()
    suspects = server_checks().find_stale_runs(read_reports(catalog.servers.values()))
    if suspects:
        time.sleep(_RECHECK_DELAY_S)
        names = {job.server for job in suspects}
        reports = read_reports(server for server in catalog.servers.values() if server.name in names)
        server_checks().end_stale_runs(suspects, reports)


@_periodic_task("reconcile")
def reconcile_all() -> None:
    """Bring back into Redis what only the database has."""
    _sweeper().reconcile()


@_periodic_task("tell_due")
def notify_overdue() -> None:
    """Send the overdue notifications of Celery's clients."""
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
    """Add new events to the counters, and log which jobs have ended."""
    until = time.monotonic() + _COUNT_LIMIT_S
    while _event_counter().count_new_events() and time.monotonic() < until:
        pass


@_periodic_task("keep_credits")
def keep_credits() -> None:
    """Add up the parts of balances, and write an event for each account that runs low."""
    credits.fold_all(database())
    credit_accounts().note_low(now_ms())


@_periodic_task("scan_dlq")
def scan_dlq() -> None:
    """Log how many jobs are dead, and delete jobs that ended before the retention time."""
    dead = ledger.count_by_state(database())[State.DEAD]
    if abs(clock.skew_ms) > _MOST_SKEW_MS:  # One of the two clocks is wrong.
        log.warning("nothing_is_deleted_while_clocks_differ", by_ms=clock.skew_ms)
        return
    removed = deadlines.purge_ended_jobs(dispatcher(), StorageSettings().retention_s, _PURGE_LIMIT_S)
    _remove_old_events(StorageSettings(), EventSettings().durable_sinks)
    batches().delete_old(clock.ago_ms(StorageSettings().retention_s * 1000, now_ms()))
    _carry_old_transfers(StorageSettings())
    server_descriptions.delete_unused(database(), now_ms())
    usage.delete_old_days(database(), now_ms())
    validations().delete_old(clock.ago_ms(_ANSWERS_KEPT_MS, now_ms()))
    reseal_secrets()
    log.info("dlq_scanned", dead=dead, purged=removed)


@singleton
def _event_retention() -> EventRetention:
    return EventRetention(database())


def _remove_old_events(settings: StorageSettings, sinks: list[str]) -> None:
    """Delete events that are old enough, page by page, but none that a sink has not published yet."""
    until, now = time.monotonic() + _PURGE_LIMIT_S, now_ms()
    events_ms, acts_ms = (
        clock.ago_ms(seconds * 1000, now) for seconds in (settings.events_retention_s, settings.acts_retention_s)
    )
    last = SinkCursors(database()).find_slowest(sinks)
    while _event_retention().delete_next(events_ms, acts_ms, last) is not None:
        if time.monotonic() >= until:
            break


def _carry_old_transfers(settings: StorageSettings) -> None:
    """Add up transfers that are old enough, page by page."""
    until, after = time.monotonic() + _CARRY_LIMIT_S, 0
    before_ms = clock.ago_ms(settings.transfers_retention_s * 1000, now_ms())
    while (last := credits.carry_old(database(), before_ms, after, _CARRIED_AT_ONCE)) is not None:
        after = last
        if time.monotonic() >= until:
            break


@_periodic_task("check_invariants")
def check_invariants() -> None:
    """Raise the gauges, and an event, for each difference that two looks find."""
    servers = dispatcher().catalog.get().servers.values()
    with_transfers = next(_checks) % _TRANSFERS_IN == 0
    find = partial(
        invariants.find_violations,
        *(dispatcher(), server_checks(), _reaper().state),
        with_transfers=with_transfers,
    )
    findings = find(read_reports(servers))
    if findings:
        time.sleep(_RECHECK_DELAY_S)
        findings &= find(read_reports(servers))
    if with_transfers:
        _unbalanced.clear()
        _unbalanced.update(finding for finding in findings if finding.check is invariants.Check.CREDIT)
    findings |= _unbalanced
    counts = invariants.count_by_check(findings) | {ledger.DIFFERENCE: ledger.read(database()).difference}
    found = [(violation.subject, violation.check) for violation in sorted(findings)]
    ledger.store_findings(database(), counts, found, now_ms())
    for finding in sorted(findings):
        log.error("invariant_broken", check=finding.check, subject=finding.subject)


@singleton
def _event_counter() -> EventCounter:
    return EventCounter(database(), log_job_end)


def log_job_end(ended: EndedJob) -> None:
    """Log who, where, how long and why; nothing that a client or a server has sent."""
    entry, event = ended.entry, ended.entry.event
    facts = {"server": entry.server, "run_ms": ended.ran_ms}
    log.info(
        "job_ended",
        job_id=event.job_id,
        tenant=entry.tenant,
        trace_id=find_trace(event.job_id, entry.traceparent).id,
        model=entry.model,
        state=ended.state.value,
        why=event.data.get("why"),
        attempt=event.attempt,
        **{name: value for name, value in facts.items() if value is not None},
    )


def reseal_secrets() -> int:
    """Seal secrets again that were sealed under a former secret of the installation; return how many."""
    changed = 0
    for secret in dispatcher().catalog.get().secrets.values():
        sealed = reseal(secret.name, secret.sealed)
        changed += sealed is not None and catalog().reseal_secret(secret, sealed)
    for subscription in Subscriptions(database()).list_of_tenant(limit=_NO_LIMIT):
        changed += _reseal_subscription(subscription)
    if changed:
        log.info("secrets_resealed", secrets=changed)
    return changed


def _reseal_subscription(subscription: Subscription) -> bool:
    """Seal the secrets of a webhook again.  Return False if that is not needed, or its secret cannot be opened."""
    sealed, former = reseal_signing_secret(subscription.id, subscription.sealed), subscription.former_sealed
    if sealed is None:
        return False
    if former is not None:
        former = reseal_signing_secret(subscription.id, former) or former
    return Subscriptions(database()).reseal(subscription, sealed, former)
