"""Keep the jobs that clients wait for, and that are canceled when none does (`cancel_when_gone`)."""

from collections.abc import Mapping

import structlog
from redis.exceptions import RedisError

from app.context import dispatcher
from routing.dispatch.dispatcher import Dispatcher
from slotkeeper.clock import now_ms

log = structlog.get_logger(__name__)


def keep_watched(job_id: str, gone_s: float | None) -> None:
    """Note that the client of this request waits for a job.  `gone_s`: its `cancel_when_gone`."""
    if gone_s is not None:
        renew_watched(dispatcher(), {job_id: gone_s})


def renew_watched(dispatcher: Dispatcher, gone_s: Mapping[str, float]) -> None:
    """Note that clients wait for these jobs.  While Redis is away none is canceled."""
    now = now_ms()
    try:
        dispatcher.watched.renew({job_id: now + round(seconds * 1000) for job_id, seconds in gone_s.items()})
    except RedisError as error:
        log.warning("jobs_not_kept", jobs=len(gone_s), error=str(error))
