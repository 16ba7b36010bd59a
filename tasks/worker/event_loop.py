"""The event loop of a worker process: each run is a coroutine of it, not a thread.

Redis commands of the same moment leave on one connection, on which none waits for the answer to another.  Database
writes of the same moment are committed in one transaction.  The loop commits starts itself, which wait for no disk,
unless another thread or process writes now: handing them to a thread and back takes longer.  A thread does the rest.
"""

import asyncio
import threading
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import uvloop

from routing.queue.leases import Leases
from slotkeeper.db import Database, Write
from slotkeeper.redis.scripts import Command
from tasks import threads
from tasks.servers import HttpClient

T = TypeVar("T")

log = structlog.get_logger(__name__)

_MAX_BACKGROUND_TASKS = 512

_MAX_GROUP = 128  # writes
_MAX_WRITES_IN_LOOP = 32  # starts or ends, of 0.1 ms each
_DELAY_S = 0.003  # In that time a slot that was passed on with an end has its next request sent.
_POOL_THREADS = 16


@dataclass(slots=True)
class _PendingWrite:
    """A write, and the future of its result."""

    write: Write[Any]
    future: "asyncio.Future[Any]"
    is_committed: bool = False  # by the loop
    result: Any = None  # of a committed write

    def set_result(self) -> None:
        """Resolve the future with the result.  Only the loop's thread may call this."""
        if self.future.done():
            return
        if isinstance(self.result, Exception):
            self.future.set_exception(self.result)
        else:
            self.future.set_result(self.result)


class CommitQueue:
    """Commits the writes of one turn of the loop together: in the loop, if nothing has to be waited for, else in a
    thread.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, database: Database, delay_s: float = 0.0) -> None:
        """delay_s: how long a write waits for others to share its commit."""
        self._name, self._loop, self._database, self._delay_s = name, loop, database, delay_s
        self._pending: list[_PendingWrite] = []  # of this turn
        self._left: deque[_PendingWrite] = deque()  # to the thread, by one turn or more
        self._thread = ThreadPoolExecutor(1, name)

    def commit(self, write: Write[T]) -> "asyncio.Future[T]":
        """Have a write committed.  The future raises DatabaseUnavailable, CommitUnknown."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.append(_PendingWrite(write, future))
        if len(self._pending) == 1:
            self._loop.call_later(self._delay_s, self._commit_pending)
        return future

    def end(self) -> None:
        """Let the thread end when it has committed what is left to it."""
        self._thread.shutdown(wait=False)

    def _commit_pending(self) -> None:
        """Commit this turn's writes without waiting, if possible, and leave the rest to the thread."""
        pending, self._pending = self._pending, []
        writes = [each.write for each in pending]
        results = self._database.try_commit_all(writes) if len(writes) <= _MAX_WRITES_IN_LOOP else None
        for each, result in zip(pending, results or (), strict=False):
            each.is_committed, each.result = True, result
        done = [each for each in pending if each.is_committed and not each.write.durable]
        _set_results(done)
        if len(done) < len(pending):
            self._left.extend(each for each in pending if each.write.durable or not each.is_committed)
            self._thread.submit(threads.run_or_end_process, self._name, self._commit_left)

    def _commit_left(self) -> None:
        while self._left:
            group = [self._left.popleft() for _ in range(min(len(self._left), _MAX_GROUP))]
            if committed := [each for each in group if each.is_committed]:
                self._sync(committed)
            if uncommitted := [each for each in group if not each.is_committed]:
                self._commit_all(uncommitted)

    def _sync(self, group: Sequence[_PendingWrite]) -> None:
        """Wait once for the disk behind the commits of several turns."""
        try:
            self._database.sync()
        except Exception as error:
            for each in group:
                each.result = each.result if isinstance(each.result, Exception) else error
        self._set_results_in_loop(group)

    def _commit_all(self, group: Sequence[_PendingWrite]) -> None:
        try:
            results = self._database.commit_all([each.write for each in group])
        except Exception as error:
            results = [error] * len(group)
        for each, result in zip(group, results, strict=True):
            each.result = result
        self._set_results_in_loop(group)

    def _set_results_in_loop(self, group: Sequence[_PendingWrite]) -> None:
        with suppress(RuntimeError):  # The loop has ended, and with it all that waits.
            self._loop.call_soon_threadsafe(_set_results, group)


def _set_results(group: Sequence[_PendingWrite]) -> None:
    for each in group:
        each.set_result()


@types.coroutine
def _resume_at(coroutine: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, None, T]:
    """Run a coroutine from its first await on."""
    if awaited is None or not awaited.done():
        with suppress(Exception, asyncio.CancelledError):  # The awaited future raises these in the coroutine as well.
            yield awaited
    return (yield from coroutine)


async def _resume(coroutine: Coroutine[Any, Any, T], awaited: Any) -> T:
    """The same as a coroutine: from Python 3.12 on no task is made of a generator."""
    return await _resume_at(coroutine, awaited)


class WorkerLoop:
    """The loop, its thread, and its connections to Redis, the database and servers."""

    def __init__(self, database: Database, leases: Leases) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.http = HttpClient(self.loop)
        self._leases, self._redis_pipeline = leases, leases.open_pipeline(self.loop)
        self._at_once = CommitQueue("database-starts", self.loop, database)
        self._delayed = CommitQueue("database-ends", self.loop, database, _DELAY_S)
        self._thread_pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="worker-pool")
        self._background_tasks: set[asyncio.Task[Any]] = set()
        self._runs: set[asyncio.Task[Any]] = set()
        self._run_count = 0  # with the runs that the loop has not begun yet
        self._idle = threading.Condition()
        self._thread = threads.start_vital_thread("event-loop", self._run_forever)

    # -- from any thread -------------------------------------------------------------------------------------

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call `function`."""
        if self._is_loop_thread:
            self.loop.call_soon(function, *args)
        else:
            self.loop.call_soon_threadsafe(function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine in the loop; called from the loop's own thread, it begins at once, up to its first await."""
        with self._idle:
            self._run_count += 1
        if self._is_loop_thread:
            self._start_run(coroutine)
        else:
            self.loop.call_soon_threadsafe(self._start_run, coroutine)

    def wait_until_idle(self, seconds: float | None = None) -> bool:
        """Wait until no run is under way; False: it took longer."""
        with self._idle:
            return self._idle.wait_for(lambda: self._run_count == 0, seconds)

    def close(self) -> None:
        """End the loop; runs that are under way are left."""
        self.call_soon(lambda: self.loop.create_task(self._shut_down()))
        self._thread.join(5)
        self._at_once.end()
        self._delayed.end()
        self._thread_pool.shutdown(wait=False)

    # -- from the loop ---------------------------------------------------------------------------------------

    def spawn_background(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine for which no run waits; it is canceled at the end, or dropped if there are too many."""
        if len(self._background_tasks) >= _MAX_BACKGROUND_TASKS:
            coroutine.close()
            return
        task = self.loop.create_task(coroutine)
        self._background_tasks.add(task)
        task.add_done_callback(self._on_background_task_done)

    def _on_background_task_done(self, task: "asyncio.Task[Any]") -> None:
        self._background_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("background_task_failed", error=repr(error))

    def redis(self, command: Command[T]) -> "asyncio.Future[T]":
        """Run a script.  The future raises redis errors."""
        return self._redis_pipeline.execute(command)

    def reconnect(self) -> None:
        """Close the connections to Redis, whose primary was replaced.  From any thread."""
        self._leases.scripts.reconnect()
        self.call_soon(self._redis_pipeline.reconnect)

    def commit(self, write: Write[T]) -> "asyncio.Future[T]":
        """Commit a write.  The future raises DatabaseUnavailable, CommitUnknown."""
        return (self._at_once if write.is_urgent or not write.durable else self._delayed).commit(write)

    async def run_in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking function in a thread: only for what few runs need."""
        return await self.loop.run_in_executor(self._thread_pool, function, *args)

    async def _shut_down(self) -> None:
        for task in tuple(self._background_tasks):
            task.cancel()
        try:
            await self._redis_pipeline.close()
        finally:
            self.loop.stop()

    @property
    def _is_loop_thread(self) -> bool:
        """Whether this is the loop's own thread."""
        return threading.get_ident() == self._thread.ident

    def _start_run(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Start a run at once: its first request is sent in this turn of the loop, not in the next.

        With `loop.create_task`, which is simpler, 32 slots of 20 ms have 7 % fewer jobs a second.
        """
        context = copy_context()
        try:
            awaited = context.run(coroutine.send, None)
        except StopIteration:
            self._note_run_end()
        except Exception as error:
            self._note_run_end(error)
        else:
            task = self.loop.create_task(_resume(coroutine, awaited), context=context)
            self._runs.add(task)
            task.add_done_callback(self._on_run_done)

    def _on_run_done(self, task: "asyncio.Task[Any]") -> None:
        self._runs.discard(task)
        self._note_run_end(None if task.cancelled() else task.exception())

    def _note_run_end(self, error: BaseException | None = None) -> None:
        if error is not None:
            log.error("run_failed", exc_info=error)
        with self._idle:
            self._run_count -= 1
            if not self._run_count:
                self._idle.notify_all()

    def _run_forever(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
