"""Draining slots: a run has ended here, and its server has not let go of it.

The slot is withheld: nothing else is started there until the server's own report no longer shows the run, or the
longest time is over.  The record knows which they are (slotkeeper.jobs.quarantine); in Redis each has a lease of its
own, by a name that no job can have, whose owner says that it drains.  Maintenance looks after them, not a worker.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

import structlog

from routing.config import RoutingSettings
from routing.dispatch.decision import Decision
from routing.dispatch.dispatcher import Dispatcher, active_run_of
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.dispatch.run_steps import blocking_steps, end_run, run_blocking
from routing.maintenance import server_report
from routing.maintenance.pass_state import seen_by
from routing.maintenance.server_report import ExpectedRun, ServerReport
from routing.queue.fleets import isolate_errors
from routing.queue.leases import QUARANTINE_OWNER, Lease, LeasedJob, quarantine_lease
from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.jobs.values import PRIORITY_DEFAULT, Job, QueuedJob, Run
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.values import Server

log = structlog.get_logger(__name__)

# How much longer than its longest time a run may go on before maintenance ends it in its worker's stead.
_OVERLONG_MARGIN_MS = 30_000
# A server that only counts may have ended another run, of which its worker does not know yet.
_QUIET_MARGIN_MS = 2_000
# How long a server's word that a run goes on counts.  It is asked every 2 s.
_TOLD_WITHIN_MS = 30_000


# -- keeping ---------------------------------------------------------------------------------------------------


def sync_leases(dispatcher: Dispatcher) -> int:
    """Bring Redis to what the record says of slots that are withheld; answers how many it had wrong."""
    leases = dispatcher.leases.list_all(dispatcher.catalog.get().fleets())
    read = quarantine.list_all(dispatcher.store.database)
    rows = _by_fleet(dispatcher, read)
    _forget_gone(dispatcher, read)
    for fleet, its in rows.items():
        for row in [row for row in its if now_ms() >= row.until_ms]:
            log.warning("slot_quarantined_too_long", slot=row.slot, job_id=row.job_id)
            release(dispatcher, fleet, row)
            its.remove(row)
    wrong = 0
    for fleet, found in leases.items():
        with isolate_errors("keep", fleet=fleet):
            wrong += _keep(dispatcher, fleet, [lease for lease, _ in found], rows[fleet])
    return wrong


def _forget_gone(dispatcher: Dispatcher, rows: Sequence[QuarantinedSlot]) -> None:
    """Of servers that were removed under their runs: they are kept for their time, lest one is registered again."""
    servers, database = dispatcher.catalog.get().servers, dispatcher.store.database
    for row in rows:
        if row.server not in servers and now_ms() >= row.until_ms:
            quarantine.release(database, row.job_id, row.attempt)


def restore_quarantine(dispatcher: Dispatcher, fleets: Collection[str]) -> int:
    """Write the leases of these fleets' withheld slots again, after Redis was emptied; answers how many it had not."""
    rows = _by_fleet(dispatcher, quarantine.list_all(dispatcher.store.database))
    return sum(_restore(dispatcher, fleet, row) for fleet in fleets for row in rows[fleet])


def _keep(dispatcher: Dispatcher, fleet: str, leases: Sequence[Lease], rows: Sequence[QuarantinedSlot]) -> int:
    """The leases were read before the rows: a lease without its row has been given up."""
    known = {quarantine_lease(fleet, row.job_id, row.attempt, row.slot) for row in rows}
    given_up = [lease for lease in leases if lease.owner == QUARANTINE_OWNER and lease not in known]
    for lease in given_up:
        run_blocking(blocking_steps(dispatcher).free(lease, return_to_lane=False))
    if kept := [lease for lease in leases if lease in known]:
        dispatcher.leases.renew(fleet, QUARANTINE_OWNER, kept)
    # Its worker may still be telling the server, under the job's own lease.
    there = {(lease.job_id.partition("~")[0], lease.slot) for lease in leases}
    lost = [row for row in rows if (row.job_id, row.slot) not in there]
    return len(given_up) + sum(_restore(dispatcher, fleet, row) for row in lost)


def _restore(dispatcher: Dispatcher, fleet: str, row: QuarantinedSlot) -> int:
    lease = quarantine_lease(fleet, row.job_id, row.attempt, row.slot)
    of = QueuedJob(lease.job_id, 0, row.model, PRIORITY_DEFAULT, row.tenant)
    return dispatcher.leases.restore(fleet, [LeasedJob(lease, of)])


def _by_fleet(dispatcher: Dispatcher, rows: Sequence[QuarantinedSlot]) -> defaultdict[str, list[QuarantinedSlot]]:
    servers = dispatcher.catalog.get().servers
    found = defaultdict[str, list[QuarantinedSlot]](list)
    for row in rows:
        if row.server in servers:
            found[servers[row.server].fleet].append(row)
    return found


# -- letting go ------------------------------------------------------------------------------------------------


def servers(dispatcher: Dispatcher) -> set[str]:
    """Servers that should be asked now, since they have not let go of something."""
    return {row.server for row in quarantine.list_all(dispatcher.store.database)}


def by_server(dispatcher: Dispatcher) -> defaultdict[str, list[QuarantinedSlot]]:
    """All slots that are withheld, by server."""
    found = defaultdict[str, list[QuarantinedSlot]](list)
    for row in quarantine.list_all(dispatcher.store.database):
        found[row.server].append(row)
    return found


def expected_runs(rows: Sequence[QuarantinedSlot], report: ServerReport) -> list[ExpectedRun]:
    """The runs as a server's report is compared with them."""
    now = server_report.report_time_ms(report, now_ms())
    return [
        ExpectedRun(_run_id(row), server_report.run_names(row.job_id, row.attempt, row.remote_id), now - row.began_ms)
        for row in rows
    ]


def _run_id(row: QuarantinedSlot) -> str:
    return quarantine_lease("", row.job_id, row.attempt, row.slot).job_id


def apply_report(
    dispatcher: Dispatcher, server: Server, report: ServerReport, rows: Sequence[QuarantinedSlot], jobs: Sequence[Job]
) -> int:
    """Let slots be used again whose runs the server's report does not show; answers how many."""
    # Idle says no more than that a place is free: with several slots, runs may go on in the others.
    said = replace(report, active_jobs=0) if report.is_idle and server.slots == 1 else report
    gone = set(server_report.compare_runs(expected_runs(rows, said), said).stale)
    ended_ms = _process_ended_ms(dispatcher, server.name, report)
    freed, untold = 0, list[QuarantinedSlot]()
    for row in rows:
        is_gone = _run_id(row) in gone or (ended_ms is not None and row.began_ms < ended_ms)
        if is_gone or _is_over_by_count(dispatcher, report, row, jobs):
            freed += release(dispatcher, server.fleet, row)
        elif not report.shows_runs and not _is_told_to_run(dispatcher, row):
            untold.append(row)
    _shorten(dispatcher, untold)
    return freed


def _shorten(dispatcher: Dispatcher, rows: Sequence[QuarantinedSlot]) -> None:
    """Where nothing tells the end of a run, withhold its slot no longer than runs of its model usually take."""
    longest = {model: dispatcher.longest_usual_ms(model) for model in {row.model for row in rows}}
    for row in rows:
        if row.since_ms + longest[row.model] < row.until_ms:
            quarantine.shorten(dispatcher.store.database, row, row.since_ms + longest[row.model])


def note_running(dispatcher: Dispatcher, row: QuarantinedSlot) -> None:
    """Note that its server has told by the run's status that it goes on."""
    seen_by(dispatcher).confirmed_running[row.job_id, row.attempt] = now_ms()


def _is_told_to_run(dispatcher: Dispatcher, row: QuarantinedSlot) -> bool:
    told_ms = seen_by(dispatcher).confirmed_running.get((row.job_id, row.attempt))
    return told_ms is not None and now_ms() - told_ms < _TOLD_WITHIN_MS


def _process_ended_ms(dispatcher: Dispatcher, server: str, report: ServerReport) -> int | None:
    """When (ms) the process that has ended was last seen at the server's address; None: none has ended.

    Runs that began before have ended with it.  Later ones may be in the process that answers now.
    """
    now, seen = server_report.report_time_ms(report, now_ms()), seen_by(dispatcher).started
    if report.connection_refused:
        return now
    if report.process_started is None:
        return None
    known, last_ms, ended_ms = seen.get(server, (report.process_started, now, None))
    if now < last_ms:  # This report came late: a newer one was read before.
        return ended_ms
    if known != report.process_started:
        ended_ms = last_ms
    seen[server] = report.process_started, now, ended_ms
    return ended_ms


def _is_over_by_count(dispatcher: Dispatcher, report: ServerReport, row: QuarantinedSlot, jobs: Sequence[Job]) -> bool:
    """A server that only counts runs no more than we know of, for so long that nothing else explains it."""
    if report.job_ids is not None or not report.shows_runs:
        return False
    now = now_ms()
    old = [job for job in jobs if now - (job.started_ms or now) >= server_report.MIN_AGE_MS]
    if report.active_jobs is None or report.active_jobs > len(old):
        if row.quiet_ms is not None:
            quarantine.set_quiet_since(dispatcher.store.database, row, None)
        return False
    if row.quiet_ms is None:
        quarantine.set_quiet_since(dispatcher.store.database, row, now)
        return False
    return now - row.quiet_ms >= _QUIET_MARGIN_MS + max(
        (round(dispatcher.catalog.resolve(job.model).config.poll_interval * 1000) for job in jobs), default=0
    )


def release_run_slot(dispatcher: Dispatcher, job_id: str, attempt: int) -> bool:
    """Its server has told that it has done with a run whose slot is withheld.  False: none is."""
    row = quarantine.find(dispatcher.store.database, job_id, attempt)
    server = None if row is None else dispatcher.catalog.get().servers.get(row.server)
    return row is not None and server is not None and release(dispatcher, server.fleet, row)


def release_all(dispatcher: Dispatcher, server: Server, slot: str | None = None) -> int:
    """An operator says that the server runs none of these; `slot`: one of them.  Returns how many were released."""
    rows = by_server(dispatcher)[server.name]
    return sum(release(dispatcher, server.fleet, row) for row in rows if slot is None or row.slot == slot)


def release(dispatcher: Dispatcher, fleet: str, row: QuarantinedSlot) -> bool:
    """The slot may be used again.  False: somebody else has said so."""
    if not quarantine.release(dispatcher.store.database, row.job_id, row.attempt):
        return False
    crash_at("quarantine_ended")
    seen_by(dispatcher).confirmed_running.pop((row.job_id, row.attempt), None)
    run_blocking(
        blocking_steps(dispatcher).free(
            quarantine_lease(fleet, row.job_id, row.attempt, row.slot), return_to_lane=False
        )
    )
    log.info("slot_released", slot=row.slot, job_id=row.job_id, reason=row.reason, withheld_ms=now_ms() - row.since_ms)
    return True


def expire_lease(dispatcher: Dispatcher, lease: Lease) -> bool:
    """Nobody has kept the lease of a slot that drains.  False: the record withholds the slot still."""
    job_id, _, attempt = lease.job_id.rpartition("~")
    row = quarantine.find(dispatcher.store.database, job_id, int(attempt))
    if row is not None and now_ms() < row.until_ms:
        dispatcher.leases.renew(lease.fleet, QUARANTINE_OWNER, [lease])
        return False
    log.warning("slot_quarantined_too_long", slot=lease.slot, job_id=job_id)
    quarantine.release(dispatcher.store.database, job_id, int(attempt))
    run_blocking(blocking_steps(dispatcher).free(lease, return_to_lane=False))
    return True


# -- ends that no worker brings --------------------------------------------------------------------------------


class DecideEnd(Protocol):
    """Decides how a run ends, with the retry options of the task that carries runs out."""

    def __call__(
        self, run: Run, outcome: Outcome, config: ModelConfig, settings: RoutingSettings, /, *, canceling: bool
    ) -> Decision: ...


def end_overlong_runs(dispatcher: Dispatcher, decide_end: DecideEnd) -> int:
    """End runs that have long exceeded their longest time, though their workers do not; answers how many."""
    return sum(_end_overlong(dispatcher, job, decide_end) for job in dispatcher.store.list_running())


def _end_overlong(dispatcher: Dispatcher, job: Job, decide_end: DecideEnd) -> bool:
    model = dispatcher.catalog.get().models.get(job.model)
    active = active_run_of(dispatcher, job)
    if model is None or active is None:
        return False
    longest_ms = round(model.config.max_poll_time * 1000)
    if job.attempt > 1 and job.remote_id is None:  # It may first have waited for the request of an earlier worker.
        longest_ms += min(longest_ms, dispatcher.settings.withhold_max_ms)
    if now_ms() < active.run.started_ms + longest_ms + _OVERLONG_MARGIN_MS:
        return False
    message = "Exceeded max_poll_time, and its worker did not end it."
    outcome = Outcome(OutcomeKind.RETRY, code="timed_out", message=message, server_still_running=True)
    decision = decide_end(active.run, outcome, model.config, dispatcher.settings, canceling=active.run.cancel_requested)
    return end_run(dispatcher, active, decision) is not None


def sentence(row: QuarantinedSlot, *, named: bool = True) -> str:
    """For people: why the slot is withheld, and what would end that.  `named`: they may know which job it is."""
    whose = f"job {row.job_id!r}" if named else "another tenant's job"
    how = _HOW.get(row.reason, "ended")
    told = "tells by its status that it has ended, " if row.remote_id is not None else ""
    return (
        f"slot {row.slot} is withheld: {whose} {how} here at {_moment(row.since_ms)}, and its server may still run it; "
        f"the slot is used again when the server answers the request, {told}no longer reports the run, or was "
        f"restarted, and at {_moment(row.until_ms)} at the latest"
    )


def _moment(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms // 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"


_HOW = {
    "timed_out": "timed out",
    "canceled": "was canceled",
    "deadline_passed": "passed its deadline",
    "server_lost": "was lost",
    "connection_lost": "lost its connection",
    "worker_lost": "lost its worker",
}
