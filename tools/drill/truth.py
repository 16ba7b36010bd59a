"""Whether Redis' leases and the servers' own reports tell the same story."""

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
    """Looks at both sides."""

    def __init__(self, redis_url: str, servers: Sequence[ServerSpec]) -> None:
        self._redis = Redis.from_url(redis_url, socket_timeout=_TIMEOUT_S, decode_responses=True)
        self._keys = Keys(RoutingSettings.model_fields["redis_prefix"].default)
        self._servers = servers
        self._before: HeldSlots | None = None

    def leases(self) -> HeldSlots:
        """Raises redis errors."""
        found: HeldSlots = set()
        for fleet in {server.model for server in self._servers}:
            held: dict[str, str] = self._redis.hgetall(self._keys.fleet_keys(fleet)[_SLOTS_KEY])  # type: ignore[assignment]
            found |= {(slot.rsplit("-slot", 1)[0], job) for slot, job in held.items()}
        return found

    def running(self) -> HeldSlots:
        """Raises requests errors."""
        with ThreadPoolExecutor(len(self._servers)) as pool:
            reports = list(pool.map(_report, self._servers))
        return {(server.name, job) for server, jobs in zip(self._servers, reports, strict=True) for job in jobs}

    def differs(self) -> HeldSlots | None:
        """What only one side knows, now and at the last look; None: somebody did not answer.

        What differs once may be on its way.
        """
        try:
            now = self.leases() ^ self.running()
        except (RedisError, requests.RequestException, ValueError, KeyError):
            self._before = None
            return None
        before, self._before = self._before, now
        return None if before is None else now & before


def _report(server: ServerSpec) -> list[str]:
    jobs: list[str] = requests.get(f"{server.url}/health", timeout=_TIMEOUT_S).json()["job_ids"]
    return jobs
