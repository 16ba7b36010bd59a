"""What the loop asks of the record goes there together: at once where nobody is waited for, else by a thread."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from database.db import Write
from foundation import logs
from foundation.errors import RecordUnavailable
from tasks import engine
from tasks.engine import Engine, Together


class Record:
    """Notes what is done, and in which thread."""

    def __init__(self) -> None:
        self.done: list[tuple[str, list[Any]]] = []
        self.is_taken = False  # Others write now.

    def do(self, wanted: list[Any]) -> Sequence[Any]:
        self.done.append((threading.current_thread().name, wanted))
        return [-it for it in wanted]

    def at_once(self, wanted: list[Any]) -> Sequence[Any] | None:
        return None if self.is_taken else self.do(wanted)


@contextmanager
def _together(record: Record, **how: Any) -> Iterator[Callable[[list[int]], list[int]]]:
    """Asks in one turn, and waits for the answers."""
    loop = asyncio.new_event_loop()
    together = Together("record", loop, record.do, **how)

    async def ask(wanted: list[int]) -> list[int]:
        return list(await asyncio.wait_for(asyncio.gather(*map(together.ask, wanted)), 10))

    try:
        yield lambda wanted: loop.run_until_complete(ask(wanted))
    finally:
        together.end()
        loop.close()


@pytest.fixture
def record() -> Record:
    return Record()


def test_what_takes_no_time_is_done_in_the_loop_and_together(record: Record) -> None:
    with _together(record, at_once=record.at_once) as ask:
        assert ask([1, 2, 3]) == [-1, -2, -3]
    assert record.done == [(threading.current_thread().name, [1, 2, 3])]


def test_what_others_would_be_waited_for_is_done_by_the_thread(record: Record) -> None:
    record.is_taken = True
    with _together(record, at_once=record.at_once) as ask:
        assert ask([1, 2]) == [-1, -2]
    assert record.done == [("record", [1, 2])]


def test_so_much_that_the_loop_would_stand_still_is_done_by_the_thread(record: Record) -> None:
    many = list(range(engine._MOST_AT_ONCE + 1))
    with _together(record, at_once=record.at_once) as ask:
        ask(many)
    assert record.done == [("record", many)]


def test_what_was_done_in_the_loop_is_answered_when_the_thread_has_secured_it(record: Record) -> None:
    def secured(wanted: list[Any], answers: list[Any]) -> list[Any]:
        record.done.append((threading.current_thread().name, wanted))
        return [str(it) for it in answers]

    here = threading.current_thread().name
    with _together(record, at_once=record.at_once, secured=secured) as ask:
        assert ask([1, 2]) == ["-1", "-2"]
        record.is_taken = True
        assert ask([3]) == [-3], "what a thread has done is secured by it"
    assert record.done == [(here, [1, 2]), ("record", [1, 2]), ("record", [3])]


def test_who_asked_hears_that_what_was_done_could_not_be_secured(record: Record) -> None:
    def secured(wanted: list[Any], answers: list[Any]) -> list[Any]:
        raise RecordUnavailable("away")

    with _together(record, at_once=record.at_once, secured=secured) as ask, pytest.raises(RecordUnavailable):
        ask([1, 2])


def test_what_need_not_be_at_once_waits_for_more_of_its_kind(record: Record) -> None:
    with _together(record, behind_s=0.05) as ask:
        ask([1, 2])
    assert record.done == [("record", [1, 2])]


# -- lives ------------------------------------------------------------------------------------------------------


def _not_stored(writes: Sequence[Any]) -> Sequence[Any]:
    return [RecordUnavailable("away") for _ in writes]


@pytest.fixture
def lived() -> Iterator[Engine]:
    """An engine with a record that stores nothing, whether it is asked at once or by a thread."""

    async def close() -> None:
        pass

    record: Any = SimpleNamespace(do_all=_not_stored, do_at_once=_not_stored, secured=lambda _, answers: answers)
    room: Any = SimpleNamespace(pipeline=lambda loop: SimpleNamespace(close=close))
    found = Engine(record, room)
    yield found
    found.close()


def test_what_a_run_asks_for_first_is_asked_for_in_the_turn_that_brought_it(lived: Engine) -> None:
    said: list[str] = []

    async def next_run() -> None:
        said.append("asked")
        await asyncio.sleep(0)
        said.append("ended")

    async def run() -> None:
        lived.live(next_run())
        said.append("went on")

    lived.live(run())
    assert lived.wait(10) and said == ["asked", "went on", "ended"]


def test_a_run_goes_on_as_a_coroutine_for_later_pythons_take_no_generator_for_a_task(lived: Engine) -> None:
    seen: list[Any] = []

    def make(loop: asyncio.AbstractEventLoop, life: Any, **how: Any) -> asyncio.Task[Any]:
        seen.append(life)
        return asyncio.Task(life, loop=loop, **how)

    lived.loop.set_task_factory(make)
    lived.live(asyncio.sleep(0))
    assert lived.wait(10) and [inspect.iscoroutine(it) for it in seen] == [True]


@pytest.mark.parametrize("relaxed", [True, False])
def test_a_run_hears_itself_that_what_it_asked_for_first_was_not_done(lived: Engine, relaxed: bool) -> None:
    heard: list[Exception] = []

    async def run() -> None:
        try:
            await lived.store(Write(lambda tx: None, relaxed))
        except RecordUnavailable as error:
            heard.append(error)

    lived.live(run())
    assert lived.wait(10) and len(heard) == 1


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_a_run_that_fails_is_over(lived: Engine, waits: int) -> None:
    async def run() -> None:
        for _ in range(waits):
            await asyncio.sleep(0)
        raise ValueError

    lived.live(run())
    assert lived.wait(10)


def test_a_run_says_of_its_lines_what_they_are_about_and_not_of_others(lived: Engine) -> None:
    told: dict[str, Any] = {}

    async def other() -> None:
        logs.about(job_id="other")
        await asyncio.sleep(0)
        told["other"] = logs._about.get()

    async def run() -> None:
        logs.about(job_id="one")
        lived.live(other())
        told["one"] = logs._about.get()

    lived.live(run())
    assert lived.wait(10) and told == {"one": {"job_id": "one"}, "other": {"job_id": "other"}}
