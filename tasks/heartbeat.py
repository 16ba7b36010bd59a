"""Heartbeat: one thread in each worker process keeps all of its leases alive.

A lease that cannot be renewed because Redis is away is kept on: the record decides in the end whether the
run still counts.  So does a lease that Redis does not know: it is doubted, and lost only if the record says so too.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import structlog
from redis.exceptions import RedisError

from routing.leases import Held, Leases, Renewal

log = structlog.get_logger(__name__)


class Hold:
    """One lease while its job runs.  A run waits on it, and is woken when something happens to it."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.lost = False  # the run is not this worker's any more: whatever comes of it does not count
        self.cancel = False  # the job shall be canceled
        self.stop = False  # this worker is going down: hand the job back
        self.over = False  # the lease is not kept alive any more
        self._on_cancel: Callable[[], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._wake = threading.Event()

    def listen(self, on_cancel: Callable[[], None], on_end: Callable[[], None]) -> None:
        """What to do, from another thread, when the job shall be canceled, and when nothing shall be waited for.

        What has been raised before is heard, too.
        """
        self._on_cancel, self._on_end = on_cancel, on_end
        if self.cancel:
            self._tell_of_cancel()
        if self.lost or self.stop:
            on_end()

    def wait(self, seconds: float) -> None:
        """Sleep, but not past the moment in which one of the flags is raised."""
        self._wake.wait(seconds)
        self._wake.clear()

    def ask_to_cancel(self) -> None:
        """Somebody wants the job canceled: its run learns of it, and its server."""
        if self.cancel:
            return
        self._raise("cancel")
        self._tell_of_cancel()

    def end(self, why: Literal["lost", "stop"]) -> None:
        """This run is over for this worker."""
        if getattr(self, why):
            return
        self._raise(why)
        if self._on_end is not None:
            self._on_end()

    def _raise(self, flag: str) -> None:
        setattr(self, flag, True)
        self._wake.set()

    def _tell_of_cancel(self) -> None:
        if self._on_cancel is not None:
            threading.Thread(target=self._on_cancel, name="cancel", daemon=True).start()


class Heartbeat:
    """Renews the leases of one owner, and waits for nothing else.

    `doubt`: is given the holds whose leases Redis does not know.  `then`: is called after each beat to which Redis
    answers, and told whether Redis was away since the last such beat.  Neither may wait for anything.
    """

    def __init__(
        self,
        leases: Leases,
        owner: str,
        every_ms: int,
        doubt: Callable[[list[Hold]], None],
        then: Callable[[bool], None] = lambda was_away: None,
    ) -> None:
        self._leases = leases
        self._owner = owner
        self._every_s = every_ms / 1000
        self._doubt, self._then = doubt, then
        self._was_away = False
        self._holds: dict[str, Hold] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()

    def wait(self, seconds: float) -> None:
        """Sleep, but not past the end of this worker."""
        self._ended.wait(seconds)

    def add(self, held: Held) -> Hold:
        """Keep this lease alive from now on."""
        hold = Hold(held)
        with self._lock:
            self._holds[held.job_id] = hold
        return hold

    def remove(self, hold: Hold) -> None:
        hold.over = True
        with self._lock:
            if self._holds.get(hold.held.job_id) is hold:
                del self._holds[hold.held.job_id]

    @contextmanager
    def holding(self, held: Held) -> Iterator[Hold]:
        hold = self.add(held)
        try:
            yield hold
        finally:
            self.remove(hold)

    def stop_all(self) -> None:
        """Tell all runs that this worker is going down."""
        for hold in self.holds():
            hold.end("stop")

    def beat(self) -> None:
        """Renew everything once."""
        by_fleet: dict[str, list[Hold]] = defaultdict(list)
        for hold in self.holds():
            by_fleet[hold.held.fleet].append(hold)
        answered, emptied = True, False
        for fleet, holds in by_fleet.items():
            try:
                answers = self._leases.renew(fleet, self._owner, [hold.held for hold in holds])
            except RedisError as error:
                log.warning("renewal_failed", fleet=fleet, leases=len(holds), error=str(error))
                answered, self._was_away = False, True
                continue
            emptied |= Renewal.UNKNOWN in answers
            self._heed(holds, answers)
        if answered:
            self._then(self._was_away or emptied)
            self._was_away = emptied

    def renew(self, hold: Hold) -> None:
        """Renew one lease, beside the beats.  Raises redis errors."""
        self._heed([hold], self._leases.renew(hold.held.fleet, self._owner, [hold.held]))

    def _heed(self, holds: list[Hold], answers: list[Renewal]) -> None:
        for hold, answer in zip(holds, answers, strict=True):
            if answer is Renewal.CANCEL:
                hold.ask_to_cancel()
        self._doubt([hold for hold, answer in zip(holds, answers, strict=True) if answer is Renewal.LOST])

    def _beat(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self.beat()
            except Exception:
                log.exception("heartbeat_failed")

    def holds(self) -> list[Hold]:
        """The leases that are kept alive now."""
        with self._lock:
            return list(self._holds.values())
