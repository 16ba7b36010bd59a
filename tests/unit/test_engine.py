"""What the loop asks of the record goes there together: at once where nobody is waited for, else by a thread."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tasks import engine
from tasks.engine import Together


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


def test_what_need_not_be_at_once_waits_for_more_of_its_kind(record: Record) -> None:
    with _together(record, behind_s=0.05) as ask:
        ask([1, 2])
    assert record.done == [("record", [1, 2])]
