"""Threads that answer requests, and the order in which owners get them."""

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
    """As many calls of this owner wait as may."""


class TurnLate(Exception):
    """No thread was free in time."""


class ClientGone(Exception):
    """Nobody waits for the result any more."""


class FairPool:
    """Threads for one kind of work.  Owners get turns one after the other, and none holds more than its share."""

    def __init__(self, name: str, threads: int, share: int, most_waiting: int = 1024) -> None:
        """`share`: threads that one owner may hold.  `most_waiting`: calls of one owner that may wait."""
        self._name, self._started = name, 0
        # Not an executor of the standard library, whose locks the event loop would wait for while threads compute.
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
        """Return what `call` returns, in a thread, when its owner's turn has come.

        Raises QueueFull; TurnLate after `longest_wait_s`; ClientGone where it is not `wanted` any more when its turn
        comes.
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
            self._give_back(owner)
            raise
        self._inbox.put((loop, owner, call, outcome))
        return await outcome  # A caller that is canceled leaves its thread at work.

    def _work(self) -> None:
        """In a thread."""
        while True:
            loop, owner, call, outcome = self._inbox.get()
            try:
                end = partial(outcome.set_result, call())
            except Exception as error:
                end = partial(outcome.set_exception, error)
            with suppress(RuntimeError):  # The loop is closed: the process ends.
                loop.call_soon_threadsafe(self._end, owner, outcome, end)

    def _end(self, owner: str, outcome: "asyncio.Future[R]", end: Callable[[], None]) -> None:
        if not outcome.done():
            end()
        self._give_back(owner)

    async def _turn(self, owner: str) -> None:
        if len(self._waiting.get(owner, ())) >= self.most_waiting:
            raise QueueFull
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._give_back(owner)
            raise

    def _give_back(self, owner: str) -> None:
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        while self.has_room and self._begin_next():
            pass

    def _begin_next(self) -> bool:
        """Give a thread to the owner whose turn it is; owners that hold their share are passed over."""
        for owner in [it for it in self._waiting if self._held[it] < self.share]:
            waiting = self._waiting.pop(owner)
            turn = waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting
            if not turn.done():  # else its caller was canceled
                self._held[owner] += 1
                turn.set_result(None)
            return True
        return False
