"""Heartbeat: one thread in each worker process keeps all of its leases alive.

A lease that cannot be renewed because Redis is away is kept: the database decides in the end whether the run still
counts.  A lease that Redis does not know is lost only if the database confirms it.
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Literal

import structlog
from redis.exceptions import RedisError

from routing.queue.leases import Lease, Leases, Renewal
from tasks import threads

log = structlog.get_logger(__name__)

_STORE_LIMIT_S = 2.0  # After this the database is away, and the lease shows that the run goes on.


class LeaseWatch:
    """The flags of one lease while its job runs.  Any thread sets them; the run is notified in its event loop."""

    def __init__(
        self,
        lease: Lease,
        call_soon: Callable[[Callable[[], None]], object] = lambda act: act(),
        *,
        starting: bool = False,
        confirmed_at_s: float = float("-inf"),
    ) -> None:
        self.lease = lease
        self.confirmed_at_s = confirmed_at_s  # by boottime_s: when Redis was asked for it, or last confirmed it
        self.sent = False  # its server may have the request
        self.earlier_request_is_over = False  # no server has the request of an earlier worker any more
        self.starting = starting  # the database does not have the run yet, and must not be asked about it
        self.lost = False  # the lease is not this worker's: an outcome does not count, an unsent job is handed back
        self.cancel = False  # a cancel of the job was requested
        self.drain = False  # this worker is draining: hand the job back if its run can be resumed
        self.stop = False  # its grace time is over: hand the job back
        self.is_removed = False  # the lease is not kept alive any more
        self.restored = False  # the lease was written again
        self.awaits = ""  # what its run waits for, beside its server's answer, as a sentence for people
        # Monotonic: since when its slot is the next run's, while the end of this one is stored.
        self.slot_released_at_s: float | None = None
        self._call_soon = call_soon
        self._callback: Callable[[], None] = _ignore_change
        self._sleeper: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def needs_renewal(self) -> bool:
        """Whether the lease is renewed: not while its slot was passed on and its end is being stored."""
        return self.slot_released_at_s is None or time.monotonic() - self.slot_released_at_s > _STORE_LIMIT_S

    def on_change(self, callback: Callable[[], None]) -> None:
        """Set the function that is called, in the loop, when a flag is set; at once if one is set already."""
        self._callback = callback
        if self.cancel or self.lost or self.stop or self.drain:
            callback()

    def clear_callback(self) -> None:
        """Remove the callback, so that the watch does not keep the ended run in memory."""
        self._callback = _ignore_change

    def sleep(self, seconds: float) -> "asyncio.Future[None]":
        """Sleep until the time is over or a flag is set."""
        loop = asyncio.get_running_loop()
        self._sleeper = loop.create_future()
        self._timer = loop.call_later(seconds, self._wake)
        return self._sleeper

    def request_cancel(self) -> None:
        """Notify the run that a cancel of its job was requested; the run notifies its server."""
        self._set_flag("cancel")

    def end(self, flag: Literal["lost", "stop", "drain"]) -> None:
        """Have this worker give up the run; "drain": only if another worker can resume it."""
        self._set_flag(flag)

    def _set_flag(self, flag: str) -> None:
        if not getattr(self, flag):
            setattr(self, flag, True)
            self._call_soon(self._notify)

    def _notify(self) -> None:
        self._callback()
        self._wake()

    def _wake(self) -> None:
        sleeper, timer, self._sleeper, self._timer = self._sleeper, self._timer, None, None
        if timer is not None:
            timer.cancel()
        if sleeper is not None and not sleeper.done():
            sleeper.set_result(None)


def _ignore_change() -> None:
    pass


class Heartbeat:
    """Renews the leases of one owner, and waits for nothing else.

    on_lost_renewals: is given the watches whose renewal was answered with LOST.  after_beat: is called after each
    beat to which Redis responds, with whether Redis was away since the last such beat.  Neither may block.
    call_soon: calls a function in the event loop of the runs.
    """

    name = "heartbeat"

    def __init__(
        self,
        leases: Leases,
        owner: str,
        every_ms: int,
        on_lost_renewals: Callable[[list[LeaseWatch]], None],
        after_beat: Callable[[bool], None] = lambda was_away: None,
        call_soon: Callable[[Callable[[], None]], object] = lambda act: act(),
    ) -> None:
        self._leases = leases
        self._owner = owner
        self._every_s = every_ms / 1000
        self._on_lost_renewals, self._after_beat, self._call_soon = on_lost_renewals, after_beat, call_soon
        self._was_away = False
        self._watches: set[LeaseWatch] = (
            set()
        )  # Two may be of one job: its older run has not been notified yet that it is over.
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def start(self) -> None:
        threads.start_vital_thread(self.name, self._beat)

    def end(self) -> None:
        self._ended.set()

    def wait(self, seconds: float) -> None:
        """Sleep, but not past the end of this worker."""
        self._ended.wait(seconds)

    def add(self, lease: Lease, *, starting: bool = False, confirmed_at_s: float = float("-inf")) -> LeaseWatch:
        """Keep this lease alive from now on.

        starting: until the flag is reset, the database does not have the run.  confirmed_at_s: as in LeaseWatch.
        """
        watch = LeaseWatch(lease, self._call_soon, starting=starting, confirmed_at_s=confirmed_at_s)
        with self._lock:
            self._watches.add(watch)
        return watch

    def remove(self, watch: LeaseWatch) -> None:
        watch.is_removed = True
        with self._lock:
            self._watches.discard(watch)

    def drain_all(self) -> None:
        """Have all resumable runs handed over."""
        for watch in self.watches():
            watch.end("drain")

    def stop_all(self) -> None:
        """Have all runs end: this worker stops."""
        for watch in self.watches():
            watch.end("stop")

    def beat(self) -> None:
        """Renew all leases once."""
        by_fleet: dict[str, list[LeaseWatch]] = defaultdict(list)
        for watch in filter(lambda watch: watch.needs_renewal, self.watches()):
            by_fleet[watch.lease.fleet].append(watch)
        answered, emptied = True, False
        for fleet, watches in by_fleet.items():
            try:
                answers = self._leases.renew(fleet, self._owner, [watch.lease for watch in watches])
            except RedisError as error:
                log.warning("renewal_failed", fleet=fleet, leases=len(watches), error=str(error))
                answered, self._was_away = False, True
                continue
            emptied |= Renewal.UNKNOWN in answers
            self._apply_answers(watches, answers)
        if answered:
            self._after_beat(self._was_away or emptied)
            self._was_away = emptied

    def _apply_answers(self, watches: list[LeaseWatch], answers: list[Renewal]) -> None:
        for watch, answer in zip(watches, answers, strict=True):
            if answer is Renewal.CANCEL:
                watch.request_cancel()
        self._on_lost_renewals(
            [watch for watch, answer in zip(watches, answers, strict=True) if answer is Renewal.LOST]
        )

    def _beat(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self.beat()
            except Exception:
                log.exception("heartbeat_failed")

    def watches(self) -> list[LeaseWatch]:
        """The leases that are kept alive now."""
        with self._lock:
            return list(self._watches)
