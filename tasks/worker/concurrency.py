"""How many runs a worker has under way, and how many places are free."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from routing.queue.queues import Offer


@dataclass(frozen=True, slots=True, eq=False)
class TakenOffer:
    """An offer that this process has taken up, and when (s since 1970).  Each is equal to itself alone."""

    offer: Offer
    since_s: float = field(default_factory=time.time)


class Concurrency:
    """The leases whose offers this process has taken up, until their runs end.  Safe between threads.

    `accepts_jobs`: whether the worker takes jobs now.
    """

    def __init__(self, limit: int, owner: str, accepts_jobs: Callable[[], bool]) -> None:
        self.limit = limit
        self._owner, self._accepts_jobs = owner, accepts_jobs
        self._taken: dict[str, TakenOffer] = {}  # by lease
        self._unfilled = 0  # places of ended runs for which nothing was taken, since ends waited for the database
        self._lock = threading.Lock()

    @property
    def accepts_jobs(self) -> bool:
        return self._accepts_jobs()

    @property
    def running(self) -> int:
        """How many are under way."""
        return len(self._taken)

    @property
    def free_places(self) -> int:
        """How many more runs may begin; none while draining."""
        return max(self.limit - len(self._taken), 0) if self.accepts_jobs else 0

    @property
    def claimant(self) -> str:
        """The owner that takes the next offer at once: this worker, or "", if it is full or draining."""
        return self._owner if self.free_places else ""

    def taken_offers(self) -> list[TakenOffer]:
        """Return the offers whose runs are under way, the oldest first."""
        with self._lock:
            return list(self._taken.values())

    def try_add(self, taken: TakenOffer) -> bool:
        """Take up an open offer.  False: this process is full, or has taken it up before."""
        if len(self._taken) >= self.limit:
            return False
        with self._lock:
            return self._taken.setdefault(taken.offer.lease, taken) is taken

    def add(self, taken: TakenOffer) -> None:
        """Count a lease that this worker holds already: the message of its offer then finds it taken up."""
        with self._lock:
            self._taken[taken.offer.lease] = taken

    def remove(self, taken: TakenOffer) -> bool:
        """Remove a run from the count.  False: the offer came to this process another way, and that run goes on."""
        lease = taken.offer.lease
        with self._lock:
            is_own = self._taken.get(lease) is taken
            if is_own:
                del self._taken[lease]
            return is_own

    def is_full_without(self, lease: str) -> bool:
        """Whether other runs than this one take all places."""
        return len(self._taken) - (lease in self._taken) >= self.limit

    def note_unfilled_place(self) -> None:
        """Note that no job was found for the place of a run: runs whose ends are not stored yet have all places."""
        self._unfilled += 1

    def claim_unfilled_place(self) -> bool:
        """Return whether a job must be found now for the place of an earlier run."""
        if not self._unfilled or not self.free_places:
            return False
        self._unfilled -= 1
        return True
