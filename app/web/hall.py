"""The threads that answer requests, and the order in which clients get them.

Threads stand in lanes, so that one kind of request cannot take those of another.  Where requests wait, each owner
gets a turn after the other, and no owner holds more than its share.  All of this is called from the event loop's
thread; only `work` runs in the lane's.  A thread that has done its work wakes the loop once, for all that follows.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import structlog

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Errand:
    """Something that a thread of a lane is to do for an owner."""

    owner: str
    work: Callable[[], Callable[[], object] | None]
    """Runs in the lane's thread.  What it answers is called in the loop's; nothing, if it raises an error."""
    wanted: Callable[[], bool] = field(default=lambda: True)
    """Whether anybody still waits for it; asked before it is begun."""


class Lane:
    """Some threads and those who wait for them."""

    def __init__(
        self, name: str, threads: int, share: int, call_soon: Callable[..., object], most_waiting: int
    ) -> None:
        """`share`: threads that one owner may hold.  `most_waiting`: errands of one owner that may wait.

        `call_soon` runs a function in the event loop's thread, from any other.
        """
        self.name, self.threads, self.share, self.most_waiting = name, threads, max(share, 1), most_waiting
        self._call_soon = call_soon
        self._inbox: SimpleQueue[Errand] = SimpleQueue()
        self._waiting: OrderedDict[str, deque[Errand]] = OrderedDict()  # The first owner's turn is next.
        self._held: dict[str, int] = {}
        self.busy = 0
        self._started = 0

    @property
    def has_room(self) -> bool:
        return self.busy < self.threads

    def has_room_for(self, owner: str) -> bool:
        """Whether an errand of this owner would be begun at once."""
        return self.has_room and self._may_hold(owner) and owner not in self._waiting

    def enter(self, errand: Errand) -> bool:
        """Do it when its owner's turn has come.  False: too many of its owner wait already."""
        waiting = self._waiting.get(errand.owner)
        if waiting is None and self.has_room and self._may_hold(errand.owner):
            self._begin(errand)
            return True
        if len(waiting or ()) >= self.most_waiting:
            return False
        self._waiting.setdefault(errand.owner, deque()).append(errand)
        return True

    def _may_hold(self, owner: str) -> bool:
        return self._held.get(owner, 0) < self.share

    def _begin(self, errand: Errand) -> None:
        if self.busy == self._started:
            threading.Thread(target=self._serve, name=f"{self.name}-{self._started + 1}", daemon=True).start()
            self._started += 1
        self.busy += 1
        self._held[errand.owner] = self._held.get(errand.owner, 0) + 1
        self._inbox.put(errand)

    def _serve(self) -> None:
        while True:
            errand = self._inbox.get()
            self._call_soon(self._end, errand.owner, self._do(errand))

    def _do(self, errand: Errand) -> Callable[[], object] | None:
        """Whatever happens, the thread goes on."""
        try:
            return errand.work()
        except Exception as error:
            log.error("errand_failed", lane=self.name, exc_info=error)
            return None

    def _end(self, owner: str, then: Callable[[], object] | None) -> None:
        try:
            if then is not None:
                then()
        finally:
            self._give_back(owner)

    def _give_back(self, owner: str) -> None:
        self.busy -= 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        while self.has_room and (errand := self._next()) is not None:
            self._begin(errand)

    def _next(self) -> Errand | None:
        """The errand whose owner's turn it is; owners that hold their share are passed over."""
        for owner in list(self._waiting):
            if not self._may_hold(owner):
                continue
            waiting = self._waiting[owner]
            while waiting and not waiting[0].wanted():
                waiting.popleft()
            found = waiting.popleft() if waiting else None
            if waiting:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            if found is not None:
                return found
        return None
