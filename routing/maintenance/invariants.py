"""Check the invariants that can be seen from outside.

A violation that is found once may be a job between two states; one that is found twice in a row is reported.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance.pass_state import ReaperState
from routing.maintenance.reaper import REPORTED_AFTER
from routing.maintenance.server_checks import ServerChecks
from routing.maintenance.server_report import ServerReport
from routing.queue.leases import QUARANTINE_OWNER, Lease
from slotkeeper.clock import now_ms
from slotkeeper.jobs import credits, ledger
from slotkeeper.jobs.states import State


class Check(StrEnum):
    """What can be violated."""

    LEDGER = "ledger_unbalanced"  # JOB-3
    ROOM = "queued_not_in_room"  # QUEUE-1: the database has more jobs of a fleet than Redis
    LEASE = "lease_without_run"  # a claimed lease without a run in the database
    RUN = "run_without_lease"  # a running job without a lease in Redis
    START = "offered_and_never_started"  # a queued job whose offers were not started again and again
    SLOT = "slot_differs"  # SLOT-1: a server does not have the job that holds its slot
    CREDIT = "credit_unbalanced"  # CREDIT-1: a tenant's balance is not what its transfers and its jobs make it


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One violation.  `subject`: a job id, a fleet, a tenant, or "ledger"."""

    check: Check
    subject: str


def find_violations(
    dispatcher: Dispatcher,
    checks: ServerChecks,
    reaper: ReaperState,
    reports: Mapping[str, ServerReport],
    *,
    with_transfers: bool = True,
) -> set[Finding]:
    """Return all violations at this moment.

    `checks` and `reaper`: of this process.  with_transfers: add up all transfers of credits, which may be millions.
    """
    database = dispatcher.store.database
    found = {Finding(Check.SLOT, job.id) for job in checks.find_stale_runs(reports)}
    found |= {Finding(Check.CREDIT, name) for name in credits.find_unbalanced(database, with_transfers=with_transfers)}
    if not ledger.read(database).balanced:
        found.add(Finding(Check.LEDGER, "ledger"))
    leases = dispatcher.leases.list_all(dispatcher.catalog.get().fleets())
    return (
        found | _compare_runs(dispatcher, leases) | _compare_queues(dispatcher, leases) | _unstarted(dispatcher, reaper)
    )


def _unstarted(dispatcher: Dispatcher, reaper: ReaperState) -> set[Finding]:
    """Return queued jobs that the reaper found unstarted too often; jobs that have started or ended are forgotten."""
    unstarted = reaper.unstarted
    statuses = dispatcher.store.get_statuses(list(unstarted))
    for job_id, (attempt, _) in list(unstarted.items()):
        status = statuses.get(job_id)
        if status is None or status.state is not State.QUEUED or status.attempt != attempt:
            unstarted.pop(job_id, None)
    return {Finding(Check.START, job_id) for job_id, (_, times) in list(unstarted.items()) if times >= REPORTED_AFTER}


def _compare_runs(dispatcher: Dispatcher, leases: Mapping[str, list[tuple[Lease, int]]]) -> set[Finding]:
    without_run = ("", QUARANTINE_OWNER)  # owners of offers, and of quarantined slots
    claimed = {
        lease.job_id: lease.stored_text
        for held in leases.values()
        for lease, _ in held
        if lease.owner not in without_run
    }
    running = {job.id: job.lease for job in dispatcher.store.list_running()}
    differing = [job_id for job_id, stored_text in claimed.items() if running.get(job_id) != stored_text]
    found = {Finding(Check.LEASE, job_id) for job_id in differing if not _has_just_ended(dispatcher, job_id)}
    return found | {Finding(Check.RUN, job_id) for job_id in running.keys() - claimed.keys()}


def _has_just_ended(dispatcher: Dispatcher, job_id: str) -> bool:
    """A worker that died after it had stored the end leaves a lease, which soon expires."""
    job = dispatcher.store.get(job_id)
    ended_ms = job.finished_ms if job is not None else None
    return ended_ms is not None and now_ms() - ended_ms < dispatcher.settings.lease_ms


def _compare_queues(dispatcher: Dispatcher, leases: Mapping[str, list[tuple[Lease, int]]]) -> set[Finding]:
    queued = ledger.queued_by_model(dispatcher.store.database)
    catalog, found = dispatcher.catalog.get(), set()
    for fleet, counts in dispatcher.fleets.counts(list(leases)).items():
        stored = sum(queued[model] for model in catalog.models_of(fleet))
        in_redis = sum(counts.waiting.values()) + sum(not lease.owner for lease, _ in leases[fleet])
        if stored > in_redis:
            found.add(Finding(Check.ROOM, fleet))
    return found


def count_by_check(findings: set[Finding]) -> dict[str, int]:
    """Return how many violations of each check, also 0, so that a gauge falls back."""
    counted = Counter(finding.check for finding in findings)
    return {check.value: counted[check] for check in Check}
