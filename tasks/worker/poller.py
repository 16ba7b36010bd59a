"""A worker polls for work once a second: messages may be lost.

Messages are only quicker: one that is lost, or never read, costs its job a second or two, however long the broker is
away.  The same look keeps a worker that is full from one model's jobs alone (`Turns`).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import structlog
from redis.exceptions import RedisError

from routing.dispatch.dispatcher import Dispatcher
from routing.queue.queues import Offer, QueuePeek
from routing.queue.worker_capacity import REPORT_EVERY_S, WorkerCapacity
from slotkeeper.clock import boottime_s
from tasks import threads

log = structlog.get_logger(__name__)


class FleetRotation:
    """Fleets between which a full worker shares its runs, each in its turn.  Safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fleets: deque[str] = deque()

    def replace(self, fleets: Sequence[str]) -> None:
        """These have something to start; those that were there already keep their order."""
        with self._lock:
            kept = [fleet for fleet in self._fleets if fleet in fleets]
            self._fleets = deque([*kept, *(fleet for fleet in fleets if fleet not in kept)])

    def next_after(self, fleet: str) -> Iterator[str]:
        """Whose turn it is after a run of `fleet`, until the caller has found something to start."""
        with self._lock:
            if fleet not in self._fleets:
                self._fleets.append(fleet)
            count = len(self._fleets)
        for _ in range(count):
            with self._lock:
                following = self._fleets[0]
                self._fleets.rotate(-1)
            yield following


class Poller:
    """Reports the free places of this worker, and starts jobs that no worker has taken.

    free_places: returns how many more runs may begin now.  start: runs the job of an offer that this worker holds, and
    that it requested at this time (boottime_s).
    """

    name = "poller"

    def __init__(
        self,
        dispatcher: Dispatcher,
        workers: WorkerCapacity,
        owner: str,
        free_places: Callable[[], int],
        start: Callable[[Offer, float], None],
    ) -> None:
        self.rotation = FleetRotation()
        self._dispatcher = dispatcher
        self._workers = workers
        self._owner = owner
        self._free_places = free_places
        self._start = start
        self._last_open_offers: dict[str, int] = {}  # fleet -> number of its oldest open offer at the last look
        self._ended = threading.Event()

    def start(self) -> None:
        threads.start_vital_thread(self.name, self._run)

    def end(self) -> None:
        """Stop polling, and report that this worker is draining."""
        self._ended.set()
        try:
            self._workers.report_stopping(self._owner)
        except Exception as error:  # Its capacity is forgotten in a few seconds anyway.
            log.info("removal_not_reported", error=str(error))

    def poll_once(self) -> int:
        """Poll once, and return how many jobs were started.  Raises redis errors and DatabaseUnavailable."""
        self._workers.report(self._owner, self._free_places())
        peeks = self._dispatcher.queues.peek_all(self._dispatcher.catalog.get().fleets())
        found = [peek for peek in peeks if self._needs_worker(peek)]
        self._last_open_offers = {
            peek.fleet: peek.oldest_open_offer for peek in peeks if peek.oldest_open_offer is not None
        }
        self.rotation.replace([peek.fleet for peek in found])
        return sum(self._start_jobs(peek.fleet) for peek in found)

    def claim_in_turn(self, fleet: str) -> Offer | None:
        """Claim an offer of the fleet whose turn it is after a run of this one.

        None: nothing waits that can be started, or Redis is away.
        """
        try:
            for following in self.rotation.next_after(fleet):
                offers = self._dispatcher.queues.offer(following, 1, claimant=self._owner)
                if offers:
                    return offers[0]
        except RedisError as error:
            log.warning("offer_postponed", error=str(error))
        return None

    def _needs_worker(self, peek: QueuePeek) -> bool:
        """Return whether no worker takes the work: an offer was open at the last poll already, or none is made."""
        if peek.oldest_open_offer is None:
            return peek.may_start
        return self._last_open_offers.get(peek.fleet) == peek.oldest_open_offer

    def _start_jobs(self, fleet: str) -> int:
        """Start jobs of a fleet while places are free; return how many."""
        taken = 0
        while self._free_places() > 0:
            requested_at_s = boottime_s()
            if not (offers := self._dispatcher.queues.offer(fleet, 1, claimant=self._owner)):
                break
            self._start(offers[0], requested_at_s)
            taken += 1
        return taken

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.poll_once()
            except Exception as error:
                log.warning("poll_failed", error=str(error))
            self._ended.wait(REPORT_EVERY_S)
