"""What the runs of a worker share, and what the executor and the server call share of one run."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog

from routing.dispatch.dispatcher import ActiveRun, Dispatcher
from routing.dispatch.run_steps import RunSteps
from routing.queue.queues import Offer
from slotkeeper.db import Write
from slotkeeper.errors import ClockWasSet, CommitUnknown, DatabaseUnavailable
from slotkeeper.jobs.values import Run
from slotkeeper.redis.scripts import Command
from tasks.worker.background_tasks import BackgroundTasks
from tasks.worker.concurrency import Concurrency, TakenOffer
from tasks.worker.event_loop import WorkerLoop
from tasks.worker.heartbeat import Heartbeat, LeaseWatch
from tasks.worker.lease_checks import LeaseCheck

T = TypeVar("T")
log = structlog.get_logger(__name__)

_RETRY_S = 1.0
_STOP_LIMIT_S = 3.0  # A worker that stops goes on trying for so long: another can resume what is stored.


@dataclass(frozen=True)
class WorkerParts:
    """The parts of a worker that its runs use."""

    dispatcher: Dispatcher
    owner: str  # of the worker's leases
    worker_loop: WorkerLoop
    heartbeat: Heartbeat
    concurrency: Concurrency
    lease_check: LeaseCheck
    background_tasks: BackgroundTasks


class RetryingIo:
    """The Io of one run's steps (routing/dispatch/run_steps.py), which repeats what the database refuses.

    Raises ClockWasSet: make a new write.  Raises DatabaseUnavailable when the run is not this worker's any
    more, or the worker has been stopping for too long.
    """

    def __init__(self, worker_loop: WorkerLoop, watch: LeaseWatch) -> None:
        self._worker_loop, self._watch = worker_loop, watch

    def redis(self, command: Command[T]) -> Awaitable[T]:
        return self._worker_loop.redis(command)

    def commit(self, write: Write[T]) -> Awaitable[T]:
        return self._repeat_while_away(partial(self._worker_loop.commit, write))

    def run_in_thread(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        return self._repeat_while_away(partial(self._worker_loop.run_in_thread, function, *args))

    def reconnect(self) -> None:
        self._worker_loop.reconnect()

    async def wait_until_known(self, unknown: CommitUnknown, read: Callable[[], Awaitable[T]]) -> T:
        """Find out whether a start was stored whose COMMIT had no response.

        Raises what `read` raises except DatabaseUnavailable; `unknown` if the worker has to stop before that.
        """
        while not (self._watch.lost or self._watch.stop):
            await self._watch.sleep(_RETRY_S)
            try:
                return await read()
            except DatabaseUnavailable as error:
                log.warning("start_not_known", job_id=self._watch.lease.job_id, error=str(error))
        raise unknown

    async def _repeat_while_away(self, function: Callable[[], Awaitable[T]]) -> T:
        give_up_s: float | None = None
        while True:
            try:
                return await function()
            except ClockWasSet:
                raise  # The same write would be refused again.
            except DatabaseUnavailable:
                now = self._worker_loop.loop.time()
                if self._watch.stop:
                    give_up_s = give_up_s or now + _STOP_LIMIT_S
                if self._watch.lost or (give_up_s is not None and now >= give_up_s):
                    raise
                # Not all at the same moment, in which they would make one batch again that may be what is too much.
                await self._watch.sleep(_RETRY_S * random.uniform(0.5, 1.5))


class WorkerRun(NamedTuple):
    """A run with its lease, the flags of that, the offer that began it, and the steps that store its end."""

    active: ActiveRun
    watch: LeaseWatch
    taken: TakenOffer
    offer: Offer  # as it was claimed: a message does not carry all of it
    io: RetryingIo
    steps: RunSteps

    @property
    def run(self) -> Run:
        return self.active.run

    @property
    def earlier_request_may_run(self) -> bool:
        """Whether the server may still be working on the request of an earlier worker, and this one has sent none."""
        return self.offer.is_resumption and not (self.watch.sent or self.watch.earlier_request_is_over)

    @property
    def canceling(self) -> bool:
        return self.watch.cancel or self.run.cancel_requested
