"""What the record says of this worker's runs, when Redis cannot be relied on to say it."""

import threading
from collections.abc import Collection

import structlog
from redis.exceptions import RedisError

from routing.dispatch.dispatcher import Dispatcher
from routing.dispatch.run_steps import OnPostponed, RunSteps, ThreadIo, run_blocking
from routing.queue.leases import Lease, LeasedJob
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.values import JobStatus
from tasks.aside import BackgroundTask
from tasks.worker.heartbeat import LeaseWatch

log = structlog.get_logger(__name__)

_RETRY_S = 1.0


class DatabaseCheck:
    """Asks the record aside, so that no renewal waits for the database.

    A wish may have been missed while Redis was away; a lease that Redis does not know may have been lost with the
    last that Redis was told, and not be another's.  Until the record answers, the run goes on.
    """

    def __init__(self, dispatcher: Dispatcher, on_postponed: OnPostponed) -> None:
        self._dispatcher = dispatcher
        self._steps = RunSteps(dispatcher, ThreadIo(dispatcher), on_postponed)
        self._requests: dict[LeaseWatch, bool] = {}  # and whether Redis does not know its lease
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._task = BackgroundTask("inquiry", self._run)

    def request(self, watches: Collection[LeaseWatch], *, unknown_to_redis: bool = False) -> None:
        """Tell these runs, soon, what the record says of them.  `unknown_to_redis`: Redis does not know their leases."""
        watches = [watch for watch in watches if not watch.starting]
        if not watches:
            return
        with self._lock:
            for watch in watches:
                self._requests[watch] = unknown_to_redis or self._requests.get(watch, False)
        self._task.request()

    def end(self) -> None:
        """What the record has not said by now is asked for no more."""
        self._ended.set()

    def check(self, requests: dict[LeaseWatch, bool]) -> None:
        """Tell runs, each with whether its lease is doubted, what the record says.  Raises DatabaseUnavailable."""
        statuses = self._dispatcher.store.get_statuses([watch.lease.job_id for watch in requests])
        for watch, unknown_to_redis in requests.items():
            self._apply(watch, statuses.get(watch.lease.job_id), unknown_to_redis)

    def _run(self) -> None:
        with self._lock:
            requests, self._requests = (
                {watch: unknown_to_redis for watch, unknown_to_redis in self._requests.items() if not watch.is_removed},
                {},
            )
        if not requests:
            return
        try:
            self.check(requests)
        except DatabaseUnavailable as error:
            log.warning("inquiry_postponed", runs=len(requests), error=str(error))
            if self._ended.wait(_RETRY_S):
                return
            for watch, unknown_to_redis in requests.items():
                self.request([watch], unknown_to_redis=unknown_to_redis)

    def _apply(self, watch: LeaseWatch, found: JobStatus | None, unknown_to_redis: bool) -> None:
        if found is not None and _runs_under(found, watch.lease):
            if unknown_to_redis and not watch.sent:  # No server has the run: its slot may stay the next job's.
                watch.end("lost")
            elif unknown_to_redis:
                self._restore_lease(watch, found)
            if found.cancel_requested:
                watch.request_cancel()
            return
        ended_for_good = found is not None and found.state in FINAL_STATES - {State.COMPLETED}
        if ended_for_good:
            watch.request_cancel()  # Its server is to hear of that.
        if unknown_to_redis or not ended_for_good:
            watch.end("lost")

    def _restore_lease(self, watch: LeaseWatch, found: JobStatus) -> None:
        """The record has the run under this very lease, so it is this worker's, whatever Redis has forgotten."""
        lease = watch.lease
        try:
            written = self._dispatcher.leases.restore(lease.fleet, [LeasedJob(lease, found.job)])
        except RedisError as error:  # The next renewal will ask once more.
            log.warning("lease_not_restored", job_id=lease.job_id, error=str(error))
        else:
            log.warning("lease_was_lost", job_id=lease.job_id, slot=lease.slot, restored=bool(written))
            watch.restored = True
            if watch.is_removed:  # It has ended meanwhile, and nobody else frees what was written just now.
                run_blocking(self._steps.free(lease, return_to_lane=False))


def _runs_under(found: JobStatus, lease: Lease) -> bool:
    return found.state is State.RUNNING and found.lease == lease.stored_text
