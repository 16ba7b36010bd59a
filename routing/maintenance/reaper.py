"""Take back expired offers and leases, and those of workers that have died."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog
from redis.exceptions import RedisError

from routing.dispatch.decision import Decision, crash_reason, decide
from routing.dispatch.dispatcher import Dispatcher, active_run_of
from routing.dispatch.outcome import StopReason
from routing.dispatch.run_steps import blocking_steps, run_blocking
from routing.maintenance import quarantined_slots, restore_leases
from routing.maintenance.pass_state import ReaperState
from routing.queue.fleets import LeaseSpan, isolate_errors
from routing.queue.leases import QUARANTINE_OWNER, Lease
from routing.queue.worker_capacity import WorkerCapacity, is_stopping
from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.values import Job, JobError, Quarantine
from slotkeeper.process_locks import ProcessLocks
from slotkeeper.registry.run_config import apply_terms

log = structlog.get_logger(__name__)

REPORTED_AFTER = 6
"""After so many offers that were not started, each for `offer_ms` or a lease, a job is reported as a violation."""

_REAPER = "reaper"
_AT_ONCE = 8
_PAUSED_S = 2.5  # The reaper runs twice a second; without a pass for so long, Redis or beat was away.
_CLOCK_SET_S = 0.5  # Two clocks drift apart by more only if one of them was set.


class RenewalGrace:
    """Keeps the reaper from leases that living workers could not renew, until they have had time to do so.

    They could not while Redis was away: a pass failed, or, as Redis is the broker too, there was none for a while.  And
    leases that expired because Redis' clock was set forward get time to be renewed by the new clock.
    """

    def __init__(self) -> None:
        self._last_pass_s: float | None = None
        self._offset_s: tuple[float, float] | None = None  # bounds of Redis' clock minus our monotonic one
        self._until_s: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether expired leases prove nothing at present."""
        return self._until_s is not None

    def may_reap(self, asked_s: float, now_s: float, redis_s: float, pause_s: float) -> bool:
        """Return whether expired leases may be taken.

        Redis was asked for its time at `asked_s` and had answered `redis_s` by `now_s`; the others are monotonic.
        `pause_s`: how long to wait after Redis was away.
        """
        was_away = self._last_pass_s is not None and now_s - self._last_pass_s > _PAUSED_S
        self._last_pass_s = now_s
        if self._was_clock_set(redis_s - now_s, redis_s - asked_s):
            log.warning("redis_clock_was_set")
            self._until_s = now_s + pause_s
        elif self._until_s is None and was_away:
            self._until_s = now_s + pause_s
        if self._until_s is not None and now_s < self._until_s:
            return False
        self._until_s = None
        return True

    def note_failure(self) -> None:
        """Note that Redis did not answer."""
        self._last_pass_s = float("-inf")

    def _was_clock_set(self, least_s: float, most_s: float) -> bool:
        before, self._offset_s = self._offset_s, (least_s, most_s)
        return before is not None and (least_s > before[1] + _CLOCK_SET_S or most_s < before[0] - _CLOCK_SET_S)


class Reaper:
    """Takes back what its holder has left.  `grace` None: expired leases are taken at once."""

    def __init__(self, dispatcher: Dispatcher, grace: RenewalGrace | None = None) -> None:
        self._dispatcher, self._grace = dispatcher, grace
        self.state = ReaperState()

    def reap(self) -> int:
        """Take back offers that no worker has claimed and leases that no worker has renewed; return how many.

        Raises redis errors.
        """
        dispatcher, asked_s = self._dispatcher, time.monotonic()
        try:
            spans = dispatcher.fleets.lease_spans(dispatcher.catalog.get().fleets())
        except RedisError:
            if self._grace is not None:
                self._grace.note_failure()
            raise
        if self._grace is not None and not self._may_reap(self._grace, asked_s, spans):
            return 0
        return self._reap_expired([fleet for fleet, span in spans.items() if span.has_expired])

    def reap_dead_workers(self, workers: WorkerCapacity, process_locks: ProcessLocks) -> int:
        """Take back at once the leases of workers whose processes have certainly ended; return how many.

        This needs no grace.  A queue that is not open is left to its rebuild.  A worker is forgotten by the pass that
        finds nothing of it any more: what it sent last may arrive after the first pass.
        """
        dead = set(process_locks.find_dead())
        if not dead:
            return 0
        dispatcher = self._dispatcher
        for owner in dead:
            if not is_stopping(dispatcher.leases.scripts, owner):
                workers.remove(owner)
        fleets = dispatcher.catalog.get().fleets()
        counts = dispatcher.fleets.counts(fleets)
        running = restore_leases.restore_for_owners(dispatcher, dead)
        held = dispatcher.leases.list_all([fleet for fleet, count in counts.items() if count.is_open])
        theirs = [lease for leases in held.values() for lease, _ in leases if lease.owner in dead]
        if len(held) == len(fleets):
            for owner in dead - running - {lease.owner for lease in theirs}:
                process_locks.remove(owner)
                workers.remove(owner)
        if theirs:
            log.warning("workers_killed", workers=sorted({lease.owner for lease in theirs}), leases=len(theirs))
        return _reap_each(theirs, lambda lease: self._reap_lease(lease, has_died=True))

    def _may_reap(self, grace: RenewalGrace, asked_s: float, spans: Mapping[str, LeaseSpan]) -> bool:
        redis_s = max((span.now_ms for span in spans.values()), default=0) / 1000
        settings = self._dispatcher.settings
        # A renewal that was sent just before Redis came back waits for its timeout; the next one arrives.
        pause_s = settings.redis_timeout_s + 2 * settings.renew_every_ms / 1000
        return bool(spans) and grace.may_reap(asked_s, time.monotonic(), redis_s, pause_s)

    def _reap_expired(self, fleets: Sequence[str]) -> int:
        expired: list[Lease] = []
        for fleet in fleets:
            with isolate_errors("reap", fleet=fleet):
                expired += self._dispatcher.leases.list_expired(fleet)
        expired.sort(key=lambda lease: lease.owner == "")  # Runs first: an offer only gets more time.
        return _reap_each(expired, lambda lease: self._reap_lease(lease) if lease.owner else self._reap_offer(lease))

    def _reap_offer(self, lease: Lease) -> bool:
        """Extend an expired offer, so that later jobs do not overtake its job; take it back if it may not start.

        Workers look for open offers themselves, so its message is not sent again.
        """
        job = self._dispatcher.store.get(lease.job_id)
        if job is not None and job.state is State.QUEUED:
            result = self._dispatcher.leases.extend_offer(lease, resumes=job.server == lease.server)
            if result == "kept":
                self._note_unstarted(job, lease)
            if result != "closed":
                return False
        run_blocking(blocking_steps(self._dispatcher).give_up(lease))
        return True

    def _note_unstarted(self, job: Job, lease: Lease) -> None:
        times = self.state.note_unstarted(job.id, job.attempt)
        if times == REPORTED_AFTER and self._dispatcher.queues.worker_capacity():
            log.warning("offered_and_never_started", job_id=job.id, slot=lease.slot, times=times)

    def _reap_lease(self, lease: Lease, *, has_died: bool = False) -> bool:
        """Seize a lease first, so that its holder, should it wake, can neither renew nor release it.

        has_died: the process of its holder has certainly ended.
        """
        dispatcher = self._dispatcher
        if lease.owner == QUARANTINE_OWNER:
            return quarantined_slots.expire_lease(dispatcher, lease)
        seized = dispatcher.leases.seize(lease, _REAPER, dispatcher.settings.offer_ms, only_expired=not has_died)
        if seized is None:
            return False
        crash_at("reap_seized")
        job = dispatcher.store.get(lease.job_id)
        # The reaper's own lease expires only if a reaper died before it had stored the end of the run.
        is_its_run = job is not None and (job.lease == lease.stored_text or lease.owner == _REAPER)
        if job is not None and job.state is State.RUNNING and is_its_run:
            _end_lost_run(dispatcher, seized, job, "has died" if has_died else "stopped renewing its lease")
            return True
        # Its holder died before the start or after the end was stored.
        if job is not None and job.state is State.QUEUED:
            self.state.note_unstarted(job.id, job.attempt)
        run_blocking(blocking_steps(dispatcher).give_up(seized))
        return True


def _reap_each(leases: Sequence[Lease], reap_one: Callable[[Lease], bool]) -> int:
    """Reap several leases at a time, so that they share commits: a dead worker leaves one for each of its runs."""
    if not leases:
        return 0

    def reap_isolated(lease: Lease) -> bool:
        with isolate_errors("reap", fleet=lease.fleet, job_id=lease.job_id):
            return reap_one(lease)
        return False

    with ThreadPoolExecutor(_AT_ONCE, "reap") as threads:
        return sum(threads.map(reap_isolated, leases))


def _end_lost_run(dispatcher: Dispatcher, seized: Lease, job: Job, how: str) -> None:
    """End the run of a worker that has died.  Its server may still run the job, so the job is resumed in the same slot.

    In another slot it could run twice at once.  In this one, another worker continues to poll, or repeats the call: the
    server joins it to the run, answers from memory, or says that it is busy, and then the job returns to its lane.  A
    worker that was stopping, and ended before it had handed the job over, costs the job nothing.
    """
    active = active_run_of(dispatcher, job)
    config = apply_terms(dispatcher.catalog.resolve(job.model).config, job.terms)
    if active is not None and is_stopping(dispatcher.leases.scripts, active.lease.owner):
        decision = decide(active.run, StopReason.STOPPED, config, dispatcher.settings, now_ms(), canceling=False)
    else:
        decision = Decision(
            crash_reason(job.crashes, config, Reason.LEASE_EXPIRED),
            error=JobError("worker_lost", f"The worker that ran it on {job.slot} {how}."),
            quarantine=Quarantine("worker_lost", now_ms() + dispatcher.settings.withhold_max_ms, resumes=True),
            resume_in_slot=True,
        )
    _end_seized(dispatcher, seized, job, decision, "reap_committed")


def end_unknown_run(dispatcher: Dispatcher, job: Job) -> bool:
    """End a run that its server does not know any more; return False if it has ended meanwhile."""
    active = active_run_of(dispatcher, job)
    if active is None:
        return False
    seized = dispatcher.leases.seize(active.lease, _REAPER, dispatcher.settings.offer_ms, only_expired=False)
    if seized is None:
        return False
    crash_at("stale_seized")
    # Its worker, which had found out the same, may have sent it again; after this it finds the lease seized.
    current = dispatcher.store.get(job.id)
    if current is None or current.requested_ms != job.requested_ms:
        return False
    decision = Decision(
        crash_reason(job.crashes, apply_terms(dispatcher.catalog.resolve(job.model).config, job.terms)),
        error=JobError("server_lost", f"Server {job.server} does not know the job any more."),
        resume_in_slot=True,  # The server may remember the result of a run that has ended.
    )
    return _end_seized(dispatcher, seized, job, decision, "stale_committed")


def _end_seized(dispatcher: Dispatcher, seized: Lease, job: Job, decision: Decision, crash_point: str) -> bool:
    """End the run whose lease was seized; return False if it was over before."""
    active, steps = active_run_of(dispatcher, job), blocking_steps(dispatcher)
    if active is None:
        return False
    active = active._replace(lease=seized)
    moved = run_blocking(steps.store(active, decision))
    crash_at(crash_point)
    if moved is None:
        run_blocking(steps.give_up(seized))
        return False
    run_blocking(steps.release(active, decision, moved.to))
    steps.notify(moved)
    return True
