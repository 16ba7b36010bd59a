"""Jobs that are canceled when no client waits for them any more, and by when one must have waited.

Only Redis has these times: if it loses them, the jobs simply run.
"""

from collections.abc import Collection, Mapping
from typing import Any

from slotkeeper.redis.scripts import Scripts


class WatchedJobs:
    """Redis errors pass through."""

    def __init__(self, scripts: Scripts) -> None:
        self._redis, self._key = scripts.redis, scripts.keys.watched()

    def add(self, due: Mapping[str, int]) -> None:
        """Watch these jobs.  `due`: when each is canceled unless a client waits for it meanwhile (ms)."""
        self._redis.zadd(self._key, dict(due))

    def renew(self, due: Mapping[str, int]) -> None:
        """Put off the cancellation of those of these jobs that are watched."""
        self._redis.zadd(self._key, dict(due), xx=True, gt=True)

    def list_due(self, now_ms: int, limit: int) -> list[str]:
        """Return jobs that are to be canceled, the first due first."""
        found: Any = self._redis.zrangebyscore(self._key, "-inf", now_ms, start=0, num=limit)
        return [job_id.decode() for job_id in found]

    def forget(self, job_ids: Collection[str]) -> None:
        if job_ids:
            self._redis.zrem(self._key, *job_ids)
