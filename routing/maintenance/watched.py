"""Cancel jobs whose clients have left (`cancel_when_gone`)."""

from contextlib import suppress

from redis.exceptions import RedisError

from routing.dispatch.dispatcher import Dispatcher
from slotkeeper.clock import now_ms
from slotkeeper.errors import Conflict, JobNotFound
from slotkeeper.jobs.values import JobError

_AT_ONCE = 100
_CLIENT_GONE = JobError("client_gone", "Canceled before it was started: no client waited for it any more.")


def cancel_unwatched(dispatcher: Dispatcher) -> int:
    """Cancel jobs for which no client has waited for as long as they say, and return how many were due.

    A job that has ended meanwhile is forgotten.  While Redis is away nothing is canceled.
    """
    try:
        due = dispatcher.watched.list_due(now_ms(), _AT_ONCE)
        for job_id in due:
            with suppress(Conflict, JobNotFound):
                dispatcher.cancel(job_id, _CLIENT_GONE)
        dispatcher.watched.forget(due)
    except RedisError:
        return 0
    return len(due)
