"""Maintenance as the tasks call it.  Each dispatcher has its own sweeper, reaper and checks, as each process has."""

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import pytest

from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance import invariants, restore_leases
from routing.maintenance.invariants import Finding
from routing.maintenance.reaper import Reaper, RenewalGrace
from routing.maintenance.restore_leases import MissingLeases
from routing.maintenance.server_checks import ServerChecks
from routing.maintenance.server_report import ServerReport
from routing.maintenance.sweep import Sweeper
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.jobs.values import Job
from slotkeeper.process_locks import ProcessLocks
from slotkeeper.registry.values import Server
from tasks import health_checks, maintenance, server_adapters
from tasks.health_checks import HealthTarget
from tasks.servers.session import run_with_http_client
from tests.support.harness import Harness


class Maintenance:
    """What a maintenance process has."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.sweeper, self.reaper, self.checks = Sweeper(dispatcher), Reaper(dispatcher), ServerChecks(dispatcher)
        self.missing = MissingLeases(dispatcher, self.reaper.state)


_OF: WeakKeyDictionary[Dispatcher, Maintenance] = WeakKeyDictionary()


def of(dispatcher: Dispatcher) -> Maintenance:
    """Return the maintenance of this dispatcher's process."""
    if dispatcher not in _OF:
        _OF[dispatcher] = Maintenance(dispatcher)
    return _OF[dispatcher]


def sweep(dispatcher: Dispatcher) -> int:
    return of(dispatcher).sweeper.sweep()


def reconcile(dispatcher: Dispatcher) -> int:
    return of(dispatcher).sweeper.reconcile()


def reap(dispatcher: Dispatcher, grace: RenewalGrace | None = None) -> int:
    reaper = of(dispatcher).reaper
    reaper._grace = grace
    return reaper.reap()


def reap_dead_workers(dispatcher: Dispatcher, workers: WorkerCapacity, process_locks: ProcessLocks) -> int:
    return of(dispatcher).reaper.reap_dead_workers(workers, process_locks)


def restore_missed(dispatcher: Dispatcher, *, may_reap: bool = True) -> int:
    return of(dispatcher).missing.restore(may_reap=may_reap)


def restore_missing(harness: Harness) -> int:
    """Restore leases that Redis has lost: the first pass notes them, and one after the time of grace writes them."""
    restore_missed(harness.dispatcher)
    harness.later(restore_leases._GRACE_MS)
    return restore_missed(harness.dispatcher)


def apply_health(dispatcher: Dispatcher, reports: Mapping[str, ServerReport]) -> None:
    of(dispatcher).checks.apply_health(reports)


def apply_reports(dispatcher: Dispatcher, reports: Mapping[str, ServerReport], *, may_reap: bool = True) -> int:
    return of(dispatcher).checks.apply_reports(reports, may_reap=may_reap)


def servers_to_check_now(dispatcher: Dispatcher) -> set[str]:
    return of(dispatcher).checks.servers_to_check_now()


def find_stale_runs(dispatcher: Dispatcher, reports: Mapping[str, ServerReport]) -> list[Job]:
    return of(dispatcher).checks.find_stale_runs(reports)


def end_stale_runs(dispatcher: Dispatcher, before: Sequence[Job], reports: Mapping[str, ServerReport]) -> int:
    return of(dispatcher).checks.end_stale_runs(before, reports)


def note_running(dispatcher: Dispatcher, row: QuarantinedSlot) -> None:
    of(dispatcher).checks.note_running(row)


def find_violations(dispatcher: Dispatcher, reports: Mapping[str, ServerReport]) -> set[Finding]:
    parts = of(dispatcher)
    return invariants.find_violations(dispatcher, parts.checks, parts.reaper.state, reports)


def read_report(server: Server, *, has_quarantine: bool = False) -> ServerReport:
    """Ask a server for its health, as maintenance does."""
    adapter = server_adapters.health_adapter(health_checks.dispatcher().catalog.get(), server)
    target = HealthTarget(server, adapter, has_quarantine)
    return run_with_http_client(lambda http: health_checks.read_report(target, http))


def check_quarantined_run(row: QuarantinedSlot) -> None:
    """Ask for the status of a run whose slot is quarantined, as maintenance does."""
    run_with_http_client(lambda http: health_checks.check_quarantined_run(row, http))


def run_tasks_with(monkeypatch: pytest.MonkeyPatch, dispatcher: Dispatcher) -> None:
    """Let the tasks of tasks.maintenance use this dispatcher, until the test ends."""
    parts = of(dispatcher)
    for module in (maintenance, health_checks):
        monkeypatch.setattr(module, "dispatcher", lambda: dispatcher)
        monkeypatch.setattr(module, "server_checks", lambda: parts.checks)
    monkeypatch.setattr(maintenance, "_sweeper", lambda: parts.sweeper)
    monkeypatch.setattr(maintenance, "_reaper", lambda: parts.reaper)
    monkeypatch.setattr(maintenance, "_missing_leases", lambda: parts.missing)
