"""What a process could not enqueue, so that it enqueues nothing newer before.

The database has these jobs, and the sweep of any process enqueues them within its period.  Without this note, a job
that is accepted when Redis answers again would be enqueued, and could start, before them (ORDER-1).
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from slotkeeper.jobs.values import QueuedJob


@dataclass(frozen=True, eq=False, slots=True)
class Postponed:
    """What is left of one fleet: queued jobs from this sequence number on."""

    first_seq: int


class PostponedJobs:
    """From where on the jobs of each fleet are to be enqueued again.  For several threads."""

    def __init__(self) -> None:
        self._by_fleet: dict[str, Postponed] = {}
        self._lock = threading.Lock()

    def get(self, fleet: str) -> Postponed | None:
        return self._by_fleet.get(fleet)

    def add(self, fleet: str, jobs: Sequence[QueuedJob]) -> None:
        """Note that these jobs were not enqueued."""
        first = min(job.seq for job in jobs)
        with self._lock:
            before = self._by_fleet.get(fleet)
            self._by_fleet[fleet] = Postponed(first if before is None else min(first, before.first_seq))

    def advance(self, fleet: str, done: Postponed, next_seq: int | None) -> None:
        """Note that what `get` returned was enqueued up to `next_seq`; None: all of it.

        If a job was added meanwhile, nothing changes: it may have been committed after the jobs were read.
        """
        with self._lock:
            if self._by_fleet.get(fleet) is not done:
                return
            if next_seq is None:
                del self._by_fleet[fleet]
            else:
                self._by_fleet[fleet] = Postponed(next_seq)
