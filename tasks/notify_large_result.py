"""Notify Celery's clients of one job with a large result, in a separate process.

    python -P -m tasks.notify_large_result JOB

Exit status EX_TEMPFAIL: broker, backend or database are unavailable; call it again later.

It is a separate module, because `python -m tasks.results` would store JobFailed as `__main__.JobFailed`, which no
client can import.
"""

import os
import resource
import sys

from kombu.exceptions import EncodeError

from slotkeeper.jobs.values import Job
from tasks import results
from tasks.services import store

_MAX_MEMORY_BYTES = 3 << 30  # bytes


def main() -> int:
    """Return the exit status.  Raises what `results.notify_clients` raises, except outages."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    try:
        job = store().get(sys.argv[1])
        if job is not None:
            _notify(job)
    except results.UNAVAILABLE:
        return os.EX_TEMPFAIL
    return 0


def _notify(job: Job) -> None:
    try:
        results.notify_clients(job)
    except MemoryError:
        results.notify_too_large(job)
    except EncodeError as error:  # kombu wraps in it what the encoder raises.
        if not isinstance(error.__cause__, MemoryError):
            raise
        results.notify_too_large(job)


if __name__ == "__main__":
    sys.exit(main())
