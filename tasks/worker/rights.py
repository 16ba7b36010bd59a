"""The right to use a slot, checked before it is used: a process may have been stopped since it got its lease.

A stop (SIGSTOP, a suspended host, a swap storm) leaves no trace in the process.  Only a clock that counts on meanwhile
shows that the lease may have expired and the slot may be another job's.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from redis.exceptions import RedisError

from routing.config import RoutingSettings
from routing.queue.leases import Leases
from slotkeeper.clock import boottime_s
from slotkeeper.errors import SlotkeeperError
from tasks.worker.heartbeat import LeaseWatch

log = structlog.get_logger(__name__)


class LeaseExpired(SlotkeeperError):
    """The lease may be another's: its time was over before it was used."""


class LeaseCheck:
    """Checks leases of one worker.  `redis`: runs a script from the event loop."""

    def __init__(self, leases: Leases, settings: RoutingSettings, redis: Callable[[Any], Awaitable[Any]]) -> None:
        self._leases, self._redis = leases, redis
        self._renew_s, self._lease_s = settings.renew_every_ms / 1000, settings.lease_ms / 1000

    async def is_still_held(self, watch: LeaseWatch) -> bool:
        """Whether the slot may be used for the job now.

        A lease that was got, or checked, longer than a renewal period ago is renewed first.  Repeated until the answer
        itself is fresh.  While Redis is away the lease holds for its own time.
        """
        while (age_s := boottime_s() - watch.confirmed_at_s) > self._renew_s:
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
