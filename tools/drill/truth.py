"""Compare the leases in Redis with the jobs that servers report as running."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import requests
from redis import Redis
from redis.exceptions import RedisError

from routing.config import RoutingSettings
from slotkeeper.redis.keys import FLEET_KEYS, Keys
from tools.cluster.cluster import ServerSpec

_SLOTS_KEY = FLEET_KEYS.index("slots")  # slot -> job
_TIMEOUT_S = 2.0

HeldSlots = set[tuple[str, str]]  # (server, job)


class LeaseComparison:
    """Reads the leases and the servers' reports, and remembers the last difference."""

    def __init__(self, redis_url: str, servers: Sequence[ServerSpec]) -> None:
        self._redis = Redis.from_url(redis_url, socket_timeout=_TIMEOUT_S, decode_responses=True)
        self._keys = Keys(RoutingSettings.model_fields["redis_prefix"].default)
        self._servers = servers
        self._before: HeldSlots | None = None

    def leases(self) -> HeldSlots:
        """Return the slots that have a lease.  Raises redis errors."""
        leases: HeldSlots = set()
        for fleet in {server.model for server in self._servers}:
            held: dict[str, str] = self._redis.hgetall(self._keys.fleet_keys(fleet)[_SLOTS_KEY])  # type: ignore[assignment]
            leases |= {(slot.rsplit("-slot", 1)[0], job) for slot, job in held.items()}
        return leases

    def running(self) -> HeldSlots:
        """Return what the servers run.  Raises requests errors."""
        with ThreadPoolExecutor(len(self._servers)) as pool:
            reports = list(pool.map(_running_jobs, self._servers))
        return {(server.name, job) for server, jobs in zip(self._servers, reports, strict=True) for job in jobs}

    def lasting_difference(self) -> HeldSlots | None:
        """Return what only one side had in both this and the last comparison; None: one of them failed.

        A difference in one comparison alone can be a run that starts or ends at this moment.
        """
        try:
            difference = self.leases() ^ self.running()
        except (RedisError, requests.RequestException, ValueError, KeyError):
            self._before = None
            return None
        before, self._before = self._before, difference
        return None if before is None else difference & before


def _running_jobs(server: ServerSpec) -> list[str]:
    jobs: list[str] = requests.get(f"{server.url}/health", timeout=_TIMEOUT_S).json()["job_ids"]
    return jobs
