"""Every invariant that can be seen from outside, checked against what is really there.

A difference that is seen once may be a job on its way; one that is seen twice in a row is a finding.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance.pass_state import seen_by
from routing.maintenance.reaper import REPORTED_AFTER
from routing.maintenance.server_checks import find_stale_runs
from routing.maintenance.server_report import ServerReport
from routing.queue.leases import QUARANTINE_OWNER, Lease
from slotkeeper.clock import now_ms
from slotkeeper.jobs import ledger
from slotkeeper.jobs.states import State


class Check(StrEnum):
    """What can differ."""

    LEDGER = "ledger_unbalanced"  # JOB-3
    ROOM = "queued_not_in_room"  # QUEUE-1: the record's and the room's counts of a fleet
    LEASE = "lease_without_run"  # a claimed lease, and the record knows no such run
    RUN = "run_without_lease"  # a running job whose lease Redis does not have
    START = "offered_and_never_started"  # a queued job whose offers were met unstarted again and again
    SLOT = "slot_differs"  # SLOT-1: a server does not know the job that holds its slot


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One difference; `subject` is a job id, or a fleet's or the ledger's name."""

    check: Check
    subject: str


def find_violations(dispatcher: Dispatcher, reports: Mapping[str, ServerReport]) -> set[Finding]:
    """All differences at this moment."""
    found = {Finding(Check.SLOT, job.id) for job in find_stale_runs(dispatcher, reports)}
    if not ledger.read(dispatcher.store.database).balanced:
        found.add(Finding(Check.LEDGER, "ledger"))
    leases = dispatcher.leases.list_all(dispatcher.catalog.get().fleets())
    return found | _runs(dispatcher, leases) | _rooms(dispatcher, leases) | _unstarted(dispatcher)


def _unstarted(dispatcher: Dispatcher) -> set[Finding]:
    """What the reaper of this process has met; jobs that have begun since, or ended, are forgotten."""
    met = seen_by(dispatcher).unstarted
    briefs = dispatcher.store.get_statuses(list(met))
    for job_id, (attempt, _) in list(met.items()):
        found = briefs.get(job_id)
        if found is None or found.state is not State.QUEUED or found.attempt != attempt:
            met.pop(job_id, None)
    return {Finding(Check.START, job_id) for job_id, (_, times) in list(met.items()) if times >= REPORTED_AFTER}


def _runs(dispatcher: Dispatcher, leases: Mapping[str, list[tuple[Lease, int]]]) -> set[Finding]:
    theirs = ("", QUARANTINE_OWNER)  # offers, and slots that drain: they run nothing
    claimed = {
        lease.job_id: lease.stored_text for fleet in leases.values() for lease, _ in fleet if lease.owner not in theirs
    }
    running = {job.id: job.lease for job in dispatcher.store.list_running()}
    suspicious = [job for job, tag in claimed.items() if running.get(job) != tag]
    without_run = {Finding(Check.LEASE, job) for job in suspicious if not _has_just_ended(dispatcher, job)}
    return without_run | {Finding(Check.RUN, job) for job in running.keys() - claimed.keys()}


def _has_just_ended(dispatcher: Dispatcher, job_id: str) -> bool:
    """A worker that died between the end in the record and freeing the slot leaves a lease that soon expires."""
    job = dispatcher.store.get(job_id)
    ended_ms = job.finished_ms if job is not None else None
    return ended_ms is not None and now_ms() - ended_ms < dispatcher.settings.lease_ms


def _rooms(dispatcher: Dispatcher, leases: Mapping[str, list[tuple[Lease, int]]]) -> set[Finding]:
    queued = ledger.queued_by_model(dispatcher.store.database)
    catalog = dispatcher.catalog.get()
    found = set()
    for fleet, room in dispatcher.fleets.counts(list(leases)).items():
        recorded = sum(queued[model] for model in catalog.models_of(fleet))
        in_room = sum(room.waiting.values()) + sum(not lease.owner for lease, _ in leases[fleet])
        if recorded > in_room:
            found.add(Finding(Check.ROOM, fleet))
    return found


def count_by_check(findings: set[Finding]) -> dict[str, int]:
    """How many of each; zero included, so that a gauge falls back."""
    counted = Counter(finding.check for finding in findings)
    return {check.value: counted[check] for check in Check}
