"""One run, from the claim of its offer to the notification of its end.

Read `run` and what it calls, from top to bottom.  What each step does to the database and to Redis stands in
routing/dispatch/run_steps.py, what an end means in routing/dispatch/decision.py, how a server
is called in server_call.py.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial

import structlog
from redis.exceptions import RedisError

from routing.dispatch.decision import Decision
from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.outcome import Outcome, OutcomeKind, StopReason
from routing.dispatch.run_steps import RunSteps
from routing.queue.leases import Lease
from routing.queue.queues import Offer
from slotkeeper import json_text, logs
from slotkeeper.clock import boottime_s
from slotkeeper.crash_points import crash_at
from slotkeeper.errors import CommitUnknown, DatabaseUnavailable, SlotkeeperError
from slotkeeper.jobs.store import Transition
from slotkeeper.trace_context import find_trace_id
from tasks import retries
from tasks.servers import SPOOL_AFTER_BYTES
from tasks.worker.concurrency import TakenOffer
from tasks.worker.lease_checks import LeaseExpired
from tasks.worker.poller import Poller
from tasks.worker.server_calls import AbandonedCalls, ServerCalls
from tasks.worker.worker_run import RetryingIo, WorkerParts, WorkerRun

log = structlog.get_logger(__name__)

_RESTART_COOLDOWN_MS = 1_000
_NEVER_S = float("-inf")


async def finish_run(
    steps: RunSteps,
    active: ActiveRun,
    decision: Decision,
    claimant: Callable[[], str],
    start_next: Callable[[Offer | None, float], Awaitable[object]],
) -> Transition | None:
    """End a run, and return its transition; None: it had ended before.  Raises DatabaseUnavailable.

    In a thread, `end_run` (routing/dispatch/run_steps.py) does the same.
    `claimant`: returns who takes the next job of the slot.  `start_next`: is given that job's offer, and when Redis was
    asked for it (boottime_s).
    """
    if decision.frees_slot_first:  # The response is in hand: the next job starts before the COMMIT of this end.
        requested_at_s = boottime_s()
        await start_next(await steps.release(active, decision, decision.to, claimant()), requested_at_s)
        crash_at("slot_passed_on")
        transition = await steps.store(active, decision)
        if transition is None:  # Another process has ended the run and quarantined its slot, which is free.
            await steps.release_quarantine(active)
    else:  # The job may come back, or its server may still run it.
        transition = await steps.store(active, decision)
        requested_at_s = boottime_s()
        next_offer = await steps.release(active, decision, None if transition is None else transition.to, claimant())
        crash_at("settle_released")
        await start_next(next_offer, requested_at_s)
    steps.notify(transition)
    return transition


class Executor:
    """Carries out the runs of one worker, each as a task of its event loop."""

    def __init__(
        self,
        parts: WorkerParts,
        poller: Poller,
        server_calls: ServerCalls,
        abandoned_calls: AbandonedCalls,
    ) -> None:
        self._dispatcher, self._owner, self._worker_loop = parts.dispatcher, parts.owner, parts.worker_loop
        self._heartbeat, self._concurrency, self._lease_check = parts.heartbeat, parts.concurrency, parts.lease_check
        self._retry_release = parts.background_tasks.retry_release
        self._poller, self._server_calls, self._abandoned_calls = poller, server_calls, abandoned_calls
        self._steps = RunSteps(self._dispatcher, self._worker_loop, self._retry_release)
        self._large_end_lock = asyncio.Lock()  # Storing a large result takes some 200 MB.
        self.node_name = ""  # Celery's name of this worker, once there has been a consumer
        self.is_draining = False  # All resumable runs have been asked to hand over.
        self.is_stopping = False  # All runs have been asked to stop.

    # -- offers, from any thread ---------------------------------------------------------------------

    def run_open_offer(self, offer: Offer) -> None:
        """Run the job of an open offer, unless this process has taken it up before, is full, or is draining.

        Another worker with a free place, or this one later, finds the offer when it polls.
        """
        taken = TakenOffer(offer)
        if not self.is_draining and self._concurrency.try_add(taken):
            self._worker_loop.spawn(self.run(taken))

    def run_claimed_offer(self, offer: Offer | None, requested_at_s: float = _NEVER_S) -> None:
        """Run a job whose offer this worker holds already.  `requested_at_s` (boottime_s): when it asked for it."""
        if offer is None:
            return
        taken = TakenOffer(offer)
        self._concurrency.add(taken)
        self._worker_loop.spawn(self.run(taken, requested_at_s))

    # -- a run, in the loop ----------------------------------------------------------------------------------

    async def run(self, taken: TakenOffer, requested_at_s: float = _NEVER_S) -> None:
        """Run the job of an offer: claim and start it, call its server, decide, release and store, notify."""
        offer = taken.offer
        logs.bind_context(job_id=offer.job_id)
        claimed: Offer | None = offer
        worker_run: WorkerRun | None = None
        try:
            if not self._concurrency.accepts_jobs and offer.owner == self._owner:
                # Draining has begun since it was taken.
                await self._offer_to_others(offer)
                claimed = None
            elif offer.owner != self._owner:
                requested_at_s = boottime_s()
                claimed = await self._steps.claim(offer, self._owner)
            worker_run = None if claimed is None else await self._start(claimed, taken, requested_at_s)
        except Exception as error:  # Neither the job nor its place in this worker must be lost.
            if self._discard(taken):
                await self._return_job(offer, error)
            return
        if worker_run is not None:
            await self._call_and_end(worker_run)
        else:
            self._discard(taken)
            if claimed is not None:
                await self._release_unstarted(claimed)

    async def _start(self, offer: Offer, taken: TakenOffer, requested_at_s: float) -> WorkerRun | None:
        """Store the start; None: the job is gone.

        The lease is kept alive meanwhile, since that may take longer than a lease lasts.
        """
        crash_at("start_claimed")
        lease, active = Lease.from_offer(offer, self._owner), None
        watch = self._heartbeat.add(lease, starting=True, confirmed_at_s=requested_at_s)
        io = RetryingIo(self._worker_loop, watch)
        if self.is_draining:
            watch.end("drain")
        if self.is_stopping:
            watch.end("stop")
        try:
            if not await self._lease_check.is_still_held(watch):
                raise LeaseExpired("Its lease may be another's by now.")
            try:
                active = await self._steps.start(offer, lease, self.node_name)
            except CommitUnknown as unknown:
                active = await io.wait_until_known(unknown, partial(self._steps.find_stored_start, lease))
        finally:
            watch.starting = False
            if active is None:
                self._heartbeat.remove(watch)
        crash_at("start_committed")
        if active is None:
            return None
        steps = RunSteps(self._dispatcher, io, self._retry_release)
        return WorkerRun(active, watch, taken, offer, io, steps)

    async def _call_and_end(self, worker_run: WorkerRun) -> None:
        """Call the server, and end the run with its outcome."""
        run, lease = worker_run.run, worker_run.active.lease
        logs.bind_context(
            job_id=run.job.id, tenant=run.job.tenant, trace_id=partial(find_trace_id, run.job.id, run.traceparent)
        )
        try:
            outcome = await self._server_calls.call(worker_run)
            try:
                await self._end_run(worker_run, outcome)
            except DatabaseUnavailable:
                raise
            except Exception as error:  # A fault of the worker costs the job nothing.
                log.exception("run_not_ended", job_id=run.job.id)
                await self._end_run(worker_run, _outcome_of_internal_error(error))
        except DatabaseUnavailable as error:  # The lease is lost, or this worker stops: another resumes the job.
            log.error("result_not_stored", job_id=run.job.id, error=str(error))
        except Exception:  # The lease expires, and its reaper sees to it.
            log.exception("result_not_stored", job_id=run.job.id)
        self._heartbeat.remove(worker_run.watch)
        self._server_calls.forget(lease.name)
        self._concurrency.remove(worker_run.taken)
        self._abandoned_calls.observe(worker_run.active)
        if worker_run.watch.restored:  # Its lease was written again while its end was on the way to the database.
            await self._steps.free(lease, return_to_lane=False)
        if self._concurrency.claim_unfilled_place():
            await self._start_in_turn(lease.fleet)

    async def _end_run(self, worker_run: WorkerRun, outcome: Outcome | StopReason) -> None:
        """Decide and finish.  Raises DatabaseUnavailable."""
        run, lease = worker_run.run, worker_run.active.lease
        if outcome is StopReason.LOST:  # The lease was lost, or the server's push was quicker than the poll.
            requested_at_s = boottime_s()
            next_offer = await self._steps.give_up(lease, run.attempt, self._concurrency.claimant)
            await self._start_next(lease, None, next_offer, requested_at_s)
            log.info("run_ended_elsewhere", job_id=run.job.id, attempt=run.attempt)
            return
        if worker_run.earlier_request_may_run:
            outcome = (
                outcome._replace(server_still_running=True) if isinstance(outcome, Outcome) else StopReason.STOPPED
            )
        config, is_large = self._server_calls.config_of(run), _is_large(outcome)
        decide = partial(
            retries.decide_end,
            run,
            outcome,
            config,
            self._dispatcher.settings,
            canceling=worker_run.canceling,
            max_result_bytes=self._dispatcher.catalog.cached().limits_of(run.job.tenant).max_result_bytes,
        )
        async with self._large_end_lock if is_large else nullcontext():
            decision = await self._worker_loop.run_in_thread(decide) if is_large else decide()
            if decision.frees_slot_first:
                worker_run.watch.slot_released_at_s = time.monotonic()
            start_next = partial(self._start_next, lease, worker_run.watch.slot_released_at_s)
            transition = await finish_run(
                worker_run.steps, worker_run.active, decision, lambda: self._concurrency.claimant, start_next
            )
        if transition is None:
            log.info("run_ended_elsewhere", job_id=run.job.id, attempt=run.attempt)
        elif isinstance(outcome, StopReason):
            log.info("run_returned", job_id=run.job.id, because=outcome.value)

    # -- the next run ----------------------------------------------------------------------------------------

    async def _start_next(
        self, ended_lease: Lease, slot_released_at_s: float | None, offer: Offer | None, requested_at_s: float
    ) -> None:
        """Start the next run after one has ended: of the offer that its release returned, or of another fleet.

        A full worker reads no messages, so each fleet with work in turn gets the place that has become free.
        `slot_released_at_s` (monotonic): when the slot was released, if before the end was stored.  `requested_at_s`:
        when Redis was asked for the offer.
        """
        concurrency = self._concurrency
        if offer is not None:
            if slot_released_at_s is not None:
                self._server_calls.note_handover(offer.lease, slot_released_at_s)
            self.run_claimed_offer(offer, requested_at_s)
        elif concurrency.accepts_jobs and not concurrency.free_places:
            if concurrency.is_full_without(ended_lease.name):
                concurrency.note_unfilled_place()
            else:  # Not awaited: the end of this run may be in hand, and is stored after this.
                self._worker_loop.spawn(self._start_in_turn(ended_lease.fleet))

    async def _start_in_turn(self, fleet: str) -> None:
        """Start a job of the fleet whose turn it is after a run of this one."""
        requested_at_s = boottime_s()
        self.run_claimed_offer(await self._worker_loop.run_in_thread(self._poller.claim_in_turn, fleet), requested_at_s)

    # -- offers that come to nothing -------------------------------------------------------------------------

    def _discard(self, taken: TakenOffer) -> bool:
        """Remove an offer from the count.  False: it came to this process another way, and that run goes on."""
        self._server_calls.forget(taken.offer.lease)
        return self._concurrency.remove(taken)

    async def _release_unstarted(self, offer: Offer) -> None:
        """Release the slot of an offered job that was gone, and start the next."""
        lease, requested_at_s, next_offer = Lease.from_offer(offer, self._owner), boottime_s(), None
        try:
            next_offer = await self._steps.give_up(lease, claimant=self._concurrency.claimant)
        except Exception as error:  # The lease expires, and its reaper sees to it.
            log.warning("release_postponed", job_id=offer.job_id, error=str(error))
        await self._start_next(lease, None, next_offer, requested_at_s)

    async def _offer_to_others(self, offer: Offer) -> None:
        """Let another worker have an offer that this one has claimed and not begun."""
        lease = Lease.from_offer(offer, self._owner)
        if offer.is_resumption:
            await self._steps.reopen_offer(lease, offer.model)
        else:
            await self._steps.free(lease, return_to_lane=True)

    async def _return_job(self, offer: Offer, error: Exception) -> None:
        """Return a job that could not be started to its place in the lane, with a short cooldown of the slot."""
        is_expected = isinstance(error, SlotkeeperError | RedisError)
        log.warning("start_postponed", job_id=offer.job_id, error=str(error), exc_info=None if is_expected else error)
        if offer.is_resumption:
            return  # Its server may run it: no other may have it.  The reaper offers it once more.
        if isinstance(error, CommitUnknown):
            return  # It may be running under this lease; when that expires, the reaper finds out.
        await self._steps.free(
            Lease.from_offer(offer, self._owner), return_to_lane=True, cooldown_ms=_RESTART_COOLDOWN_MS
        )


def _is_large(outcome: Outcome | StopReason) -> bool:
    """Whether its result is so large that it was kept in a file."""
    result = outcome.result if isinstance(outcome, Outcome) else None
    return isinstance(result, json_text.RawJson) and result.size > SPOOL_AFTER_BYTES


def _outcome_of_internal_error(error: Exception) -> Outcome:
    """Return the outcome of a run whose end could not be stored for an internal error: the job is queued again.

    The slot has a cooldown, longer each time, so that an error which comes again does not keep the server busy.
    """
    message = f"The worker could not store the end of the run ({type(error).__name__}); the job is run again."
    return Outcome(OutcomeKind.BUSY, code="internal_error", message=message)
