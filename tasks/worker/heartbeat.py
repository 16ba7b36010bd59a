"""Heartbeat: one thread in each worker process keeps all of its leases alive.

A lease that cannot be renewed because Redis is away is kept on: the record decides in the end whether the
run still counts.  So does a lease that Redis does not know: it is doubted, and lost only if the record says so too.
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

_STORE_LIMIT_S = 2.0  # else the record is away, and a lease says that the run is not given up


class LeaseWatch:
    """Over one lease while its job runs.  Flags are raised by any thread; the run hears of them in its event loop."""

    __slots__ = (
        "_call_soon",
        "_callback",
        "_sleeper",
        "_timer",
        "awaits",
        "cancel",
        "confirmed_at_s",
        "drain",
        "is_removed",
        "lease",
        "lost",
        "restored",
        "sent",
        "slot_released_at_s",
        "starting",
        "stop",
    )

    def __init__(
        self,
        lease: Lease,
        call_soon: Callable[[Callable[[], None]], object] = lambda act: act(),
        *,
        starting: bool = False,
        confirmed_at_s: float = float("-inf"),
    ) -> None:
        self.lease = lease
        self.confirmed_at_s = (
            confirmed_at_s  # by steady_s: when Redis was asked for it, or whether it is held, the last time
        )
        self.sent = False  # its server may have the request
        self.starting = starting  # the record does not have the run yet, and cannot be asked for it
        self.lost = False  # the run is not this worker's any more: whatever comes of it does not count
        self.cancel = False  # the job shall be canceled
        self.drain = False  # this worker was told to stop: hand the job back if its run can be resumed
        self.stop = False  # its grace time is over: hand the job back
        self.is_removed = False  # the lease is not kept alive any more
        self.restored = False  # the lease was written again
        self.awaits = ""  # what its run waits for, beside its server's answer, as a sentence for people
        self.slot_released_at_s: float | None = (
            None  # monotonic: since when its slot is the next run's, its end being stored
        )
        self._call_soon = call_soon
        self._callback: Callable[[], None] = _ignore_change
        self._sleeper: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def needs_renewal(self) -> bool:
        """Whether the lease is renewed: not in the moment in which its end is stored, its slot being passed on."""
        return self.slot_released_at_s is None or time.monotonic() - self.slot_released_at_s > _STORE_LIMIT_S

    def on_change(self, callback: Callable[[], None]) -> None:
        """What to call, in the loop, when a flag is raised; at once, if one is."""
        self._callback = callback
        if self.cancel or self.lost or self.stop or self.drain:
            callback()

    def clear_callback(self) -> None:
        """Whoever listened is over, and shall not be kept in memory by this."""
        self._callback = _ignore_change

    def sleep(self, seconds: float) -> "asyncio.Future[None]":
        """Sleep, but not past the moment in which a flag is raised."""
        loop = asyncio.get_running_loop()
        self._sleeper = loop.create_future()
        self._timer = loop.call_later(seconds, self._wake)
        return self._sleeper

    def request_cancel(self) -> None:
        """Somebody wants the job canceled: its run learns of it, and its server."""
        self._set_flag("cancel")

    def end(self, flag: Literal["lost", "stop", "drain"]) -> None:
        """This run is over for this worker; "drain": if another worker can resume it."""
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

    `on_unknown_leases`: is given the watches on leases that Redis does not know.  `after_beat`: is called after each
    beat to which Redis answers, and told whether Redis was away since the last such beat.  Neither may wait for
    anything.  `call_soon`: how the loop in which the runs live is reached.
    """

    name = "heartbeat"

    def __init__(
        self,
        leases: Leases,
        owner: str,
        every_ms: int,
        on_unknown_leases: Callable[[list[LeaseWatch]], None],
        after_beat: Callable[[bool], None] = lambda was_away: None,
        call_soon: Callable[[Callable[[], None]], object] = lambda act: act(),
    ) -> None:
        self._leases = leases
        self._owner = owner
        self._every_s = every_ms / 1000
        self._on_unknown_leases, self._after_beat, self._call_soon = on_unknown_leases, after_beat, call_soon
        self._was_away = False
        self._watches: set[LeaseWatch] = (
            set()
        )  # Two may be of one job: its older run has not heard yet that it is over.
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

        `starting`: until the flag is taken down, the record lacks the run.  `held_s`: as the watch has it.
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
        """Tell all runs that this worker was told to stop."""
        for watch in self.watches():
            watch.end("drain")

    def stop_all(self) -> None:
        """Tell all runs that this worker is going down."""
        for watch in self.watches():
            watch.end("stop")

    def beat(self) -> None:
        """Renew everything once."""
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
        self._on_unknown_leases(
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
