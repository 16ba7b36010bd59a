"""Flower sees all events that it is sent, and finds every task by what it last heard of it."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flower import app, events
from flower.options import default_options  # noqa: F401  Flower's options must be there when it counts.
from prometheus_client import generate_latest

from cli import flowers_events
from cli.flowers_events import _AT_ONCE, BundledEvents, Timeline


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(events, "TaskSearchEngine", events.TaskSearchEngine)
    monkeypatch.setattr(app, "Events", app.Events)
    flowers_events.lighten()
    turns: deque[Callable[[], None]] = deque()
    io_loop = SimpleNamespace(add_callback=turns.append, turns=turns)
    yield BundledEvents(None, io_loop, max_tasks_in_memory=1_000)


def _run(flower: Any) -> int:
    """The loop, until it has nothing to do; answers how often it was woken."""
    woken = 0
    while flower.io_loop.turns:
        flower.io_loop.turns.popleft()()
        woken += 1
    return woken


def _event(kind: str, uuid: str, **fields: Any) -> dict[str, Any]:
    now = time.time()
    at = {"timestamp": now, "local_received": now, "clock": 1, "utcoffset": 0, "pid": 1}
    return {"type": f"task-{kind}", "uuid": uuid, "hostname": "worker@host", **at, **fields}


def _found(flower: Any, **wanted: Any) -> list[str]:
    return sorted(flower.state.search_engine.search(flower.state.tasks, **wanted).task_ids)


def test_a_task_is_found_by_what_was_last_heard_of_it(flower: Any) -> None:
    for uuid in ("one", "two"):
        flower.on_event(_event("received", uuid, name="infer", args="('zimg',)", kwargs="{}"))
    _run(flower)
    assert _found(flower, state="RECEIVED") == ["one", "two"]
    flower.on_event(_event("succeeded", "one", result="'a cat'", runtime=0.1))
    _run(flower)
    assert _found(flower, state="SUCCESS") == ["one"] and _found(flower, state="RECEIVED") == ["two"]
    assert _found(flower, query="cat") == ["one"] and sorted(_found(flower)) == ["one", "two"]


def test_a_task_that_flower_has_dropped_is_not_found(flower: Any) -> None:
    flower.state.tasks.limit = 1
    for uuid in ("one", "two"):
        flower.on_event(_event("received", uuid, name="infer"))
    _run(flower)
    assert _found(flower) == ["two"] and len(flower.state.search_engine.documents) == 1


def test_events_that_come_together_wake_flower_once(flower: Any) -> None:
    for n in range(_AT_ONCE):
        flower.on_event(_event("received", str(n), name="infer"))
    assert _run(flower) == 1 and len(flower.state.tasks) == _AT_ONCE


def test_many_events_leave_flower_time_for_others(flower: Any) -> None:
    for n in range(2 * _AT_ONCE + 1):
        flower.on_event(_event("received", str(n), name="infer"))
    assert _run(flower) == 3 and len(flower.state.tasks) == 2 * _AT_ONCE + 1


def test_an_event_that_cannot_be_understood_costs_no_other(flower: Any) -> None:
    flower.on_event({"type": "task-received"})
    flower.on_event(_event("received", "one", name="infer"))
    with pytest.raises(KeyError):
        flower.io_loop.turns.popleft()()
    _run(flower)
    assert list(flower.state.tasks) == ["one"]


def test_the_oldest_that_was_heard_is_dropped_and_the_order_kept(flower: Any) -> None:
    timeline = flower.state._taskheap
    assert isinstance(timeline, Timeline)
    timeline[:] = range(1_000)
    assert timeline.pop(0) == 0 and timeline == list(range(timeline[0], 1_000)) and 900 < len(timeline) < 999
    left = list(timeline)
    assert timeline.pop() == 999 and timeline == left[:-1]


def test_a_timeline_has_room_for_all_tasks_when_it_is_full(flower: Any) -> None:
    flower.state.max_tasks_in_memory = flower.state.tasks.limit = 100
    for n in range(300):
        for kind in ("received", "started", "succeeded"):
            flower.on_event(_event(kind, str(n), name="infer", clock=n))
    _run(flower)
    assert len(flower.state._taskheap) <= 400
    assert {uuid for uuid, _ in flower.state.tasks_by_time()} >= set(flower.state.tasks)


def _counted(worker: str) -> float:
    found = (it for it in generate_latest().decode().splitlines() if it.startswith("flower_events_total"))
    return sum(float(line.rpartition(" ")[2]) for line in found if worker in line)


def test_events_are_counted_for_each_worker_until_it_is_forgotten(flower: Any) -> None:
    for worker, times in (("first@host", 2), ("second@host", 3)):
        for _ in range(times):
            flower.on_event({**_event("received", "one", name="infer"), "hostname": worker})
    _run(flower)
    assert (_counted("first@host"), _counted("second@host")) == (2, 3)
    assert flower.state.metrics.remove_workers({"first@host"}) == 1 and _counted("first@host") == 0
    flower.on_event({**_event("received", "two", name="infer"), "hostname": "first@host"})
    _run(flower)
    assert (_counted("first@host"), _counted("second@host")) == (1, 3)


def test_flower_is_made_with_these(flower: Any) -> None:
    assert app.Events is BundledEvents and isinstance(flower.state.search_engine, flowers_events.LateIndex)
