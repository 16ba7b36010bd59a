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
from tasks.services import dispatcher, process_counters, process_locks, progress_scripts, workers
from tasks.worker.background_tasks import BackgroundTasks
from tasks.worker.concurrency import Concurrency
from tasks.worker.event_loop import WorkerLoop
from tasks.worker.executor import Executor
from tasks.worker.heartbeat import Heartbeat
from tasks.worker.lease_checks import DatabaseCheck, LeaseCheck
from tasks.worker.poller import Poller
from tasks.worker.progress_publisher import ProgressPublisher
from tasks.worker.server_calls import AbandonedCalls, ServerCalls
from tasks.worker.worker_run import WorkerParts

_MAX_AWAITS = 50


class Worker:
    """The parts of this worker process.  There is one, made when Celery's consumer starts."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: WorkerCapacity,
        progress_commands: ProgressCommands,
        max_runs: int,
        record_handover_gap: Callable[[float], object] = lambda seconds: None,
        process_locks: ProcessLocks | None = None,
    ) -> None:
        """`record_handover_gap`: as in ServerCalls.  `process_locks`: as in BackgroundTasks."""
        self.owner = new_lease_owner("worker")
        self.consumer: Any = None  # Celery's consumer; None while there is none, or while draining
        self._is_draining = False  # for good
        self.concurrency = Concurrency(max_runs, self.owner, lambda: self.accepts_jobs)
        self.worker_loop = WorkerLoop(dispatcher.store.database, dispatcher.leases)
        self.background_tasks = BackgroundTasks(
            dispatcher,
            workers,
            self.owner,
            process_locks,
            lambda: self.database_check.request(self.heartbeat.watches()),
            self.worker_loop.reconnect,
        )
        self.database_check = DatabaseCheck(dispatcher, self.background_tasks.retry_release)
        self.heartbeat = Heartbeat(
            dispatcher.leases,
            self.owner,
            dispatcher.settings.renew_every_ms,
            on_lost_renewals=lambda watches: self.database_check.request(watches, renewal_lost=True),
            after_beat=lambda was_away: self.background_tasks.after_beat(was_away),
            call_soon=self.worker_loop.call_soon,
        )
        self.parts = WorkerParts(
            dispatcher,
            self.owner,
            self.worker_loop,
            self.heartbeat,
            self.concurrency,
            LeaseCheck(dispatcher.leases, dispatcher.settings, self.worker_loop.redis),
            self.background_tasks,
        )
        abandoned_calls = AbandonedCalls(self.parts)
        progress_publisher = ProgressPublisher(progress_commands, self.worker_loop.redis, self.worker_loop.loop)
        self.server_calls = ServerCalls(self.parts, progress_publisher, abandoned_calls, record_handover_gap)
        self.poller = Poller(
            dispatcher,
            workers,
            self.owner,
            lambda: self.concurrency.free_places,
            lambda *given: self.executor.run_claimed_offer(*given),
        )
        self.executor = Executor(self.parts, self.poller, self.server_calls, abandoned_calls)
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
        """Take jobs from now on.  `consumer`: Celery's consumer, which receives the messages of offers."""
        first, self.consumer = self.consumer is None, consumer
        self.executor.node_name = consumer.hostname
        if first:
            self.poller.start()

    def drain(self) -> None:
        """Take no more jobs, and let other workers resume runs: at once those that have an id at their server.

        All others have the grace time in which to end.
        """
        if self._is_draining:
            return
        self._is_draining, self.consumer = True, None
        self.background_tasks.is_draining = True
        self.poller.end()
        self.executor.is_draining = True  # First: a run that starts now sees this flag, or is among the watches.
        self.heartbeat.drain_all()
        timer = threading.Timer(TaskSettings().grace_s, self.stop_runs)
        timer.daemon = True
        timer.start()

    def stop_runs(self) -> None:
        """Let other workers resume all runs."""
        self.executor.is_stopping = True  # First: a run that starts now sees this flag, or is among the watches.
        self.heartbeat.stop_all()

    def drain_and_close(self) -> None:
        """Drain and close when the pool stops: all runs have their time to end, or are handed back."""
        self.drain()  # For a signal, Celery has begun this already; for anything else not.
        self.worker_loop.wait_until_idle()
        self.close()

    def close(self) -> None:
        """End its threads; runs that are still under way are left until the process ends."""
        self.heartbeat.end()
        self.database_check.end()
        self.worker_loop.close()
        if not self.concurrency.running:
            self.background_tasks.end()


@singleton
def this_worker() -> Worker:
    """The process's Worker, made on first use."""
    return Worker(
        dispatcher(),
        workers(),
        progress_scripts(),
        TaskSettings().threads,
        process_counters().observe_handoff,
        process_locks(),
    )
