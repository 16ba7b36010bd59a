"""Queue delayed jobs that are due, expire deadlines, end overlong runs, purge old jobs."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from routing.config import RoutingSettings
from routing.dispatch.decision import Decision
from routing.dispatch.dispatcher import Dispatcher, active_run_of
from routing.dispatch.outcome import Outcome, OutcomeKind
from routing.dispatch.run_steps import end_run
from routing.queue.fleets import isolate_errors
from slotkeeper.clock import clock, now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.db.pages import run_pages
from slotkeeper.jobs import ledger
from slotkeeper.jobs.store import Transition
from slotkeeper.jobs.values import Job, Quarantine, QueuedJob, Run
from slotkeeper.outbox import retention
from slotkeeper.registry.model_config import ModelConfig

T = TypeVar("T")

_CHUNK = 200  # Jobs that one transaction moves: other writers wait for it.
# For so long a run may exceed its longest time before maintenance ends it instead of its worker.
_OVERLONG_MARGIN_MS = 30_000


class DecideEnd(Protocol):
    """Decides how a run ends, with the retry options of the Celery task `infer`."""

    def __call__(
        self, run: Run, outcome: Outcome, config: ModelConfig, settings: RoutingSettings, /, *, canceling: bool
    ) -> Decision: ...


def promote_due_jobs(dispatcher: Dispatcher, within_s: float = float("inf")) -> int:
    """Queue delayed jobs that are due, and return how many.  After `within_s` the rest is left to the next call."""

    def enqueue(jobs: Sequence[QueuedJob]) -> None:
        crash_at("promote_committed")
        dispatcher.enqueue(jobs)

    return _in_batches(lambda: dispatcher.store.promote_due(now_ms(), _CHUNK), enqueue, within_s)


def expire_deadlines(dispatcher: Dispatcher, within_s: float = float("inf")) -> int:
    """End jobs whose deadline has passed, whatever their state, and return how many.  `within_s`: as above.

    The deadlines are in the database, so none is missed however late this runs.
    """

    def withdraw(ended: Sequence[Transition]) -> None:
        crash_at("expire_committed")
        dispatcher.withdraw([moved.job for moved in ended])  # or mark their leases; then their workers free the slots
        for moved in ended:
            with isolate_errors("notify", job_id=moved.job.id):
                dispatcher.notify_ended(moved)

    def take() -> list[Transition]:
        now = now_ms()
        quarantine = Quarantine("deadline_passed", now + dispatcher.settings.withhold_max_ms)
        return dispatcher.store.expire_overdue(now, _CHUNK, quarantine)

    return _in_batches(take, withdraw, within_s)


def end_overlong_runs(dispatcher: Dispatcher, decide_end: DecideEnd) -> int:
    """End runs that have long exceeded their longest time without being ended by their workers; return how many."""
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


def purge_ended_jobs(dispatcher: Dispatcher, retention_s: int, within_s: float = float("inf")) -> int:
    """Delete expired Idempotency-Keys, and jobs that ended longer ago than `retention_s`; return how many jobs.

    `within_s`: as above; keys get half of it.
    """
    store = dispatcher.store
    run_pages(lambda: store.delete_expired_keys(now_ms()), within_s / 2)
    ledger.fold(store.database)

    def delete_jobs() -> int:
        deleted = retention.delete_ended_jobs(store.database, clock.ago_ms(retention_s * 1000, now_ms()), _CHUNK)
        if deleted:
            crash_at("purge_committed")
        return deleted

    return run_pages(delete_jobs, within_s)


def _in_batches(take: Callable[[], Sequence[T]], act: Callable[[Sequence[T]], None], within_s: float) -> int:
    """Take batches and act on each, until there is none or the time is over; return how many items."""

    def run_batch() -> int:
        if batch := take():
            act(batch)
        return len(batch)

    return run_pages(run_batch, within_s)
