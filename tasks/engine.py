"""The event loop of a worker process: all its runs live in it, and none has a thread of its own.

What runs ask of Redis and of the record in the same moment goes there together: the loop has a connection to Redis, on
which nothing waits for the answer before; and what is for the record is committed in one transaction.  Starts, which
wait for no disk, the loop writes itself where nobody else writes just now: to hand them to a thread and back takes
longer.  All else a thread writes, behind them.
"""

import asyncio
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

import structlog
import uvloop

from database.db import Database, Write
from routing.leases import Leases
from scripting.scripts import Command
from tasks.pulse import Pulse
from tasks.servers import Wires

T = TypeVar("T")

log = structlog.get_logger(__name__)

_MOST_SPAWNED = 512

_MOST_TOGETHER = 128
_MOST_AT_ONCE = 32  # starts or ends, of 0.1 ms each
_BEHIND_S = 0.003  # In that time a slot that was passed on with an end has its next request sent.
_LATER_S = 0.01
_SLICE_S = 0.001
_RARE_THREADS = 16


_Asked: TypeAlias = "list[tuple[Any, asyncio.Future[Any]]]"  # what for, and where its answer goes
_Turn: TypeAlias = "tuple[_Asked, Sequence[Any] | None]"  # and what it came to, if only the disk is waited for


class Together:
    """Has what the loop asks for in one turn done together, in a thread of its own.

    `do` answers a result, or an Exception, for each.  `at_once`: does the same in the loop if that takes no time, else
    answers None.  `secured`: what was done at once is handed to it, with its answers, by the thread, for it may wait;
    they are given when it returns them.  `behind_s`: what is asked for waits so long for more of its kind, and does not
    disturb the loop.
    """

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        do: Callable[[list[Any]], Sequence[Any]],
        at_once: Callable[[list[Any]], Sequence[Any] | None] = lambda _: None,
        secured: Callable[[list[Any], list[Any]], Sequence[Any]] | None = None,
        behind_s: float = 0.0,
    ) -> None:
        self._loop, self._do, self._at_once, self._secured = loop, do, at_once, secured
        self._behind_s = behind_s
        self._this_turn: _Asked = []
        self._turns: SimpleQueue[_Turn | None] = SimpleQueue()
        self.pulse = Pulse(name, wake=lambda: self._turns.put(([], None)))
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def ask(self, wanted: Any) -> "asyncio.Future[Any]":
        """Have it done.  The future has what it came to."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._this_turn.append((wanted, answer))
        if len(self._this_turn) == 1:
            self._loop.call_later(self._behind_s, self._hand_over)
        return answer

    def end(self) -> None:
        self._turns.put(None)

    def _hand_over(self) -> None:
        batch, self._this_turn = self._this_turn, []
        found = _done(self._at_once, _wanted(batch)) if len(batch) <= _MOST_AT_ONCE else None
        if found is None or self._secured is not None:
            self._turns.put((batch, found))
        else:
            _answer([future for _, future in batch], found)

    def _work(self) -> None:
        while (turns := self._next()) is not None:
            done = [one for batch, found in turns if found is not None for one in batch]
            answers = [answer for _, found in turns if found is not None for answer in found]
            if done and self._secured is not None:
                self._tell(done, _done(self._secured, _wanted(done), answers))
            if undone := [one for batch, found in turns if found is None for one in batch]:
                self._tell(undone, _done(self._do, _wanted(undone)))

    def _tell(self, batch: _Asked, found: Sequence[Any]) -> None:
        self._loop.call_soon_threadsafe(_answer, [future for _, future in batch], found)

    def _next(self) -> "list[_Turn] | None":
        found: list[_Turn] = []
        try:
            while sum(len(batch) for batch, _ in found) < _MOST_TOGETHER:
                turn = self._turns.get(block=not found)
                self.pulse.beat()
                if turn is None:
                    return None
                found.append(turn)
        except Empty:
            pass
        return found


def _wanted(batch: _Asked) -> list[Any]:
    return [wanted for wanted, _ in batch]


def _done(do: Callable[..., T], wanted: list[Any], *more: Any) -> T | list[Exception]:
    try:
        return do(wanted, *more)
    except Exception as error:
        return [error] * len(wanted)


def _answer(futures: Sequence["asyncio.Future[Any]"], found: Sequence[Any]) -> None:
    for future, answer in zip(futures, found, strict=True):
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


@types.coroutine
def _from_there(life: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, None, T]:
    """A life from where it waits for the first time."""
    if awaited is None or not awaited.done():
        with suppress(Exception, asyncio.CancelledError):  # What it waits for tells it of these by itself.
            yield awaited
    return (yield from life)


async def _going_on(life: Coroutine[Any, Any, T], awaited: Any) -> T:
    """The same as a coroutine: from Python 3.12 on no task is made of a generator."""
    return await _from_there(life, awaited)


class Engine:
    """The loop, its thread, and its ways to Redis, to the record and to servers."""

    def __init__(self, database: Database, leases: Leases) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.wires = Wires(self.loop)
        self._room = leases.pipeline(self.loop)
        at_once = database.do_at_once
        self._relaxed = Together("record-relaxed", self.loop, database.do_all, at_once)
        self._durable = Together("record-durable", self.loop, database.do_all, at_once, database.secured, _BEHIND_S)
        self._rare = ThreadPoolExecutor(_RARE_THREADS, thread_name_prefix="rare")
        self._spawned: set[asyncio.Task[Any]] = set()
        self._lives: set[asyncio.Task[Any]] = set()
        self._count = 0  # of lives, those among them that the loop has not begun yet
        self._later: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._idle = threading.Condition()
        self._closed = False
        self._awaited: set[Future[Any]] = set()  # by threads, until the loop ends
        self._pulse = Pulse("engine", wake=lambda: self.soon(self._pulse.beat))
        self._thread = threading.Thread(target=self._turn, name="engine", daemon=True)
        self._thread.start()

    # -- from any thread -------------------------------------------------------------------------------------

    def soon(self, act: Callable[..., object], *args: Any) -> None:
        """Have the loop call `act`."""
        if self._is_here:
            self.loop.call_soon(act, *args)
        else:
            self.loop.call_soon_threadsafe(act, *args)

    def live(self, life: Coroutine[Any, Any, object]) -> None:
        """Have the loop carry out `life`; from the loop's own thread it begins at once, up to where it first waits."""
        with self._idle:
            self._count += 1
        if self._is_here:
            self._begin(life)
        else:
            self.loop.call_soon_threadsafe(self._begin, life)

    def ask(self, what: Coroutine[Any, Any, T], within_s: float) -> T:
        """Have the loop do it, and wait for it.  Raises what it raises, TimeoutError; CancelledError: the loop ends."""
        with self._idle:
            if self._closed:
                what.close()
                raise CancelledError
            asked = asyncio.run_coroutine_threadsafe(what, self.loop)
            self._awaited.add(asked)
        try:
            return asked.result(within_s)
        finally:
            self._awaited.discard(asked)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing lives any more; False: it took longer."""
        with self._idle:
            return self._idle.wait_for(lambda: self._count == 0 and not self._later, seconds)

    @property
    def pulses(self) -> Sequence[Pulse]:
        """Of the loop and of its threads; of none when they have been told to end."""
        return () if self._closed else (self._pulse, self._relaxed.pulse, self._durable.pulse)

    def repeat(self, every_s: float, act: Callable[[], object]) -> None:
        """Have the loop call `act` again and again."""
        self.soon(self._repeat, every_s, act)

    def close(self) -> None:
        """End the loop; what still lives is left where it is."""
        with self._idle:
            self._closed = True
        self.soon(lambda: self.loop.create_task(self._end()))
        self._thread.join(5)
        for asked in tuple(self._awaited):
            asked.cancel()
        self._relaxed.end()
        self._durable.end()
        self._rare.shutdown(wait=False)

    # -- from the loop ---------------------------------------------------------------------------------------

    def later(self, act: Callable[..., object], *args: Any) -> None:
        """Have `act` called when no request and no slot has to wait for it: soon, and in the order asked for."""
        self._later.append((act, args))
        if len(self._later) == 1:
            self.loop.call_later(_LATER_S, self._catch_up)

    def spawn(self, act: Coroutine[Any, Any, object]) -> None:
        """Carry out something that nobody waits for; it is cancelled when the loop ends, or when there are too many."""
        if len(self._spawned) >= _MOST_SPAWNED:
            act.close()
            return
        task = self.loop.create_task(act)
        self._spawned.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: "asyncio.Task[Any]") -> None:
        self._spawned.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("background_task_failed", error=repr(error))

    def ask_room(self, command: Command[T]) -> "asyncio.Future[T]":
        """Run a script.  The future raises redis errors."""
        return self._room.ask(command)

    def store(self, write: Write[T]) -> "asyncio.Future[T]":
        """The future raises RecordUnavailable, RecordUncertain."""
        return (self._relaxed if write.relaxed else self._durable).ask(write)

    async def rarely(self, act: Callable[..., T], *args: Any) -> T:
        """Have something done that waits for others, in a thread: not what every run needs."""
        return await self.loop.run_in_executor(self._rare, act, *args)

    def _repeat(self, every_s: float, act: Callable[[], object]) -> None:
        self.loop.call_later(every_s, self._repeat, every_s, act)
        act()

    async def _end(self) -> None:
        for task in tuple(self._spawned):
            task.cancel()
        try:
            await self._room.close()
        finally:
            self.loop.stop()

    @property
    def _is_here(self) -> bool:
        """Whether this is the loop's own thread."""
        return threading.get_ident() == self._thread.ident

    def _begin(self, life: Coroutine[Any, Any, object]) -> None:
        """What it asks for first is asked for in this turn, and not when its task has come to its turn."""
        context = copy_context()
        try:
            awaited = context.run(life.send, None)
        except StopIteration:
            self._over()
        except Exception as error:
            self._over(error)
        else:
            task = self.loop.create_task(_going_on(life, awaited), context=context)
            self._lives.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._lives.discard(task)
        self._over(None if task.cancelled() else task.exception())

    def _over(self, error: BaseException | None = None) -> None:
        if error is not None:
            log.error("run_failed", exc_info=error)
        with self._idle:
            self._count -= 1
            if not self._count:
                self._idle.notify_all()

    def _catch_up(self) -> None:
        """A little at a time, lest what has become urgent meanwhile wait for all of it."""
        until = time.monotonic() + _SLICE_S
        while self._later and time.monotonic() < until:
            try:
                act, args = self._later[0]
                act(*args)
            except Exception:
                log.exception("act_failed")
            self._later.popleft()
        if self._later:
            self.loop.call_soon(self._catch_up)
            return
        with self._idle:
            self._idle.notify_all()

    def _turn(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
