"""A thread pool that gives owners turns."""

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

R = TypeVar("R")


class QueueFull(Exception):
    """This owner already has as many waiting calls as allowed."""


class TurnLate(Exception):
    """No thread was free in time."""


class ClientGone(Exception):
    """The client does not wait for the result any more."""


class FairPool:
    """Threads for one kind of work.  Owners take turns, and none holds more threads than its share."""

    def __init__(self, name: str, threads: int, share: int, most_waiting: int = 1024) -> None:
        """`share`: threads that one owner may hold.  `most_waiting`: calls of one owner that may wait."""
        self._name, self._started = name, 0
        # No executor of the standard library: the event loop would wait for its locks while threads compute.
        self._inbox: SimpleQueue[tuple[asyncio.AbstractEventLoop, str, Callable[[], Any], asyncio.Future[Any]]]
        self._inbox = SimpleQueue()
        self.threads, self.share, self.most_waiting = threads, max(share, 1), most_waiting
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # The first owner is next.
        self._held: Counter[str] = Counter()

    @property
    def has_room(self) -> bool:
        return self._held.total() < self.threads

    async def run(
        self,
        owner: str,
        call: Callable[[], R],
        wanted: Callable[[], bool] = lambda: True,
        longest_wait_s: float | None = None,
    ) -> R:
        """Run `call` in a thread when its owner has a turn, and return its result.

        Raises QueueFull; TurnLate if no thread is free within `longest_wait_s`; ClientGone if `wanted` returns False
        when the turn comes.
        """
        if self.has_room and self._held[owner] < self.share and owner not in self._waiting:
            self._held[owner] += 1
        else:
            try:
                async with asyncio.timeout(longest_wait_s):
                    await self._turn(owner)
            except TimeoutError:
                raise TurnLate from None
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[R] = loop.create_future()
        try:
            if not wanted():
                raise ClientGone
            if self._started < self._held.total():
                threading.Thread(target=self._work, name=f"{self._name}-{self._started + 1}", daemon=True).start()
                self._started += 1
        except BaseException:
            self._release_thread(owner)
            raise
        self._inbox.put((loop, owner, call, outcome))
        return await outcome  # If the caller is canceled, the thread finishes its work.

    def _work(self) -> None:
        """Run calls from the inbox, in a thread of the pool."""
        while True:
            loop, owner, call, outcome = self._inbox.get()
            try:
                set_outcome = partial(outcome.set_result, call())
            except Exception as error:
                set_outcome = partial(outcome.set_exception, error)
            with suppress(RuntimeError):  # The loop is closed: the process ends.
                loop.call_soon_threadsafe(self._finish, owner, outcome, set_outcome)

    def _finish(self, owner: str, outcome: "asyncio.Future[R]", set_outcome: Callable[[], None]) -> None:
        """Return the thread to the pool, and set the outcome of a call unless it was canceled."""
        if not outcome.done():
            set_outcome()
        self._release_thread(owner)

    async def _turn(self, owner: str) -> None:
        """Wait for a thread, and take it for the owner.  Raises QueueFull."""
        if len(self._waiting.get(owner, ())) >= self.most_waiting:
            raise QueueFull
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._release_thread(owner)
            raise

    def _release_thread(self, owner: str) -> None:
        """Return the owner's thread to the pool, and start waiting calls."""
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        while self.has_room and self._start_next():
            pass

    def _start_next(self) -> bool:
        """Give a thread to the next owner in turn that holds less than its share.  Return False if there is none."""
        for owner in [name for name in self._waiting if self._held[name] < self.share]:
            waiting = self._waiting.pop(owner)
            turn = waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting
            if not turn.done():  # otherwise its caller was canceled
                self._held[owner] += 1
                turn.set_result(None)
            return True
        return False
