"""A worker process as Celery knows it: it takes jobs, drains, and ends."""

import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

from routing.dispatch.dispatcher import Dispatcher
from routing.progress import ProgressCommands
from routing.queue.leases import new_lease_owner
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.process import singleton
from slotkeeper.process_locks import ProcessLocks
from tasks.config import TaskSettings
from tasks.services import dispatcher, lifetimes, progress_scripts, tallies, workers
from tasks.worker.abandoned import AbandonedCalls
from tasks.worker.background_tasks import BackgroundTasks
from tasks.worker.calls import ServerCalls
from tasks.worker.concurrency import Concurrency
from tasks.worker.event_loop import WorkerLoop
from tasks.worker.executor import Executor
from tasks.worker.heartbeat import Heartbeat
from tasks.worker.inquiry import DatabaseCheck
from tasks.worker.poller import Poller
from tasks.worker.progress_publisher import ProgressPublisher
from tasks.worker.rights import LeaseCheck

_MAX_AWAITS = 50


class Worker:
    """What belongs to this process.  There is one, made when the first job comes."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: WorkerCapacity,
        telling: ProgressCommands,
        max_runs: int,
        record_handover_gap: Callable[[float], object] = lambda seconds: None,
        lifetimes: ProcessLocks | None = None,
    ) -> None:
        """`note_gap`: as in Calls.  `lifetimes`: as in Background."""
        self.owner = new_lease_owner("worker")
        self.consumer: Any = None  # Celery's consumer; None while there is none, or while draining
        self._is_draining = False  # for good
        self.concurrency = Concurrency(max_runs, self.owner, lambda: self.accepts_jobs)
        self.background = BackgroundTasks(
            dispatcher, workers, self.owner, lifetimes, lambda: self.inquiry.request(self.heartbeat.watches())
        )
        self.engine = WorkerLoop(dispatcher.store.database, dispatcher.leases)
        self.inquiry = DatabaseCheck(dispatcher, self.background.retry_release)
        self.heartbeat = Heartbeat(
            dispatcher.leases,
            self.owner,
            dispatcher.settings.renew_every_ms,
            on_unknown_leases=lambda watches: self.inquiry.request(watches, doubted=True),
            after_beat=lambda was_away: self.background.after_beat(was_away),
            call_soon=self.engine.call_soon,
        )
        rights = LeaseCheck(dispatcher.leases, dispatcher.settings, self.engine.redis)
        abandoned = AbandonedCalls(self.engine, dispatcher, self.background.retry_release)
        saying = ProgressPublisher(telling, self.engine.redis, self.engine.loop)
        self.calls = ServerCalls(dispatcher, self.engine, saying, rights, abandoned, record_handover_gap)
        self.poller = Poller(
            dispatcher,
            workers,
            self.owner,
            lambda: self.concurrency.free_places,
            lambda *given: self.executor.run_claimed_offer(*given),
        )
        self.executor = Executor(
            dispatcher,
            self.owner,
            self.engine,
            self.heartbeat,
            self.concurrency,
            self.poller,
            self.calls,
            rights,
            abandoned,
            self.background,
        )
        self.heartbeat.start()

    @property
    def accepts_jobs(self) -> bool:
        """Whether this worker takes jobs.  A consumer that starts when draining has begun changes nothing."""
        return self.consumer is not None and not self._is_draining

    @property
    def runs(self) -> int:
        """How many are under way."""
        return self.concurrency.running

    @property
    def awaits(self) -> dict[str, list[str]]:
        """What runs wait for, beside their servers' answers: slot -> job and sentence; so many as fit a report."""
        waiting = (watch for watch in self.heartbeat.watches() if watch.awaits)
        return {watch.lease.slot: [watch.lease.job_id, watch.awaits] for watch in islice(waiting, _MAX_AWAITS)}

    @property
    def max_runs(self) -> int:
        """How many runs may be under way."""
        return self.concurrency.limit

    @max_runs.setter
    def max_runs(self, limit: int) -> None:
        self.concurrency.limit = limit

    def start_consuming(self, consumer: Any) -> None:
        """Take jobs from now on, of which this consumer of Celery's receives wake-ups."""
        first, self.consumer = self.consumer is None, consumer
        self.executor.node_name = consumer.hostname
        if first:
            self.poller.start()

    def drain(self) -> None:
        """Take nothing more, ever, and let other workers resume runs: at once those that have an id at their server.

        All others have the grace time in which to end.
        """
        if self._is_draining:
            return
        self._is_draining, self.consumer = True, None
        self.background.is_draining = True
        self.poller.end()
        self.executor.is_draining = True  # First: a run that begins just now is told by itself, or with the others.
        self.heartbeat.drain_all()
        timer = threading.Timer(TaskSettings().grace_s, self.stop_runs)
        timer.daemon = True
        timer.start()

    def stop_runs(self) -> None:
        """Let other workers resume all runs."""
        self.executor.is_stopping = True  # First: a run that begins just now is told by itself, or with the others.
        self.heartbeat.stop_all()

    def drain_and_close(self) -> None:
        """The pool stops, for whatever reason: all runs have their time to end, or are handed back."""
        self.drain()  # Of a signal Celery has told already, of anything else not.
        self.engine.wait_until_idle()
        self.close()

    def close(self) -> None:
        """End its threads; what is still under way is left where it is, until the process has ended."""
        self.heartbeat.end()
        self.inquiry.end()
        self.engine.close()
        if not self.concurrency.running:
            self.background.end()


@singleton
def this_worker() -> Worker:
    """The process's Worker, made on first use."""
    return Worker(
        dispatcher(), workers(), progress_scripts(), TaskSettings().threads, tallies().observe_handoff, lifetimes()
    )
