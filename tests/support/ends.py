"""End runs as the product does, by its decisions, steps and writes."""

from dataclasses import dataclass
from typing import Any

from routing.dispatch.decision import Decision, signal_of
from routing.dispatch.dispatcher import ActiveRun, Dispatcher
from routing.dispatch.outcome import Outcome, StopReason
from routing.dispatch.run_steps import OnPostponed, RunSteps, ThreadIo, blocking_steps, end_run, run_blocking
from routing.queue.leases import Lease, Leases, Released
from routing.queue.queues import Offer
from slotkeeper.clock import now_ms
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.store import JobStore, Transition
from slotkeeper.jobs.values import JobError, Quarantine
from tasks import retries
from tasks.worker.executor import finish_run


@dataclass(frozen=True, slots=True)
class Settled:
    """The end of a run.  `moved` None: the run had ended before, and nothing was stored."""

    moved: Transition | None
    next: Offer | None  # already claimed by the claimant


def store_end(store: JobStore, job_id: str, attempt: int, why: Reason, now_ms: int, **ends: Any) -> Transition | None:
    """Store the end of a run, and return the transition; None: the run had ended before."""
    return store.database.commit(store.settle_write(job_id, attempt, why, now_ms, **ends))


def decided(dispatcher: Dispatcher, active: ActiveRun, outcome: Outcome | StopReason) -> Decision:
    """Return how a run with this outcome ends, by its model's configuration."""
    run, config = active.run, dispatcher.catalog.resolve(active.run.job.model).config
    return retries.decide_end(run, outcome, config, dispatcher.settings, canceling=run.cancel_requested)


def end_in_order(
    dispatcher: Dispatcher,
    active: ActiveRun,
    decision: Decision,
    claimant: str = "",
    postponed: OnPostponed | None = None,
) -> Settled:
    """End a run as its worker does, in the order of the decision."""
    following: list[Offer | None] = []

    async def spawn(offer: Offer | None, _: float) -> None:
        following.append(offer)

    moved = run_blocking(
        finish_run(RunSteps(dispatcher, ThreadIo(dispatcher), postponed), active, decision, lambda: claimant, spawn)
    )
    return Settled(moved, following[0])


def end_run_with(
    dispatcher: Dispatcher,
    active: ActiveRun,
    why: Reason,
    *,
    result: str | None = None,
    error: JobError | None = None,
    due_ms: int | None = None,
    server_still_running: str = "",
) -> Transition | None:
    """End a run for a reason, as maintenance does.  `server_still_running`: why its slot is quarantined, or ""."""
    at_ms, run = now_ms(), active.run
    if due_ms is None:
        config = dispatcher.catalog.resolve(run.job.model).config
        due_ms = at_ms + round(retries.countdown_s(run.failures, config) * 1000)
    quarantine = (
        Quarantine(server_still_running, at_ms + dispatcher.settings.withhold_max_ms) if server_still_running else None
    )
    decision = Decision(
        why,
        result=result,
        error=error,
        due_ms=due_ms,
        signal=signal_of(why),
        cooldown_ms=dispatcher.settings.busy_cooldown_ms if why is Reason.SERVER_BUSY else 0,
        quarantine=quarantine,
    )
    return end_run(dispatcher, active, decision)


def hand_back(dispatcher: Dispatcher, active: ActiveRun) -> bool:
    """Let another worker resume a run.  Returns False if the run had ended."""
    return end_run(dispatcher, active, decided(dispatcher, active, StopReason.STOPPED)) is not None


def release(leases: Leases, lease: Lease, **how: Any) -> Released:
    """Release a lease."""
    (released,) = leases.scripts.run(leases.release_command(lease, **how))
    return released


def free(dispatcher: Dispatcher, lease: Lease, *, return_to_lane: bool) -> Offer | None:
    """Free a slot."""
    return run_blocking(blocking_steps(dispatcher).free(lease, return_to_lane=return_to_lane))


def cool_down(dispatcher: Dispatcher, fleet: str, server: str) -> int:
    """Begin or prolong a server's cooldown, and return how long it is, in ms."""
    slots = dispatcher.slots
    return slots.scripts.run(slots.cool_down_command(fleet, server)).cooldown_ms
