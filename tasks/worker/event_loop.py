"""The event loop of a worker process: all its runs live in it, and none has a thread of its own.

What runs ask of Redis and of the record in the same moment goes there together: the loop has a connection to Redis, on
which nothing waits for the answer before; and what is for the record is committed in one transaction.  Starts, which
wait for no disk, the loop writes itself where nobody else writes just now: to hand them to a thread and back takes
longer.  All else a thread writes, behind them.
"""

import asyncio
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import structlog
import uvloop

from routing.queue.leases import Leases
from slotkeeper.db.group_commit import Batch, Database, Write
from slotkeeper.redis.scripts import Command
from tasks import threads
from tasks.servers import HttpClient

T = TypeVar("T")

log = structlog.get_logger(__name__)

_MOST_IN_BACKGROUND = 512

_MOST_TOGETHER = 128
_MOST_AT_ONCE = 32  # starts or ends, of 0.1 ms each
_DELAY_S = 0.003  # In that time a slot that was passed on with an end has its next request sent.
_POOL_THREADS = 16


class CommitQueue:
    """Commits what the loop asks for in one turn together: itself, if that waits for nothing, or by a thread.

    `behind_s`: what is asked for waits so long for more of its kind, and does not disturb the loop.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, database: Database, delay_s: float = 0.0) -> None:
        self._loop, self._database, self._delay_s = loop, database, delay_s
        self._this_turn: list[tuple[Write[Any], asyncio.Future[Any]]] = []
        self._turns: SimpleQueue[_TurnBatch | None] = SimpleQueue()
        self._thread = threads.start_vital_thread(name, self._work)

    def commit(self, write: Write[T]) -> "asyncio.Future[T]":
        """Have it committed.  The future raises RecordUnavailable, RecordUncertain."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._this_turn.append((write, answer))
        if len(self._this_turn) == 1:
            self._loop.call_later(self._delay_s, self._commit)
        return answer

    def end(self) -> None:
        self._turns.put(None)

    def _commit(self) -> None:
        asked, self._this_turn = self._this_turn, []
        turn = _TurnBatch(Batch([write for write, _ in asked]), [answer for _, answer in asked])
        if len(asked) <= _MOST_AT_ONCE:
            self._database.try_commit_all(turn.batch)
        if turn.batch.answers is None:
            self._turns.put(turn)
        else:
            turn.answer()

    def _work(self) -> None:
        while (turns := self._next()) is not None:
            self._complete([turn for turn in turns if turn.batch.committed is not None])
            self._complete([turn for turn in turns if turn.batch.committed is None and turn.batch.writes])

    def _complete(self, turns: "Sequence[_TurnBatch]") -> None:
        if not turns:
            return
        try:
            self._database.complete([turn.batch for turn in turns])
        except Exception as error:
            for turn in turns:
                turn.batch.answers = [error] * len(turn.batch.writes)
        with suppress(RuntimeError):  # The loop has ended, and with it whoever waits.
            for turn in turns:
                self._loop.call_soon_threadsafe(turn.answer)

    def _next(self) -> "list[_TurnBatch] | None":
        found: list[_TurnBatch] = []
        try:
            while sum(len(turn.answers) for turn in found) < _MOST_TOGETHER:
                turn = self._turns.get(block=not found)
                if turn is None:
                    return None
                found.append(turn)
        except Empty:
            pass
        return found


class _TurnBatch(NamedTuple):
    """What was asked for in one turn of the loop, and where the answers go."""

    batch: Batch
    answers: "list[asyncio.Future[Any]]"

    def answer(self) -> None:
        for future, answer in zip(self.answers, self.batch.answers or (), strict=True):
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


class WorkerLoop:
    """The loop, its thread, and its ways to Redis, to the record and to servers."""

    def __init__(self, database: Database, leases: Leases) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.http = HttpClient(self.loop)
        self._redis_pipeline = leases.open_pipeline(self.loop)
        self._relaxed = CommitQueue("record-relaxed", self.loop, database)
        self._durable = CommitQueue("record-durable", self.loop, database, _DELAY_S)
        self._thread_pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="rare")
        self._in_background: set[asyncio.Task[Any]] = set()
        self._runs: set[asyncio.Task[Any]] = set()
        self._count = 0  # of lives, those among them that the loop has not begun yet
        self._idle = threading.Condition()
        self._closed = False
        self._awaited: set[Future[Any]] = set()  # by threads, until the loop ends
        self._thread = threads.start_vital_thread("engine", self._turn)

    # -- from any thread -------------------------------------------------------------------------------------

    def call_soon(self, act: Callable[..., object], *args: Any) -> None:
        """Have the loop call `act`."""
        if self._is_here:
            self.loop.call_soon(act, *args)
        else:
            self.loop.call_soon_threadsafe(act, *args)

    def spawn(self, life: Coroutine[Any, Any, object]) -> None:
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

    def wait_until_idle(self, seconds: float | None = None) -> bool:
        """Wait until nothing lives any more; False: it took longer."""
        with self._idle:
            return self._idle.wait_for(lambda: self._count == 0, seconds)

    def close(self) -> None:
        """End the loop; what still lives is left where it is."""
        with self._idle:
            self._closed = True
        self.call_soon(lambda: self.loop.create_task(self._end()))
        self._thread.join(5)
        for asked in tuple(self._awaited):
            asked.cancel()
        self._relaxed.end()
        self._durable.end()
        self._thread_pool.shutdown(wait=False)

    # -- from the loop ---------------------------------------------------------------------------------------

    def spawn_background(self, act: Coroutine[Any, Any, object]) -> None:
        """Carry out something that nobody waits for; it is cancelled when the loop ends, or when there are too many."""
        if len(self._in_background) >= _MOST_IN_BACKGROUND:
            act.close()
            return
        task = self.loop.create_task(act)
        self._in_background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: "asyncio.Task[Any]") -> None:
        self._in_background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("background_task_failed", error=repr(error))

    def redis(self, command: Command[T]) -> "asyncio.Future[T]":
        """Run a script.  The future raises redis errors."""
        return self._redis_pipeline.execute(command)

    def commit(self, write: Write[T]) -> "asyncio.Future[T]":
        """The future raises RecordUnavailable, RecordUncertain."""
        return (self._relaxed if write.relaxed else self._durable).commit(write)

    async def run_in_thread(self, act: Callable[..., T], *args: Any) -> T:
        """Have something done that waits for others, in a thread: not what every run needs."""
        return await self.loop.run_in_executor(self._thread_pool, act, *args)

    async def _end(self) -> None:
        for task in tuple(self._in_background):
            task.cancel()
        try:
            await self._redis_pipeline.close()
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
            self._runs.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._runs.discard(task)
        self._over(None if task.cancelled() else task.exception())

    def _over(self, error: BaseException | None = None) -> None:
        if error is not None:
            log.error("run_failed", exc_info=error)
        with self._idle:
            self._count -= 1
            if not self._count:
                self._idle.notify_all()

    def _turn(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
