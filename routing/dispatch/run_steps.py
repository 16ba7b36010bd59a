"""The steps of a run that change the database and Redis, written once for an event loop and for threads.

If Redis fails after the database was written, the database is right, and routing.maintenance brings Redis to it.
"""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import structlog
from redis.exceptions import RedisError

from routing.admission.pricing import price_at
from routing.dispatch.decision import Decision
from routing.dispatch.dispatcher import ActiveRun, Dispatcher, active_run_of
from routing.queue.leases import HealthSignal, Lease, quarantine_lease
from routing.queue.queues import Offer
from slotkeeper.clock import clock, now_ms
from slotkeeper.crash_points import crash_at
from slotkeeper.db import Write
from slotkeeper.errors import ClockWasSet, SlotkeeperError
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.jobs.states import State
from slotkeeper.jobs.store import Transition
from slotkeeper.jobs.values import Job
from slotkeeper.redis.scripts import Command

T = TypeVar("T")
log = structlog.get_logger(__name__)


class StepIo(Protocol):
    """How steps call Redis and the database."""

    def redis(self, command: Command[T]) -> Awaitable[T]:
        """Run a script.  Raises redis errors."""

    def commit(self, write: Write[T]) -> Awaitable[T]:
        """Commit a write.  Raises DatabaseUnavailable, CommitUnknown."""

    def run_in_thread(self, act: Callable[..., T], *args: Any) -> Awaitable[T]:
        """Call a function that blocks."""

    def reconnect(self) -> None:
        """Close the connections to Redis: their primary was replaced."""


class ThreadIo:
    """For steps in a thread: each call is made at once, and no step is suspended."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def redis(self, command: Command[T]) -> T:
        return self._dispatcher.leases.scripts.run(command)

    async def commit(self, write: Write[T]) -> T:
        return self._dispatcher.store.database.commit(write)

    async def run_in_thread(self, act: Callable[..., T], *args: Any) -> T:
        return act(*args)

    def reconnect(self) -> None:
        self._dispatcher.leases.scripts.reconnect()


async def commit_by_clock(io: StepIo, make_write: Callable[[], Write[T]]) -> T:
    """Commit a write, and if the clock was set since its times were taken, the one that is made then.

    Raises as `StepIo.commit`.
    """
    try:
        return await io.commit(make_write())
    except ClockWasSet:
        return await io.commit(make_write())


def run_blocking(step: Coroutine[Any, Any, T]) -> T:
    """Run a step whose StepIo is a ThreadIo, and return its result."""
    try:
        step.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    step.close()
    raise RuntimeError("a step was suspended in a thread, where no event loop resumes it")


OnPostponed = Callable[[Lease, bool, int], object]
"""Called with a lease, `return_to_lane` and `cooldown_ms` when Redis did not answer its release."""


class RunSteps:
    """The steps of runs.

    `claimant`, in all methods: the worker that takes the next job at once; "": all offers are published.
    `on_postponed`: repeats a release when Redis answers again.
    """

    __slots__ = ("_dispatcher", "_io", "_on_postponed")

    def __init__(self, dispatcher: Dispatcher, io: StepIo, on_postponed: OnPostponed | None = None) -> None:
        self._dispatcher, self._io, self._on_postponed = dispatcher, io, on_postponed

    # -- start -----------------------------------------------------------------------------------------------

    async def claim(self, offer: Offer, owner: str) -> Offer | None:
        """Make an open offer a lease of `owner`; None: it is gone, another's, or the owner's already."""
        return await self._io.redis(self._dispatcher.leases.claim_command(offer, owner))

    async def start(self, offer: Offer, lease: Lease, worker: str = "") -> ActiveRun | None:
        """Store the start of the offered job; None: the job is gone, or its offer is of an older queue.

        `worker`: Celery's name of the worker.

        Raises DatabaseUnavailable: it was not stored; CommitUnknown: call `find_stored_start`.
        """
        dispatcher, catalog = self._dispatcher, self._dispatcher.catalog.cached()
        if not catalog.has_pair(offer.server, offer.model):
            catalog = await self._io.run_in_thread(dispatcher.catalog.refresh)
        write = dispatcher.store.start_write(
            offer.job_id,
            offer.server,
            offer.slot,
            lease.stored_text,
            now_ms(),
            offer.number,
            catalog.find_description(offer.server, offer.model),
            worker,
            catalog.endpoint(offer.server, offer.model),
            fleet=offer.fleet,
            price=price_at(catalog, offer.model, offer.server) if catalog.prices else 0,
        )
        run = await self._io.commit(write)
        if run is None and await self._io.run_in_thread(dispatcher.is_of_older_queue, lease):
            self._io.reconnect()
        return None if run is None else ActiveRun(run, lease)

    async def find_stored_start(self, lease: Lease) -> ActiveRun | None:
        """Return the run that the database has under this lease; None: the job is gone.

        Raises DatabaseUnavailable; SlotkeeperError: the start was not stored.
        """
        job = await self._io.run_in_thread(self._dispatcher.store.get, lease.job_id)
        if job is not None and job.state is State.QUEUED:
            raise SlotkeeperError("The start was not stored.")
        active = None if job is None else active_run_of(self._dispatcher, job)
        return active if active is not None and active.lease.stored_text == lease.stored_text else None

    # -- end -------------------------------------------------------------------------------------------------

    async def store(self, active: ActiveRun, decision: Decision) -> Transition | None:
        """Store the end of a run; None: it was over before.  Raises DatabaseUnavailable: keep its lease then."""
        run, decided_by_ms = active.run, clock.offset_ms

        def make_write() -> Write[Transition | None]:
            moved_ms, due_ms, kept = clock.moved_since(decided_by_ms), decision.due_ms, decision.quarantine
            ended_ms = decision.run_ended_ms
            return self._dispatcher.store.settle_write(
                run.job.id,
                run.attempt,
                decision.reason,
                now_ms(),
                result=decision.result,
                error=decision.error,
                due_ms=None if due_ms is None else due_ms + moved_ms,
                quarantine=None if kept is None else replace(kept, until_ms=kept.until_ms + moved_ms),
                run_ended_ms=None if ended_ms is None else ended_ms + moved_ms,
                signed=decision.signed,
            )

        moved = await commit_by_clock(self._io, make_write)
        crash_at("settle_committed")
        return moved

    async def release(
        self, active: ActiveRun, decision: Decision, to: State | None, claimant: str = ""
    ) -> Offer | None:
        """Release the slot of a run as decided, and return the offer that `claimant` now owns.

        `to`: the state that the job has now; None: the run was over before, and the database knows why.
        Raises DatabaseUnavailable, in that case alone.
        """
        run, lease = active.run, active.lease
        if to is None:
            if decision.quarantine is None and not decision.enqueue_again:
                await self.release_quarantine(active)
            return await self.give_up(lease, run.attempt, claimant)
        is_queued = to is State.QUEUED
        if is_queued and decision.resume_in_slot:
            crash_at("hand_back_committed")
            await self.reopen_offer(lease, run.job.model)
            return None
        if decision.quarantine is not None:
            return await self.free(
                lease,
                return_to_lane=is_queued,
                claimant=claimant,
                signal=decision.signal,
                quarantined_attempt=run.attempt,
            )
        cooldown_ms = decision.cooldown_ms
        if decision.cools_server_down:
            cooldown_ms = max(cooldown_ms, await self._cool_server_down(lease))
        following = await self.free(
            lease, return_to_lane=is_queued, cooldown_ms=cooldown_ms, claimant=claimant, signal=decision.signal
        )
        if is_queued and decision.enqueue_again:
            await self._io.run_in_thread(self._dispatcher.enqueue, [run.job])
        return following

    def notify(self, moved: Transition | None) -> None:
        """Notify those who wait for the job that it has ended, if it has."""
        if moved is not None:
            self._dispatcher.notify_ended(moved)
        crash_at("end_notified")

    async def release_quarantine(self, active: ActiveRun) -> None:
        """Free the quarantined slot of a run that was ended elsewhere: its server has released it after all.

        Raises DatabaseUnavailable.
        """
        run, database = active.run, self._dispatcher.store.database
        # Only the process that deletes the row frees the slot.
        if await self._io.run_in_thread(quarantine.release, database, run.job.id, run.attempt):
            lease = quarantine_lease(active.lease.fleet, run.job.id, run.attempt, run.slot)
            await self.free(lease, return_to_lane=False)

    # -- leases ----------------------------------------------------------------------------------------------

    async def free(
        self,
        lease: Lease,
        *,
        return_to_lane: bool,
        cooldown_ms: int = 0,
        claimant: str = "",
        signal: HealthSignal = "",
        quarantined_attempt: int | None = None,
    ) -> Offer | None:
        """Release a lease, and return the offer that `claimant` now owns.

        return_to_lane: the job returns to its place in its lane.  quarantined_attempt: the slot stays taken for this
        attempt of the job; without it, the slot is free at once or after a cooldown.
        """
        kept = None
        if quarantined_attempt is not None:
            kept = quarantine_lease(lease.fleet, lease.job_id, quarantined_attempt, lease.slot)
        command = partial(  # Reading the workers' capacity may fail, too.
            self._dispatcher.leases.release_command,
            lease,
            return_to_lane=return_to_lane,
            cooldown_ms=cooldown_ms,
            claimant=claimant,
            signal=signal,
            quarantine=kept,
        )
        try:
            (released,) = await self._io.redis(command())
        except RedisError as error:
            log.warning("release_postponed", job_id=lease.job_id, error=str(error))
            # The lease of a quarantined slot expires, and the reaper finds in the database what to do.
            if self._on_postponed is not None and kept is None:
                self._on_postponed(lease, return_to_lane, cooldown_ms)
            return None
        if kept is not None:
            crash_at("slot_quarantined")
        return self._dispatcher.publish_unclaimed(released.offers, claimant)

    async def give_up(self, lease: Lease, attempt: int | None = None, claimant: str = "") -> Offer | None:
        """Give up a lease under which no run goes on; the database decides what happens to its slot and its job.

        attempt: of the run that had the lease; None: the job's latest.  Returns as `free`.
        Raises DatabaseUnavailable.
        """
        job, quarantined = await self._io.run_in_thread(self._read_state, lease.job_id, attempt)
        is_queued = job is not None and job.state is State.QUEUED
        if quarantined is not None and quarantined.slot == lease.slot:
            return await self.free(
                lease, return_to_lane=is_queued, claimant=claimant, quarantined_attempt=quarantined.attempt
            )
        # The server, not the slot: after `server_lost` the job keeps only that.
        resumes = job is not None and is_queued and job.server == lease.server
        if job is not None and resumes and await self.reopen_offer(lease, job.model):
            return None
        # If the lease is another's, this still makes offers for the claimant.
        return await self.free(lease, return_to_lane=is_queued, claimant=claimant)

    async def reopen_offer(self, lease: Lease, model: str) -> bool:
        """Make a lease an open offer, for the worker that resumes its job in the same slot.

        Returns False if the lease is not held.  If Redis does not answer, the reaper opens the offer later.
        """
        dispatcher = self._dispatcher
        seize = partial(dispatcher.leases.seize, lease, "", dispatcher.settings.offer_ms, only_expired=False)
        try:
            opened = await self._io.run_in_thread(seize)
        except RedisError as error:
            log.warning("offer_postponed", job_id=lease.job_id, error=str(error))
            return True
        if opened is None:
            return False
        offer = Offer(opened.fleet, opened.job_id, opened.name, opened.slot, opened.server, model, 0)
        dispatcher.publish_offers([offer])
        return True

    def _read_state(self, job_id: str, attempt: int | None) -> tuple[Job | None, QuarantinedSlot | None]:
        store = self._dispatcher.store
        job = store.get(job_id)
        if attempt is None:
            if job is None:
                return None, None
            attempt = job.attempt
        return job, quarantine.find(store.database, job_id, attempt)

    async def _cool_server_down(self, lease: Lease) -> int:
        """Begin the cooldown of a server that could not be reached, and return how long it is, in ms."""
        try:
            cooldown = await self._io.redis(self._dispatcher.slots.cool_down_command(lease.fleet, lease.server))
        except RedisError as error:  # The slot itself is freed, or its release postponed.
            log.warning("cooldown_postponed", server=lease.server, error=str(error))
            return 0
        return cooldown.cooldown_ms


def blocking_steps(dispatcher: Dispatcher) -> RunSteps:
    """Return the steps for a thread, to be run by `run_blocking`."""
    return RunSteps(dispatcher, ThreadIo(dispatcher))


def end_run(dispatcher: Dispatcher, active: ActiveRun, decision: Decision) -> Transition | None:
    """End a run from a thread: store its end, release its slot, notify.  None: it was over before.

    The end is stored first, also for a finished run: a write that is refused is not repeated here, as it is in a worker
    (tasks/worker/executor.py: finish_run).  Raises DatabaseUnavailable.
    """
    steps = blocking_steps(dispatcher)
    moved = run_blocking(steps.store(active, decision))
    run_blocking(steps.release(active, decision, None if moved is None else moved.to))
    crash_at("settle_released")
    steps.notify(moved)
    return moved
