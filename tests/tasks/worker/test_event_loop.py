"""What the loop asks of the record goes there together: at once where nobody is waited for, else by a thread."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from slotkeeper import logs
from slotkeeper.db import Write
from slotkeeper.errors import DatabaseUnavailable
from tasks.worker import event_loop
from tasks.worker.event_loop import CommitQueue, WorkerLoop


class Record:
    """A database that returns what each unit returns, and notes what is done, and in which thread."""

    def __init__(self) -> None:
        self.done: list[tuple[str, list[str]]] = []
        self.is_taken = False  # Others write now.
        self.fails: Exception | None = None

    def try_commit_all(self, writes: Sequence[Write[Any]]) -> list[str] | None:
        return None if self.is_taken else self._note(writes)

    def commit_all(self, writes: Sequence[Write[Any]]) -> list[str]:
        results = self._note(writes)
        if self.fails is not None:
            raise self.fails
        return results

    def sync(self) -> None:
        self.done.append((threading.current_thread().name, ["disk"]))
        if self.fails is not None:
            raise self.fails

    def _note(self, writes: Sequence[Write[Any]]) -> list[str]:
        results = [write.unit(None) for write in writes]  # type: ignore[arg-type]
        self.done.append((threading.current_thread().name, results))
        return results


@contextmanager
def _commits(record: Any, delay_s: float = 0.0) -> Iterator[Callable[..., list[str]]]:
    """Asks in one turn, and waits for the answers."""
    loop = asyncio.new_event_loop()
    commits = CommitQueue("record", loop, record, delay_s)

    async def ask(*names: str, durable: bool = False) -> list[str]:
        writes = [Write(lambda tx, name=name: name, durable) for name in names]  # type: ignore[misc]
        return list(await asyncio.wait_for(asyncio.gather(*map(commits.commit, writes)), 10))

    try:
        yield lambda *names, **how: loop.run_until_complete(ask(*names, **how))
    finally:
        commits.end()
        loop.close()


@pytest.fixture
def record() -> Record:
    return Record()


def test_what_takes_no_time_is_done_in_the_loop_and_together(record: Record) -> None:
    with _commits(record) as ask:
        assert ask("a", "b", "c") == ["a", "b", "c"]
    assert record.done == [(threading.current_thread().name, ["a", "b", "c"])]


def test_what_others_would_be_waited_for_is_done_by_the_thread(record: Record) -> None:
    record.is_taken = True
    with _commits(record) as ask:
        assert ask("a", "b") == ["a", "b"]
    assert record.done == [("record", ["a", "b"])]


def test_so_much_that_the_loop_would_stand_still_is_done_by_the_thread(record: Record) -> None:
    many = [str(n) for n in range(event_loop._MAX_WRITES_IN_LOOP + 1)]
    with _commits(record) as ask:
        ask(*many)
    assert record.done == [("record", many)]


def test_what_was_done_in_the_loop_is_answered_when_the_thread_has_secured_it(record: Record) -> None:
    here = threading.current_thread().name
    with _commits(record) as ask:
        assert ask("a", "b", durable=True) == ["a", "b"]
        record.is_taken = True
        assert ask("c", durable=True) == ["c"], "what a thread has done is secured by it"
    assert record.done == [(here, ["a", "b"]), ("record", ["disk"]), ("record", ["c"])]


def test_who_asked_hears_that_what_was_done_could_not_be_secured(record: Record) -> None:
    record.fails = DatabaseUnavailable("away")
    with _commits(record) as ask, pytest.raises(DatabaseUnavailable):
        ask("a", "b", durable=True)


def test_a_write_that_was_asked_for_before_the_end_is_committed(record: Record) -> None:
    """Both reach the thread while it commits an earlier write."""
    record.is_taken, may_go_on = True, threading.Event()
    loop = asyncio.new_event_loop()
    commits = CommitQueue("record", loop, record)  # type: ignore[arg-type]

    def wait(_: Any) -> str:
        may_go_on.wait(10)
        return "first"

    async def commit_both() -> list[str]:
        first = commits.commit(Write(wait, durable=False))
        await asyncio.sleep(0.01)
        second = commits.commit(Write(lambda tx: "second", durable=False))
        await asyncio.sleep(0.01)
        commits.end()
        may_go_on.set()
        return list(await asyncio.wait_for(asyncio.gather(first, second), 10))

    assert loop.run_until_complete(commit_both()) == ["first", "second"]
    loop.close()


def test_what_need_not_be_at_once_waits_for_more_of_its_kind(record: Record) -> None:
    record.is_taken = True
    with _commits(record, delay_s=0.05) as ask:
        ask("a", "b")
    assert record.done == [("record", ["a", "b"])]


# -- lives ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lived() -> Iterator[WorkerLoop]:
    """An engine with a record that stores nothing."""

    async def close() -> None:
        pass

    record: Any = Record()
    record.is_taken, record.fails = True, DatabaseUnavailable("away")
    room: Any = SimpleNamespace(open_pipeline=lambda loop: SimpleNamespace(close=close))
    found = WorkerLoop(record, room)
    yield found
    found.close()


def test_what_a_run_asks_for_first_is_asked_for_in_the_turn_that_brought_it(lived: WorkerLoop) -> None:
    said: list[str] = []

    async def next_run() -> None:
        said.append("asked")
        await asyncio.sleep(0)
        said.append("ended")

    async def run() -> None:
        lived.spawn(next_run())
        said.append("went on")

    lived.spawn(run())
    assert lived.wait_until_idle(10) and said == ["asked", "went on", "ended"]


def test_a_run_goes_on_as_a_coroutine_for_later_pythons_take_no_generator_for_a_task(lived: WorkerLoop) -> None:
    seen: list[Any] = []

    def make(loop: asyncio.AbstractEventLoop, life: Any, **how: Any) -> asyncio.Task[Any]:
        seen.append(life)
        return asyncio.Task(life, loop=loop, **how)

    lived.loop.set_task_factory(make)
    lived.spawn(asyncio.sleep(0))
    assert lived.wait_until_idle(10) and [inspect.iscoroutine(it) for it in seen] == [True]


@pytest.mark.parametrize("durable", [True, False])
def test_a_run_hears_itself_that_what_it_asked_for_first_was_not_done(lived: WorkerLoop, durable: bool) -> None:
    heard: list[Exception] = []

    async def run() -> None:
        try:
            await lived.commit(Write(lambda tx: None, durable))
        except DatabaseUnavailable as error:
            heard.append(error)

    lived.spawn(run())
    assert lived.wait_until_idle(10) and len(heard) == 1


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_a_run_that_fails_is_over(lived: WorkerLoop, waits: int) -> None:
    async def run() -> None:
        for _ in range(waits):
            await asyncio.sleep(0)
        raise ValueError

    lived.spawn(run())
    assert lived.wait_until_idle(10)


def test_a_run_says_of_its_lines_what_they_are_about_and_not_of_others(lived: WorkerLoop) -> None:
    told: dict[str, Any] = {}

    async def other() -> None:
        logs.bind_context(job_id="other")
        await asyncio.sleep(0)
        told["other"] = logs._about.get()

    async def run() -> None:
        logs.bind_context(job_id="one")
        lived.spawn(other())
        told["one"] = logs._about.get()

    lived.spawn(run())
    assert lived.wait_until_idle(10) and told == {"one": {"job_id": "one"}, "other": {"job_id": "other"}}
