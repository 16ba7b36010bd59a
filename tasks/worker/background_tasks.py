"""What a worker does beside its runs: releases that Redis did not answer, looks at other workers, its lifetime."""

import threading
from collections.abc import Callable
from contextlib import suppress

import structlog
from redis.exceptions import RedisError

from routing.dispatch.dispatcher import Dispatcher
from routing.dispatch.run_steps import RunSteps, ThreadIo, run_blocking
from routing.queue.leases import Lease
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs import queue_epochs
from slotkeeper.process_locks import ProcessLocks
from tasks.threads import BackgroundTask

log = structlog.get_logger(__name__)

# Each lease expires by itself soon; this bounds the memory of a process whose releases all fail.
_MOST_PENDING = 10_000


class BackgroundTasks:
    """The background tasks of one worker, each in a thread for which no run waits.

    process_locks: they show at once that the process has ended if it is killed.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: WorkerCapacity,
        owner: str,
        process_locks: ProcessLocks | None,
        check_database: Callable[[], object],
        reconnect: Callable[[], object],
    ) -> None:
        """`check_database`: called when Redis was away.  `reconnect`: closes the connections to Redis."""
        self._reconnect = reconnect
        self._dispatcher, self._workers, self._owner, self._process_locks = dispatcher, workers, owner, process_locks
        self._check_database = check_database
        self.is_draining = False
        self._pending: dict[Lease, tuple[bool, int]] = {}  # releases to repeat: (return_to_lane, cooldown_ms)
        self._lock = threading.Lock()
        self._capacity_task = BackgroundTask("worker-capacity", self._refresh_workers)
        self._release_task = BackgroundTask("releases", self.run)
        if process_locks is not None:
            process_locks.try_acquire(owner)  # before its first claim
        workers.refresh_in_background(self._capacity_task.request)  # The loop asks for it, and must not wait.

    def after_beat(self, was_away: bool) -> None:
        """Begin what waited until Redis responds, in other threads than the heartbeat's."""
        if was_away:  # The database has the cancels and deadlines that Redis could not pass on.
            self._check_database()
        self._release_task.request()

    def retry_release(self, lease: Lease, return_to_lane: bool, cooldown_ms: int) -> None:
        """Repeat a release to which Redis did not respond, as soon as Redis responds again."""
        with self._lock:
            self._pending[lease] = return_to_lane, cooldown_ms
            if len(self._pending) > _MOST_PENDING:
                del self._pending[next(iter(self._pending))]

    def run(self) -> None:
        """Do what is pending."""
        self._leave_stale_queues()
        self._repeat_releases()
        if self.is_draining:  # The poller has ended, and slots that become free here are for others.
            self._refresh_workers()

    def _leave_stale_queues(self) -> None:
        """Leave a Redis with older queues than the newest: its primary was replaced, and its leases do not count."""
        seen, database = self._dispatcher.leases.seen_epochs(), self._dispatcher.store.database
        with suppress(DatabaseUnavailable):
            newest = queue_epochs.read_numbers(database, seen)
            stale = sorted(fleet for fleet, epoch in seen.items() if epoch < newest.get(fleet, 0))
            if stale:
                log.warning("queues_are_stale", fleets=stale)
                self._reconnect()

    def end(self) -> None:
        """Forget a worker that has no runs."""
        with suppress(RedisError):
            self._workers.remove(self._owner)
        if self._process_locks is not None:
            self._process_locks.release(self._owner)

    def _refresh_workers(self) -> None:
        with suppress(RedisError):  # The poller says so once a second.
            self._workers.read_total()

    def _repeat_releases(self) -> None:
        """Redis is back: free what could not be freed.  Another holder of such a lease is not disturbed (LEASE-4)."""
        with self._lock:
            pending, self._pending = self._pending, {}
        steps = RunSteps(self._dispatcher, ThreadIo(self._dispatcher), self.retry_release)
        for lease, (return_to_lane, cooldown_ms) in pending.items():
            if self._pending:  # Redis is away again, and each try costs its time-out.
                self.retry_release(lease, return_to_lane, cooldown_ms)
            else:
                run_blocking(steps.free(lease, return_to_lane=return_to_lane, cooldown_ms=cooldown_ms))
