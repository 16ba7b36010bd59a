"""The event loop groups its commits: it commits without a wait if the database allows that, otherwise in a thread."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from slotkeeper import logs
from slotkeeper.db import Write
from slotkeeper.errors import DatabaseUnavailable
from tasks.worker import event_loop
from tasks.worker.event_loop import CommitQueue, WorkerLoop

_NAME, _THREAD = "commits", "commits_0"


class FakeDatabase:
    """A database without storage that notes the results of each commit and the thread that made it."""

    def __init__(self) -> None:
        self.commits: list[tuple[str, list[str]]] = []
        self.is_locked = False  # Another process writes.
        self.error: Exception | None = None

    def try_commit_all(self, writes: Sequence[Write[Any]]) -> list[str] | None:
        return None if self.is_locked else self._note(writes)

    def commit_all(self, writes: Sequence[Write[Any]]) -> list[str]:
        results = self._note(writes)
        if self.error is not None:
            raise self.error
        return results

    def sync(self) -> None:
        self.commits.append((threading.current_thread().name, ["disk"]))
        if self.error is not None:
            raise self.error

    def _note(self, writes: Sequence[Write[Any]]) -> list[str]:
        results = [write.unit(None) for write in writes]  # type: ignore[arg-type]
        self.commits.append((threading.current_thread().name, results))
        return results


@contextmanager
def _commit_queue(database: Any, delay_s: float = 0.0) -> Iterator[Callable[..., list[str]]]:
    """Return a function that commits writes in one iteration of a loop, waits for them, and returns their results."""
    loop = asyncio.new_event_loop()
    queue = CommitQueue(_NAME, loop, database, delay_s)

    async def commit_all(*names: str, durable: bool = False) -> list[str]:
        writes = [Write(lambda tx, name=name: name, durable) for name in names]  # type: ignore[misc]
        return list(await asyncio.wait_for(asyncio.gather(*map(queue.commit, writes)), 10))

    try:
        yield lambda *names, **options: loop.run_until_complete(commit_all(*names, **options))
    finally:
        queue.end()
        loop.close()


@pytest.fixture
def database() -> FakeDatabase:
    return FakeDatabase()


def test_writes_that_need_not_wait_are_committed_together_in_the_loop(database: FakeDatabase) -> None:
    with _commit_queue(database) as commit_all:
        assert commit_all("a", "b", "c") == ["a", "b", "c"]
    assert database.commits == [(threading.current_thread().name, ["a", "b", "c"])]


def test_writes_are_committed_by_the_thread_while_the_database_is_locked(database: FakeDatabase) -> None:
    database.is_locked = True
    with _commit_queue(database) as commit_all:
        assert commit_all("a", "b") == ["a", "b"]
    assert database.commits == [(_THREAD, ["a", "b"])]


def test_too_many_writes_for_the_loop_are_committed_by_the_thread(database: FakeDatabase) -> None:
    many = [str(n) for n in range(event_loop._MAX_WRITES_IN_LOOP + 1)]
    with _commit_queue(database) as commit_all:
        commit_all(*many)
    assert database.commits == [(_THREAD, many)]


def test_a_durable_commit_of_the_loop_returns_after_the_thread_has_synced_the_disk(database: FakeDatabase) -> None:
    here = threading.current_thread().name
    with _commit_queue(database) as commit_all:
        assert commit_all("a", "b", durable=True) == ["a", "b"]
        database.is_locked = True
        assert commit_all("c", durable=True) == ["c"], "the commit of the thread is durable by itself"
    assert database.commits == [(here, ["a", "b"]), (_THREAD, ["disk"]), (_THREAD, ["c"])]


def test_a_start_does_not_wait_for_the_disk_with_a_durable_write_of_its_turn(database: FakeDatabase) -> None:
    may_sync = threading.Event()
    database.sync = lambda: may_sync.wait(10)  # type: ignore[assignment,method-assign,return-value]
    loop = asyncio.new_event_loop()
    queue = CommitQueue(_NAME, loop, database)  # type: ignore[arg-type]

    async def commit_both() -> None:
        durable = queue.commit(Write(lambda tx: "id", is_urgent=True))
        start = queue.commit(Write(lambda tx: "start", durable=False))
        assert await asyncio.wait_for(start, 10) == "start" and not durable.done()
        may_sync.set()
        assert await asyncio.wait_for(durable, 10) == "id"

    loop.run_until_complete(commit_both())
    queue.end()
    loop.close()


def test_a_failed_sync_fails_the_durable_writes_that_waited_for_it(database: FakeDatabase) -> None:
    database.error = DatabaseUnavailable("down")
    with _commit_queue(database) as commit_all, pytest.raises(DatabaseUnavailable):
        commit_all("a", "b", durable=True)


def test_a_write_that_was_queued_before_the_end_is_committed(database: FakeDatabase) -> None:
    """Both reach the thread while it commits an earlier write."""
    database.is_locked, may_continue = True, threading.Event()
    loop = asyncio.new_event_loop()
    queue = CommitQueue(_NAME, loop, database)  # type: ignore[arg-type]

    def wait(_: Any) -> str:
        may_continue.wait(10)
        return "first"

    async def commit_both() -> list[str]:
        first = queue.commit(Write(wait, durable=False))
        await asyncio.sleep(0.01)
        second = queue.commit(Write(lambda tx: "second", durable=False))
        await asyncio.sleep(0.01)
        queue.end()
        may_continue.set()
        return list(await asyncio.wait_for(asyncio.gather(first, second), 10))

    assert loop.run_until_complete(commit_both()) == ["first", "second"]
    loop.close()


def test_a_commit_with_a_delay_waits_for_further_writes(database: FakeDatabase) -> None:
    database.is_locked = True
    with _commit_queue(database, delay_s=0.05) as commit_all:
        commit_all("a", "b")
    assert database.commits == [(_THREAD, ["a", "b"])]


# -- coroutines of the loop -------------------------------------------------------------------------------------


@pytest.fixture
def worker_loop() -> Iterator[WorkerLoop]:
    """Return a loop whose database fails each commit."""

    async def close() -> None:
        pass

    database: Any = FakeDatabase()
    database.is_locked, database.error = True, DatabaseUnavailable("down")
    redis: Any = SimpleNamespace(open_pipeline=lambda loop: SimpleNamespace(close=close))
    worker_loop = WorkerLoop(database, redis)
    yield worker_loop
    worker_loop.close()


def test_a_spawned_coroutine_runs_up_to_its_first_await_before_spawn_returns(worker_loop: WorkerLoop) -> None:
    steps: list[str] = []

    async def next_run() -> None:
        steps.append("next run began")
        await asyncio.sleep(0)
        steps.append("next run ended")

    async def run() -> None:
        worker_loop.spawn(next_run())
        steps.append("spawn returned")

    worker_loop.spawn(run())
    assert worker_loop.wait_until_idle(10) and steps == ["next run began", "spawn returned", "next run ended"]


def test_a_run_continues_as_a_coroutine_because_later_pythons_accept_no_generator(worker_loop: WorkerLoop) -> None:
    continued: list[Any] = []

    def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        continued.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    worker_loop.loop.set_task_factory(make_task)
    worker_loop.spawn(asyncio.sleep(0))
    assert worker_loop.wait_until_idle(10) and [inspect.iscoroutine(found) for found in continued] == [True]


@pytest.mark.parametrize("durable", [True, False])
def test_a_run_receives_the_error_of_its_first_commit(worker_loop: WorkerLoop, durable: bool) -> None:
    errors: list[Exception] = []

    async def run() -> None:
        try:
            await worker_loop.commit(Write(lambda tx: None, durable))
        except DatabaseUnavailable as error:
            errors.append(error)

    worker_loop.spawn(run())
    assert worker_loop.wait_until_idle(10) and len(errors) == 1


@pytest.mark.parametrize("write", [Write(lambda tx: None, durable=False), Write(lambda tx: None, is_urgent=True)])
def test_a_write_that_an_idle_slot_waits_for_is_not_delayed(worker_loop: WorkerLoop, write: Write[None]) -> None:
    delayed: list[Any] = []
    worker_loop._delayed.commit = delayed.append  # type: ignore[assignment,method-assign]
    ended = threading.Event()

    async def run() -> None:
        with suppress(DatabaseUnavailable):
            await worker_loop.commit(write)
        ended.set()

    worker_loop.spawn(run())
    assert ended.wait(10) and not delayed


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_a_run_that_raises_has_ended(worker_loop: WorkerLoop, waits: int) -> None:
    async def run() -> None:
        for _ in range(waits):
            await asyncio.sleep(0)
        raise ValueError

    worker_loop.spawn(run())
    assert worker_loop.wait_until_idle(10)


def test_the_log_context_of_a_run_does_not_change_that_of_another_run(worker_loop: WorkerLoop) -> None:
    contexts: dict[str, Any] = {}

    async def other() -> None:
        logs.bind_context(job_id="other")
        await asyncio.sleep(0)
        contexts["other"] = logs._about.get()

    async def run() -> None:
        logs.bind_context(job_id="one")
        worker_loop.spawn(other())
        contexts["one"] = logs._about.get()

    worker_loop.spawn(run())
    assert worker_loop.wait_until_idle(10) and contexts == {"one": {"job_id": "one"}, "other": {"job_id": "other"}}
