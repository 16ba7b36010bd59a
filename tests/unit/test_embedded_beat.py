"""Beat as a thread of the worker that does what it says."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import beat as celerys
from celery.schedules import crontab
from celery.worker import state

from tasks import embedded_beat
from tasks.beat import every
from tasks.celery_app import celery
from tasks.embedded_beat import Beat, EmbeddedBeat, Here, Threads

ENTRY: Any = SimpleNamespace(name="check", task="maintenance.check_servers", args=(False,))
SOON_S = 10.0
AT_ONCE_S = 0.1


@pytest.fixture
def threads() -> Threads:
    return Threads()


@pytest.fixture
def scheduler(threads: Threads) -> Here:
    return Here(threads, celery, lazy=True)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An entry whose task does not end before the test; `.begun` is released each time when it begins."""
    begun, ends = threading.Semaphore(0), threading.Event()
    monkeypatch.setitem(celery.tasks, "maintenance.hangs", lambda: (begun.release(), ends.wait()))
    yield SimpleNamespace(name="hangs", task="maintenance.hangs", args=(), begun=begun)
    ends.set()


@pytest.fixture
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_beat, "_ENDS_S", AT_ONCE_S)


def _ends(act: Any) -> bool:
    """Whether this returns; it would hold up all the other tests if it did not."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(SOON_S)
    return not thread.is_alive()


@pytest.fixture(autouse=True)
def nobody_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "should_stop", None)


def test_what_is_due_is_done_here_and_no_message_is_sent(monkeypatch, scheduler, threads) -> None:
    called: list[object] = []
    monkeypatch.setitem(celery.tasks, ENTRY.task, called.append)
    monkeypatch.setattr(Here, "apply_async", lambda *_, **__: pytest.fail("a message"))
    scheduler.apply_entry(ENTRY, producer=scheduler.producer)
    assert threads.wait(SOON_S)
    assert called == [False]


def test_a_task_that_fails_or_takes_long_holds_up_no_other(monkeypatch, scheduler, threads) -> None:
    done, passed = threading.Event(), []
    acts = [lambda _: passed.append(done.wait(5)), lambda _: 1 / 0, lambda _: done.set()]
    for number, act in enumerate(acts):
        monkeypatch.setitem(celery.tasks, f"maintenance.{number}", act)
        scheduler.apply_entry(SimpleNamespace(name=str(number), task=f"maintenance.{number}", args=(None,)))
    assert done.wait(5)
    assert threads.wait(SOON_S)
    assert passed == [True]


def _all_due(scheduler: Here, *entries: tuple[str, float]) -> None:
    """These alone are scheduled, by task and interval, and the time of each has come."""
    made = [scheduler.Entry(name, f"maintenance.{name}", schedule=every(s), app=celery) for name, s in entries]
    scheduler.schedule = {entry.name: entry for entry in made}
    scheduler._began -= max(s for _, s in entries)


def test_what_is_due_together_is_done_together_what_is_done_most_often_first(monkeypatch, scheduler, threads) -> None:
    done: list[tuple[str, int | None]] = []
    for name in ("rare", "often"):
        note = lambda name=name: done.append((name, threading.get_ident()))  # noqa: E731
        monkeypatch.setitem(celery.tasks, f"maintenance.{name}", note)
    _all_due(scheduler, ("rare", 60), ("often", 0.5))
    scheduler.tick()
    assert threads.wait(SOON_S)
    assert [name for name, _ in done] == ["often", "rare"]
    assert len({thread for _, thread in done}) == 1, "one thread is woken for them"


def test_what_was_missed_while_nobody_was_there_is_done_when_beat_begins_a_sweep_first(monkeypatch, threads) -> None:
    begun: list[str] = []
    swept = threading.Event()
    scheduler = Here(threads, celery)
    for entry in scheduler.schedule.values():
        monkeypatch.setitem(celery.tasks, entry.task, lambda *_, name=entry.name: begun.append(name))
    monkeypatch.setitem(celery.tasks, "maintenance.sweep", lambda: (begun.append("sweep"), swept.wait(SOON_S)))
    scheduler._began += 60  # The time of none of them has come.
    scheduler.tick()
    assert not threads.wait(AT_ONCE_S)
    assert begun == ["sweep"], "however long it takes"
    swept.set()
    assert threads.wait(SOON_S)
    assert begun == ["sweep", "reap-killed", "reap", "keep-time"]
    scheduler.tick()
    assert threads.wait(SOON_S)
    assert len(begun) == 4, "and once"


def test_what_is_due_with_a_task_that_hangs_is_done_beside_it(monkeypatch, scheduler, hung) -> None:
    done = threading.Event()
    monkeypatch.setitem(celery.tasks, "maintenance.after", done.set)
    _all_due(scheduler, (hung.name, 0.5), ("after", 1))
    scheduler.tick()
    assert done.wait(SOON_S)


def test_what_was_missed_is_done_once_and_then_at_its_time_again(monkeypatch, scheduler, threads) -> None:
    done: list[bool] = []
    monkeypatch.setitem(celery.tasks, "maintenance.one", lambda: done.append(True))
    _all_due(scheduler, ("one", 100))
    scheduler._began -= 350
    assert [scheduler.tick() for _ in range(3)] == [scheduler.max_interval] * 3
    assert threads.wait(SOON_S)
    assert done == [True]
    scheduler._began -= 50
    scheduler.tick()
    assert threads.wait(SOON_S)
    assert done == [True, True]


def test_an_entry_by_the_time_of_day_is_begun_when_it_is_due(monkeypatch, scheduler, threads) -> None:
    """Celery adds one for a backend of results that does not forget by itself."""
    done: list[bool] = []
    monkeypatch.setitem(celery.tasks, "maintenance.nightly", lambda: done.append(True))
    long_ago = datetime.now(UTC) - timedelta(days=1)
    nightly = scheduler.Entry(
        "nightly", "maintenance.nightly", schedule=crontab("0", "4"), app=celery, last_run_at=long_ago
    )
    scheduler.schedule = {"nightly": nightly}
    for _ in range(2):
        scheduler.tick()
        assert threads.wait(SOON_S)
    assert done == [True]


def test_an_entry_that_hangs_takes_one_thread_however_often_it_is_due(scheduler, threads, hung) -> None:
    for _ in range(3):
        scheduler.apply_entry(hung)
    assert hung.begun.acquire(timeout=SOON_S)
    assert not hung.begun.acquire(timeout=AT_ONCE_S)
    assert threads.lasting() == ["hangs"]


def test_an_entry_is_begun_again_after_its_end(monkeypatch, scheduler, threads) -> None:
    called: list[object] = []
    monkeypatch.setitem(celery.tasks, ENTRY.task, called.append)
    for _ in range(2):
        scheduler.apply_entry(ENTRY)
        assert threads.wait(SOON_S)
    assert called == [False, False]


def test_a_worker_whose_beat_has_ended_ends(monkeypatch) -> None:
    monkeypatch.setattr(celerys.Service, "start", lambda _: 1 / 0)
    Beat().run()
    assert state.should_stop == 1


def test_a_beat_that_is_told_to_stop_is_no_failure(monkeypatch) -> None:
    monkeypatch.setattr(Here, "tick", lambda self: 0.01)
    it = Beat()
    it.start()
    it.stop()
    it.join(10)
    assert not it.is_alive() and state.should_stop is None


def test_a_beat_that_fails_before_its_first_tick_ends_the_worker_and_lets_it_stop(monkeypatch) -> None:
    monkeypatch.setattr(Here, "setup_schedule", lambda _: 1 / 0)
    it = Beat()
    it.start()
    it.join(SOON_S)
    assert state.should_stop == 1
    assert _ends(it.stop)


def test_a_beat_that_never_was_begun_lets_the_worker_stop() -> None:
    assert _ends(Beat().stop)


def test_a_beat_that_fails_while_a_task_hangs_ends_the_worker_before_it_waits_for_that(
    monkeypatch, hung, ends_at_once
) -> None:
    def tick(self: Here) -> float:
        self.apply_entry(hung)
        assert hung.begun.acquire(timeout=SOON_S)
        raise ZeroDivisionError

    monkeypatch.setattr(Here, "tick", tick)
    it = Beat()
    it.start()
    it.join(SOON_S)
    assert state.should_stop == 1
    assert _ends(it.stop)


def test_a_beat_whose_task_or_tick_hangs_stops_in_a_bounded_time(monkeypatch, hung, ends_at_once) -> None:
    def tick(self: Here) -> float:
        self.apply_entry(hung)
        celery.tasks[hung.task]()
        return 0.01

    monkeypatch.setattr(Here, "tick", tick)
    it = Beat()
    it.start()
    for _ in range(2):
        assert hung.begun.acquire(timeout=SOON_S)
    assert _ends(it.stop)
    assert state.should_stop is None


def test_a_beat_that_stops_gives_what_has_begun_time_to_end(monkeypatch, hung, ends_at_once) -> None:
    monkeypatch.setattr(Here, "tick", lambda self: self.apply_entry(hung) or 0.01)
    it = Beat()
    it.start()
    assert hung.begun.acquire(timeout=SOON_S)
    began = time.monotonic()
    it.stop()
    assert time.monotonic() - began >= AT_ONCE_S


def test_a_task_that_hangs_does_not_keep_the_process_from_its_exit() -> None:
    hangs = (
        "import threading; from tasks.embedded_beat import Threads; Threads().begin({'one': threading.Event().wait})"
    )
    subprocess.run([sys.executable, "-c", hangs], timeout=60, check=True)


def test_every_entry_runs_once_at_a_time_also_when_it_comes_by_a_message() -> None:
    """By the restraint of maintenance, which makes its tasks."""
    celery.loader.import_default_modules()
    tasks = {entry["task"] for entry in celery.conf.beat_schedule.values()}
    assert {celery.tasks[task].run.__module__ for task in tasks} == {"tasks.maintenance"}


def test_a_worker_is_beat_only_if_it_is_asked_to_be() -> None:
    assert [EmbeddedBeat(None, embedded_beat=asked).enabled for asked in (False, True)] == [False, True]
    assert "--embedded-beat" in [name for option in celery.user_options["worker"] for name in option.opts]


def test_beat_does_not_look_at_its_clock_until_something_is_due(monkeypatch, scheduler) -> None:
    """Neither before it is due nor of its own accord: each tick either begins something or is followed by a sleep."""
    scheduler.schedule = {"one": scheduler.Entry("one", "maintenance.reap", schedule=every(60), app=celery)}
    scheduler.tick()
    assert scheduler.tick() == scheduler.max_interval
    assert scheduler.adjust(0.004) == 0.004
