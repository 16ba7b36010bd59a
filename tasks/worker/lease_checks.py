"""Checks a lease before its slot is used: the process may have been suspended since it claimed the lease.

A stop (SIGSTOP, a suspended host, a swap storm) leaves no trace in the process.  Only a clock that counts on meanwhile
shows that the lease may have expired and the slot may be another job's.
"""

import threading
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import structlog
from redis.exceptions import RedisError

from routing.config import RoutingSettings
from routing.dispatch.dispatcher import Dispatcher
from routing.dispatch.run_steps import OnPostponed, RunSteps, ThreadIo, run_blocking
from routing.queue.leases import Lease, LeasedJob, Leases
from slotkeeper.clock import boottime_s
from slotkeeper.errors import DatabaseUnavailable, SlotkeeperError
from slotkeeper.jobs.states import FINAL_STATES, State
from slotkeeper.jobs.values import JobStatus
from tasks.threads import BackgroundTask
from tasks.worker.heartbeat import LeaseWatch

log = structlog.get_logger(__name__)


class LeaseExpired(SlotkeeperError):
    """The lease may be another worker's: it had expired before it was used."""


class LeaseCheck:
    """Checks leases of one worker.  `redis`: runs a script from the event loop."""

    def __init__(self, leases: Leases, settings: RoutingSettings, redis: Callable[[Any], Awaitable[Any]]) -> None:
        self._leases, self._redis = leases, redis
        self._renew_s, self._lease_s = settings.renew_every_ms / 1000, settings.lease_ms / 1000

    async def is_still_held(self, watch: LeaseWatch, *, fresh: bool = False) -> bool:
        """Return whether the slot may be used for the job now.

        A lease that was claimed or checked longer than a renewal period ago, or any if `fresh`, is renewed first.
        Repeated until the reply itself is fresh.  While Redis is away the lease holds for its own time.
        """
        while (age_s := boottime_s() - watch.confirmed_at_s) > self._renew_s or fresh:
            fresh = False
            requested_at_s = boottime_s()
            try:
                answer = await self._redis(self._leases.check_command(watch.lease))
            except RedisError as error:
                log.warning("lease_not_checked", job_id=watch.lease.job_id, error=str(error))
                return boottime_s() - watch.confirmed_at_s < self._lease_s
            if answer != "held":
                log.warning("lease_not_used", job_id=watch.lease.job_id, because=answer, age_s=round(age_s, 1))
                return False
            watch.confirmed_at_s = requested_at_s
        return not watch.lost


_RETRY_S = 1.0


class DatabaseCheck:
    """Asks the database about runs, in a background thread, so that no renewal waits for it.

    Redis may have been away when a cancel was requested.  It may have lost a lease with its latest writes, so that the
    lease is not another worker's.  Until the database responds, the run goes on.
    """

    def __init__(self, dispatcher: Dispatcher, on_postponed: OnPostponed) -> None:
        self._dispatcher = dispatcher
        self._steps = RunSteps(dispatcher, ThreadIo(dispatcher), on_postponed)
        self._requests: dict[LeaseWatch, bool] = {}  # and whether its renewal was answered with LOST
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._task = BackgroundTask("database-check", self._run)

    def request(self, watches: Collection[LeaseWatch], *, renewal_lost: bool = False) -> None:
        """Ask the database about these runs soon.  `renewal_lost`: Redis has answered that this worker does not hold
        the leases."""
        watches = [watch for watch in watches if not watch.starting]
        if not watches:
            return
        with self._lock:
            for watch in watches:
                self._requests[watch] = renewal_lost or self._requests.get(watch, False)
        self._task.request()

    def end(self) -> None:
        """Do not ask again what the database has not answered yet."""
        self._ended.set()

    def check(self, requests: dict[LeaseWatch, bool]) -> None:
        """Apply what the database has of these runs; the value: whether the renewal was answered
        with LOST.

        Raises DatabaseUnavailable.
        """
        statuses = self._dispatcher.store.get_statuses([watch.lease.job_id for watch in requests])
        for watch, renewal_lost in requests.items():
            self._apply(watch, statuses.get(watch.lease.job_id), renewal_lost)

    def _run(self) -> None:
        with self._lock:
            requests, self._requests = (
                {watch: renewal_lost for watch, renewal_lost in self._requests.items() if not watch.is_removed},
                {},
            )
        if not requests:
            return
        try:
            self.check(requests)
        except DatabaseUnavailable as error:
            log.warning("database_check_postponed", runs=len(requests), error=str(error))
            if self._ended.wait(_RETRY_S):
                return
            for watch, renewal_lost in requests.items():
                self.request([watch], renewal_lost=renewal_lost)

    def _apply(self, watch: LeaseWatch, found: JobStatus | None, renewal_lost: bool) -> None:
        if found is not None and _runs_under(found, watch.lease):
            if renewal_lost and not watch.sent:  # No server has the run: its slot may stay the next job's.
                watch.end("lost")
            elif renewal_lost:
                self._restore_lease(watch, found)
            if found.cancel_requested:
                watch.request_cancel()
            return
        # The server of a completed run has ended it; that of any other is asked to stop as well.
        ended_without_result = found is not None and found.state in FINAL_STATES - {State.COMPLETED}
        if ended_without_result:
            watch.request_cancel()
        if renewal_lost or not ended_without_result:
            watch.end("lost")

    def _restore_lease(self, watch: LeaseWatch, found: JobStatus) -> None:
        """Write a lease to Redis again: the database has the run under this very lease, so it is this worker's."""
        lease = watch.lease
        try:
            written = self._dispatcher.leases.restore(lease.fleet, [LeasedJob(lease, found.job)])
        except RedisError as error:  # The next renewal will ask once more.
            log.warning("lease_not_restored", job_id=lease.job_id, error=str(error))
        else:
            log.warning("lease_restored", job_id=lease.job_id, slot=lease.slot, written=bool(written))
            watch.restored = True
            if watch.is_removed:  # It has ended meanwhile, so the lease that was written just now is freed here.
                run_blocking(self._steps.free(lease, return_to_lane=False))


def _runs_under(found: JobStatus, lease: Lease) -> bool:
    return found.state is State.RUNNING and found.lease == lease.stored_text
