"""Leases whose holder is gone, and runs that their server no longer knows."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog
from redis.exceptions import RedisError

from routing.dispatch.decision import Decision, crash_reason, decide
from routing.dispatch.dispatcher import Dispatcher, active_run_of
from routing.dispatch.outcome import StopReason
from routing.dispatch.run_steps import blocking_steps, run_blocking
from routing.maintenance import quarantined_slots, restore_leases
from routing.maintenance.pass_state import seen_by
from routing.queue.fleets import LeaseSpan, isolate_errors
from routing.queue.leases import QUARANTINE_OWNER, Lease
from routing.queue.queues import Offer
from routing.queue.worker_capacity import WorkerCapacity, was_told_to_stop
from slotkeeper.clock import now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.values import Job, JobError, Quarantine
from slotkeeper.process_locks import ProcessLocks

log = structlog.get_logger(__name__)

_REAPER = "reaper"
_AT_ONCE = 8
REPORTED_AFTER = 6
"""How often a job's offers are met unstarted, each after `offer_ms` or a lease, until that is worth a word."""
# The reaper looks twice a second; Redis, or beat, was away if it could not for so long.
_NOT_LOOKED_S = 2.5
# Redis' clock and ours go apart by more than this only if one of them was set.
_CLOCK_SET_S = 0.5


class RenewalGrace:
    """Keeps the reaper from leases whose living holders could not renew them, as long as those need to do so now.

    Redis was away if a look failed, or, as it is the broker too, if there was no look for a while.  And leases that
    expired because Redis' clock was set forward get time to be renewed by the new one.
    """

    def __init__(self) -> None:
        self._looked: float | None = None  # nobody has looked yet, and no time has gone by since
        self._apart: tuple[float, float] | None = None  # bounds of what Redis' clock is ahead of our monotonic one
        self._until: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether silence proves nothing at present."""
        return self._until is not None

    def may_reap(self, asked_s: float, now_s: float, redis_s: float, pause_s: float) -> bool:
        """Whether leases that have expired may be taken.

        Redis was asked for its time at `asked_s` and had answered `redis_s` by `now_s`; the others are monotonic.
        `pause_s`: how long to wait after Redis was away.
        """
        away = self._looked is not None and now_s - self._looked > _NOT_LOOKED_S
        self._looked = now_s
        if self._clock_was_set(redis_s - now_s, redis_s - asked_s):
            log.warning("redis_clock_was_set")
            self._until = now_s + pause_s
        elif self._until is None and away:
            self._until = now_s + pause_s
        if self._until is not None and now_s < self._until:
            return False
        self._until = None
        return True

    def _clock_was_set(self, least: float, most: float) -> bool:
        before, self._apart = self._apart, (least, most)
        return before is not None and (least > before[1] + _CLOCK_SET_S or most < before[0] - _CLOCK_SET_S)

    def note_failure(self) -> None:
        self._looked = float("-inf")


def reap(dispatcher: Dispatcher, patience: RenewalGrace | None = None) -> int:
    """Take back offers that nobody took up and leases that nobody renewed; answers how many.

    What would last longer than it ever may, since Redis' clock was set back, is ended.  Raises redis errors.
    """
    fleets = dispatcher.catalog.get().fleets()
    asked_s = time.monotonic()
    try:
        spans = dispatcher.fleets.lease_spans(fleets)
    except RedisError:
        if patience is not None:
            patience.note_failure()
        raise
    for fleet, span in spans.items():
        if span.last_ms > span.now_ms + dispatcher.fleets.longest_lease_ms:
            with isolate_errors("pull_back", fleet=fleet):
                pulled = dispatcher.fleets.clamp_times(fleet)
                log.warning("leases_pulled_back", fleet=fleet, how_many=pulled)
    if patience is not None and not _has_patience_ended(dispatcher, patience, asked_s, spans):
        return 0
    return _reap_all(dispatcher, [fleet for fleet, span in spans.items() if span.has_expired])


def _has_patience_ended(
    dispatcher: Dispatcher, patience: RenewalGrace, asked_s: float, spans: dict[str, LeaseSpan]
) -> bool:
    redis_s = max((span.now_ms for span in spans.values()), default=0) / 1000
    settings = dispatcher.settings
    # A renewal that was sent just before Redis came back has its time-out first; the next one is heard.
    pause_s = settings.redis_timeout_s + 2 * settings.renew_every_ms / 1000
    return bool(spans) and patience.may_reap(asked_s, time.monotonic(), redis_s, pause_s)


def _reap_all(dispatcher: Dispatcher, fleets: Sequence[str]) -> int:
    expired: list[Lease] = []
    for fleet in fleets:
        with isolate_errors("reap", fleet=fleet):
            expired += dispatcher.leases.list_expired(fleet)
    expired.sort(key=lambda lease: lease.owner == "")  # Runs first: an offer only gets more time.

    def reap_one(lease: Lease) -> bool:
        return _reap_offer(dispatcher, lease) if lease.owner == "" else _reap_lease(dispatcher, lease)

    return _reap_each(expired, reap_one)


def _reap_each(leases: Sequence[Lease], reap_one: Callable[[Lease], bool]) -> int:
    """Some at a time, so that they share commits: a worker that dies leaves as many leases as it had threads."""
    if not leases:
        return 0

    def reap_alone(lease: Lease) -> bool:
        with isolate_errors("reap", fleet=lease.fleet, job_id=lease.job_id):
            return reap_one(lease)
        return False

    with ThreadPoolExecutor(_AT_ONCE, "reap") as threads:
        return sum(threads.map(reap_alone, leases))


def reap_dead_workers(dispatcher: Dispatcher, workers: WorkerCapacity, lifetimes: ProcessLocks) -> int:
    """Take back at once what workers hold whose processes are proved to have ended; answers how many leases.

    Redis may have been away: this is no silence.  A room that is not open is left to its rebuild.  A worker is
    forgotten by the look that finds nothing more of it anywhere: what it sent last may have come after the first.
    """
    killed = set(lifetimes.find_dead())
    if not killed:
        return 0
    for owner in killed:
        if not was_told_to_stop(dispatcher.leases.scripts, owner):
            workers.remove(owner)
    fleets = dispatcher.catalog.get().fleets()
    found = dispatcher.fleets.counts(fleets)
    running = restore_leases.restore_for_owners(dispatcher, killed)
    held = dispatcher.leases.list_all([fleet for fleet, room in found.items() if room.is_open])
    theirs = [lease for leases in held.values() for lease, _ in leases if lease.owner in killed]
    if len(held) == len(fleets):
        for owner in killed - running - {lease.owner for lease in theirs}:
            lifetimes.remove(owner)
            workers.remove(owner)
    if theirs:
        log.warning("workers_killed", workers=sorted({lease.owner for lease in theirs}), leases=len(theirs))
    return _reap_each(theirs, lambda lease: _reap_lease(dispatcher, lease, killed=True))


def _reap_offer(dispatcher: Dispatcher, lease: Lease) -> bool:
    """An offer that nobody has taken up keeps its slot and its message: its job is not overtaken by later ones.

    Workers look by themselves for those whose message is lost.
    """
    job = dispatcher.store.get(lease.job_id)
    resumes = job is not None and job.server == lease.server
    if job is not None and job.state is State.QUEUED:
        kept = dispatcher.leases.extend_offer(lease, resumes=resumes)
        if kept == "kept":
            _note_unstarted(dispatcher, lease, job)
        if kept != "closed":
            return False
    _put_back(dispatcher, lease, job)
    return True


def _note_unstarted(dispatcher: Dispatcher, lease: Lease, job: Job) -> None:
    """Wake workers once more where an offer is met again and again, if any has room for it; once only, so that
    messages do not pile up at a broker that nobody reads."""
    times = seen_by(dispatcher).note_unstarted(job.id, job.attempt)
    if times == REPORTED_AFTER and dispatcher.queues.worker_capacity():
        log.warning("offered_and_never_started", job_id=job.id, slot=lease.slot, times=times)
        dispatcher.publish_offers([Offer(lease.fleet, job.id, lease.name, lease.slot, lease.server, job.model, 0)])


def _reap_lease(dispatcher: Dispatcher, lease: Lease, *, killed: bool = False) -> bool:
    """Seize the lease first, so that its holder, should it wake, can neither renew nor free it.

    `killed`: its holder is proved to have ended.
    """
    if lease.owner == QUARANTINE_OWNER:
        return quarantined_slots.expire_lease(dispatcher, lease)
    mine = dispatcher.leases.seize(lease, _REAPER, dispatcher.settings.offer_ms, only_expired=not killed)
    if mine is None:
        return False
    crash_at("reap_seized")
    job = dispatcher.store.get(lease.job_id)
    # The reaper's own lease expires only if a reaper died before it had written the end of the run.
    if job is not None and job.state is State.RUNNING and (job.lease == lease.stored_text or lease.owner == _REAPER):
        _end_lost_run(dispatcher, mine, job, "has died" if killed else "stopped renewing its lease")
    else:  # Its holder died before the start or after the end was written.
        if job is not None and job.state is State.QUEUED:
            seen_by(dispatcher).note_unstarted(job.id, job.attempt)
        _put_back(dispatcher, mine, job)
    return True


def _put_back(dispatcher: Dispatcher, lease: Lease, job: Job | None) -> None:
    """A job that is not running: to its place, or on with the same slot where its server still has it."""
    steps = blocking_steps(dispatcher)
    if job is None or job.state is not State.QUEUED:
        run_blocking(steps.give_up(lease))
    elif job.server == lease.server:
        run_blocking(steps.reopen_offer(lease, job.model))
    else:
        run_blocking(steps.free(lease, return_to_lane=True))


def _end_lost_run(dispatcher: Dispatcher, mine: Lease, job: Job, how: str) -> None:
    """The worker died under the job, and its server may still run it: the job is resumed in the same slot.

    Anywhere else it could run twice at once.  There another worker resumes the polling, or repeats the call: the server
    joins it to the run, answers from memory, or says that it is busy, and then the job goes back.  A worker that was
    told to stop, and ended before it had handed the job over, costs the job nothing.
    """
    active, config = active_run_of(dispatcher, job), dispatcher.catalog.resolve(job.model).config
    if active is not None and was_told_to_stop(dispatcher.leases.scripts, active.lease.owner):
        stopped = decide(active.run, StopReason.STOPPED, config, dispatcher.settings, now_ms(), canceling=False)
        _end_seized(dispatcher, mine, job, stopped, "reap_committed")
        return
    decision = Decision(
        crash_reason(job.crashes, config, Reason.LEASE_EXPIRED),
        error=JobError("worker_lost", f"The worker that ran it on {job.slot} {how}."),
        quarantine=Quarantine("worker_lost", now_ms() + dispatcher.settings.withhold_max_ms, resumes=True),
        resume_in_slot=True,
    )
    _end_seized(dispatcher, mine, job, decision, "reap_committed")


def _end_seized(dispatcher: Dispatcher, mine: Lease, job: Job, decision: Decision, crash_point: str) -> bool:
    """End the run whose lease was seized; False: another has ended it, perhaps while we waited for the database."""
    active = active_run_of(dispatcher, job)
    if active is None:
        return False
    active, steps = active._replace(lease=mine), blocking_steps(dispatcher)
    moved = run_blocking(steps.store(active, decision))
    crash_at(crash_point)
    if moved is None:
        _put_back(dispatcher, mine, dispatcher.store.get(job.id))
        return False
    run_blocking(steps.release(active, decision, moved.to))
    steps.notify(moved)
    return True


def end_unknown_run(dispatcher: Dispatcher, job: Job) -> bool:
    """End a run that its server does not know any more; False: it has ended meanwhile."""
    active = active_run_of(dispatcher, job)
    if active is None:
        return False
    mine = dispatcher.leases.seize(active.lease, _REAPER, dispatcher.settings.offer_ms, only_expired=False)
    if mine is None:
        return False
    crash_at("stale_seized")
    decision = Decision(
        crash_reason(job.crashes, dispatcher.catalog.resolve(job.model).config),
        error=JobError("server_lost", f"Server {job.server} does not know the job any more."),
        resume_in_slot=True,  # The server may remember the result of a run that has ended.
    )
    return _end_seized(dispatcher, mine, job, decision, "stale_committed")
