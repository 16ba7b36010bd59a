"""Tells of one end whose result is large, in a process of its own: python -m tasks.large_telling JOB."""

import resource
import sys

from tasks import telling
from tasks.wiring import store

_MOST_MEMORY = 3 << 30  # bytes


def main() -> int:
    """Raises what `telling.tell` raises."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    job = store().get(sys.argv[1])
    if job is not None:
        try:
            telling.tell(job)
        except MemoryError:
            telling.tell_that_it_is_too_large(job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
