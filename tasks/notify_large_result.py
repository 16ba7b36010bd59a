"""Tells of one end whose result is large, in a process of its own: python -m tasks.notify_large_result JOB."""

import resource
import sys

from tasks import results
from tasks.services import store

_MAX_MEMORY_BYTES = 3 << 30  # bytes


def main() -> int:
    """Raises what `telling.tell` raises."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    job = store().get(sys.argv[1])
    if job is not None:
        try:
            results.notify_clients(job)
        except MemoryError:
            results.notify_too_large(job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
