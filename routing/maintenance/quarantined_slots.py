"""Keep quarantined slots out of use, and release them when their server has ended the run.

A slot is quarantined after its run was ended here while the server may still run it.  No other job starts there until
the server's report no longer shows the run, or the longest time is over.  The database has the quarantined slots
(slotkeeper.jobs.quarantine).  In Redis each has a lease under a name that no job can have, and maintenance renews it.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

import structlog

from routing.dispatch.dispatcher import Dispatcher
from routing.dispatch.run_steps import blocking_steps, run_blocking
from routing.maintenance import server_report
from routing.maintenance.pass_state import ReportState
from routing.maintenance.server_report import ExpectedRun, ServerReport
from routing.queue.fleets import isolate_errors
from routing.queue.leases import QUARANTINE_OWNER, Lease, LeasedJob, parse_quarantine_id, quarantine_lease
from slotkeeper.clock import clock, now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.jobs.values import PRIORITY_DEFAULT, Job, QueuedJob
from slotkeeper.registry.values import Server

log = structlog.get_logger(__name__)

# A server that only counts its runs may have ended another one, which its worker does not know yet.
_QUIET_MARGIN_MS = 2_000
# For so long a server's statement counts that a run continues.  It is asked every 2 s.
_CONFIRMED_WITHIN_MS = 30_000


# -- leases --------------------------------------------------------------------------------------------------------


def sync_leases(dispatcher: Dispatcher) -> int:
    """Make the leases of quarantined slots equal to the database's rows; return how many were wrong.

    Slots whose longest time is over are released.  Leases are read before rows: a lease without a row is not needed.
    """
    leases = dispatcher.leases.list_all(dispatcher.catalog.get().fleets())
    rows = quarantine.list_all(dispatcher.store.database)
    by_fleet = _by_fleet(dispatcher, rows)
    _delete_rows_of_removed_servers(dispatcher, rows)
    for fleet, present in by_fleet.items():
        for row in [row for row in present if now_ms() >= row.until_ms]:
            log.warning("slot_quarantined_too_long", slot=row.slot, job_id=row.job_id)
            release(dispatcher, fleet, row)
            present.remove(row)
    wrong = 0
    for fleet, found in leases.items():
        with isolate_errors("sync_quarantine", fleet=fleet):
            wrong += _sync_fleet(dispatcher, fleet, [lease for lease, _ in found], by_fleet[fleet])
    return wrong


def _delete_rows_of_removed_servers(dispatcher: Dispatcher, rows: Sequence[QuarantinedSlot]) -> None:
    """Rows of removed servers are kept for their time, in case the server is registered again."""
    servers, database = dispatcher.catalog.get().servers, dispatcher.store.database
    for row in rows:
        if row.server not in servers and now_ms() >= row.until_ms:
            quarantine.release(database, row.job_id, row.attempt)


def restore_quarantine(dispatcher: Dispatcher, fleets: Collection[str]) -> int:
    """Write the leases of these fleets' quarantined slots again, after Redis was emptied; return how many."""
    rows = _by_fleet(dispatcher, quarantine.list_all(dispatcher.store.database))
    return sum(_restore(dispatcher, fleet, row) for fleet in fleets for row in rows[fleet])


def _sync_fleet(dispatcher: Dispatcher, fleet: str, leases: Sequence[Lease], rows: Sequence[QuarantinedSlot]) -> int:
    expected = {quarantine_lease(fleet, row.job_id, row.attempt, row.slot) for row in rows}
    unneeded = [lease for lease in leases if lease.owner == QUARANTINE_OWNER and lease not in expected]
    for lease in unneeded:
        run_blocking(blocking_steps(dispatcher).free(lease, return_to_lane=False))
    if kept := [lease for lease in leases if lease in expected]:
        dispatcher.leases.renew(fleet, QUARANTINE_OWNER, kept)
    # The worker may still be canceling the run at the server, under the job's own lease.
    leased = {(_job_of(lease), lease.slot) for lease in leases}
    lost = [row for row in rows if (row.job_id, row.slot) not in leased]
    return len(unneeded) + sum(_restore(dispatcher, fleet, row) for row in lost)


def _job_of(lease: Lease) -> str:
    return parse_quarantine_id(lease.job_id)[0] if lease.owner == QUARANTINE_OWNER else lease.job_id


def _restore(dispatcher: Dispatcher, fleet: str, row: QuarantinedSlot) -> int:
    lease = quarantine_lease(fleet, row.job_id, row.attempt, row.slot)
    holder = QueuedJob(lease.job_id, 0, row.model, PRIORITY_DEFAULT, row.tenant)
    return dispatcher.leases.restore(fleet, [LeasedJob(lease, holder)])


def _by_fleet(dispatcher: Dispatcher, rows: Sequence[QuarantinedSlot]) -> defaultdict[str, list[QuarantinedSlot]]:
    servers = dispatcher.catalog.get().servers
    found = defaultdict[str, list[QuarantinedSlot]](list)
    for row in rows:
        if row.server in servers:
            found[servers[row.server].fleet].append(row)
    return found


# -- reports -------------------------------------------------------------------------------------------------------


def servers_to_ask(dispatcher: Dispatcher) -> set[str]:
    """Return the servers with quarantined slots: they should be asked soon."""
    return {row.server for row in quarantine.list_all(dispatcher.store.database)}


def expected_runs(rows: Sequence[QuarantinedSlot], report: ServerReport) -> list[ExpectedRun]:
    """Return the runs of quarantined slots, to be compared with a report."""
    now = server_report.report_time_ms(report, now_ms())
    return [
        ExpectedRun(_run_id(row), server_report.run_names(row.job_id, row.attempt, row.remote_id), now - row.began_ms)
        for row in rows
    ]


def _run_id(row: QuarantinedSlot) -> str:
    return quarantine_lease("", row.job_id, row.attempt, row.slot).job_id


def apply_report(
    dispatcher: Dispatcher,
    state: ReportState,
    server: Server,
    report: ServerReport,
    rows: Sequence[QuarantinedSlot],
    jobs: Sequence[Job],
) -> int:
    """Release quarantined slots whose runs the server's report does not show; return how many.

    rows: of this server.  jobs: that run there.
    """
    # An idle server has a free place; only with a single slot does that mean that it runs nothing.
    compared = replace(report, active_jobs=0) if report.is_idle and server.slots == 1 else report
    stale = set(server_report.compare_runs(expected_runs(rows, compared), compared).stale)
    ended_ms = _process_ended_ms(state, server.name, report)
    released, unconfirmed = 0, list[QuarantinedSlot]()
    for row in rows:
        has_ended = _run_id(row) in stale or (ended_ms is not None and row.began_ms < ended_ms)
        if has_ended or _is_over_by_count(dispatcher, report, row, jobs):
            released += release(dispatcher, server.fleet, row)
        elif not report.shows_runs and not _is_confirmed_running(state, row):
            unconfirmed.append(row)
    _shorten(dispatcher, unconfirmed)
    return released


def _shorten(dispatcher: Dispatcher, rows: Sequence[QuarantinedSlot]) -> None:
    """If a server reports nothing of its runs, quarantine a slot no longer than runs of its model usually take."""
    longest = {model: dispatcher.longest_usual_ms(model) for model in {row.model for row in rows}}
    for row in rows:
        if row.since_ms + longest[row.model] < row.until_ms:
            quarantine.shorten(dispatcher.store.database, row, row.since_ms + longest[row.model])


def _is_confirmed_running(state: ReportState, row: QuarantinedSlot) -> bool:
    confirmed_ms = state.confirmed_running.get((row.job_id, row.attempt))
    return confirmed_ms is not None and clock.steady_ms() - confirmed_ms < _CONFIRMED_WITHIN_MS


def _process_ended_ms(state: ReportState, server: str, report: ServerReport) -> int | None:
    """Return when (ms) the process that has ended was last seen at the server's address; None: none has ended.

    Runs that began before have ended with it.  Later ones may be in the process that answers now.
    """
    now = server_report.report_time_ms(report, now_ms())
    if report.connection_refused:
        return now
    if report.process_started is None:
        return None
    known, last_ms, ended_ms = state.processes.get(server, (report.process_started, now, None))
    if now < last_ms:  # A newer report was read before this one.
        return ended_ms
    if known != report.process_started:
        ended_ms = last_ms
    state.processes[server] = report.process_started, now, ended_ms
    return ended_ms


def _is_over_by_count(dispatcher: Dispatcher, report: ServerReport, row: QuarantinedSlot, jobs: Sequence[Job]) -> bool:
    """Return whether a server that only counts has long enough reported no more runs than jobs run there."""
    if report.job_ids is not None or not report.shows_runs:
        return False
    now = now_ms()
    counted = [
        job
        for job in jobs
        if now - (job.requested_ms or now) >= server_report.MIN_AGE_MS and not job.awaits_earlier_request
    ]
    if report.active_jobs is None or report.active_jobs > len(counted):
        if row.quiet_ms is not None:
            quarantine.set_quiet_since(dispatcher.store.database, row, None)
        return False
    if row.quiet_ms is None:
        quarantine.set_quiet_since(dispatcher.store.database, row, now)
        return False
    return now - row.quiet_ms >= _QUIET_MARGIN_MS + max(
        (round(dispatcher.catalog.resolve(job.model).config.poll_interval * 1000) for job in jobs), default=0
    )


# -- releases ------------------------------------------------------------------------------------------------------


def release_run_slot(dispatcher: Dispatcher, job_id: str, attempt: int) -> bool:
    """Release the quarantined slot of a run that its server has reported as ended.  False: there is none."""
    row = quarantine.find(dispatcher.store.database, job_id, attempt)
    server = None if row is None else dispatcher.catalog.get().servers.get(row.server)
    return row is not None and server is not None and release(dispatcher, server.fleet, row)


def release_all(dispatcher: Dispatcher, server: Server, slot: str | None = None) -> int:
    """Release a server's quarantined slots, or one of them, as an operator asks; return how many."""
    rows = quarantine.list_by_server(dispatcher.store.database)[server.name]
    return sum(release(dispatcher, server.fleet, row) for row in rows if slot is None or row.slot == slot)


def release(dispatcher: Dispatcher, fleet: str, row: QuarantinedSlot) -> bool:
    """Release a quarantined slot.  False: another process has done so.

    Only the process that deletes the row frees the slot.
    """
    if not quarantine.release(dispatcher.store.database, row.job_id, row.attempt):
        return False
    crash_at("quarantine_ended")
    lease = quarantine_lease(fleet, row.job_id, row.attempt, row.slot)
    run_blocking(blocking_steps(dispatcher).free(lease, return_to_lane=False))
    quarantined_ms = now_ms() - row.since_ms
    log.info("slot_released", slot=row.slot, job_id=row.job_id, reason=row.reason, quarantined_ms=quarantined_ms)
    return True


def expire_lease(dispatcher: Dispatcher, lease: Lease) -> bool:
    """Free a quarantined slot whose lease has expired.  False: the database still has it, and the lease is renewed."""
    job_id, attempt = parse_quarantine_id(lease.job_id)
    row = quarantine.find(dispatcher.store.database, job_id, attempt)
    if row is not None and now_ms() < row.until_ms:
        dispatcher.leases.renew(lease.fleet, QUARANTINE_OWNER, [lease])
        return False
    log.warning("slot_quarantined_too_long", slot=lease.slot, job_id=job_id)
    quarantine.release(dispatcher.store.database, job_id, attempt)
    run_blocking(blocking_steps(dispatcher).free(lease, return_to_lane=False))
    return True
