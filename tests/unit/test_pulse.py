"""What does not come round any more is noticed; what was only halted, or has nothing to do, is not taken for it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import RedisError

from database.db import Batch, Write
from routing.leases import Lease
from tasks import pulse
from tasks.aside import Aside
from tasks.pulse import Pulse, Watched
from tasks.worker.engine import Commits, _Turn
from tasks.worker.heartbeat import Heartbeat
from tasks.worker.poller import Poller
from tests.support.builders import eventually


class Halt(BaseException):
    """Nobody foresees it."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_STOPPED_S", 0.0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


def _is_found_stopped(watched: Watched) -> bool:
    return any(watched.has_stopped() for _ in range(2 * pulse._STOPPED_LOOKS))


def test_what_comes_round_has_not_stopped_however_often_it_is_looked_at() -> None:
    found: list[Pulse] = []
    found.append(Pulse("one", wake=lambda: found[0].beat()))
    assert not _is_found_stopped(found[0])


def test_what_does_not_come_round_has_stopped_after_a_time_and_as_many_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Pulse("one")
    assert not any(it.has_stopped() for _ in range(pulse._STOPPED_LOOKS)), "the process may have been halted"
    monkeypatch.setattr(pulse, "_STOPPED_S", 60.0)
    assert not it.has_stopped(), "looks may follow each other fast"
    monkeypatch.setattr(pulse, "_STOPPED_S", 0.0)
    assert it.has_stopped()


@pytest.fixture
def commits() -> Iterator[Callable[[Callable[[Any], Any]], Commits]]:
    loop, made = asyncio.new_event_loop(), []

    def make(complete: Callable[[Any], Any]) -> Commits:
        database: Any = SimpleNamespace(try_commit=lambda batch: None, complete=complete)
        made.append(Commits("record", loop, database))
        return made[-1]

    yield make
    for it in made:
        it.end()
    loop.close()


def test_a_thread_of_the_record_that_has_nothing_to_do_has_not_stopped(commits: Any) -> None:
    it = commits(lambda batches: None)
    for _ in range(2 * pulse._STOPPED_LOOKS):
        assert not it.pulse.has_stopped()
        eventually(lambda: it.pulse._looks <= 1)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_thread_of_the_record_that_dies_or_hangs_is_found(commits: Any, how: str) -> None:
    go_on, at_it = threading.Event(), threading.Event()

    def complete(_: Any) -> None:
        at_it.set()
        if how == "dies":
            raise Halt
        go_on.wait(60)

    it = commits(complete)
    it._turns.put(_Turn(Batch([Write(lambda tx: None)]), []))
    assert at_it.wait(10)
    assert _is_found_stopped(it.pulse)
    go_on.set()


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_work_aside_that_dies_or_hangs_is_found_and_none_at_all_is_well(how: str) -> None:
    go_on, at_it = threading.Event(), threading.Event()

    def act() -> None:
        at_it.set()
        if how == "dies":
            raise Halt
        go_on.wait(60)

    it = Aside("chores", act)
    assert not _is_found_stopped(it), "nothing is asked for"
    it.ask()
    assert at_it.wait(10)
    assert _is_found_stopped(it)
    go_on.set()


def test_work_aside_that_is_done_has_not_stopped() -> None:
    it = Aside("chores", lambda: None)
    it.ask()
    eventually(lambda: not it._at_it)
    assert not _is_found_stopped(it)


def test_who_asks_for_work_aside_before_it_begins_is_served_together_with_others() -> None:
    done: list[str] = []
    it = Aside("promises", lambda: done.append("all"), pause_s=0.2)
    for _ in range(3):
        it.ask()
    eventually(lambda: not it._at_it)
    assert done == ["all"]


class _Dies:
    """Whatever is asked of it ends the thread that asks."""

    def __getattr__(self, name: str) -> Any:
        raise Halt


def test_a_poller_that_has_died_is_found_unless_it_was_told_to_end() -> None:
    poller = Poller(_Dies(), _Dies(), "w", lambda: 1, lambda offer: None)  # type: ignore[arg-type]
    assert not _is_found_stopped(poller), "it has not begun"
    poller.start()
    eventually(lambda: "poller" not in {thread.name for thread in threading.enumerate()})
    assert _is_found_stopped(poller)
    poller._ended.set()
    assert not _is_found_stopped(poller)


def test_a_poller_that_takes_very_many_jobs_in_one_look_is_not_taken_for_a_dead_one() -> None:
    """Each costs a round trip: with two thousand places, and a Redis in another city, that takes minutes."""
    places = list(range(2 * pulse._STOPPED_LOOKS))
    dispatcher = SimpleNamespace(queues=SimpleNamespace(offer=lambda *_, **__: ["an offer"]))
    found: list[bool] = []

    def begin(_: Any, asked_s: float) -> None:
        places.pop()
        found.append(poller.has_stopped())

    poller = Poller(dispatcher, _Dies(), "w", lambda: len(places), begin)  # type: ignore[arg-type]
    poller._began = True
    assert poller._take("zimg") == len(found) == 2 * pulse._STOPPED_LOOKS
    assert not any(found)


def test_a_heartbeat_that_has_died_is_found_unless_it_was_told_to_end() -> None:
    heart = Heartbeat(_Dies(), "w", every_ms=1, doubt=lambda holds: None)  # type: ignore[arg-type]
    heart.add(Lease("zimg", "one", "l", "w", "gpu-slot0"))
    heart.start()
    heart._thread.join(10)
    assert _is_found_stopped(heart)
    heart.end()
    assert not _is_found_stopped(heart)


def test_a_heartbeat_that_waits_for_a_silent_redis_fleet_by_fleet_has_not_stopped() -> None:
    class Silent:
        def renew(self, *_: Any) -> list[Any]:
            found.append(any(heart.has_stopped() for _ in range(pulse._STOPPED_LOOKS)))
            raise RedisError

    found: list[bool] = []
    heart = Heartbeat(Silent(), "w", every_ms=1, doubt=lambda holds: None)  # type: ignore[arg-type]
    for fleet in "abc":
        heart.add(Lease(fleet, "one", "l", "w", "gpu-slot0"))
    heart.beat()
    assert found == [False] * 3
