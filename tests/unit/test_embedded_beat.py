"""Beat as a thread of the worker that does what it says."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from celery import beat as celerys
from celery.worker import state

from tasks.beat import every
from tasks.celery_app import celery
from tasks.embedded_beat import Beat, EmbeddedBeat, Here

ENTRY: Any = SimpleNamespace(task="maintenance.check_servers", args=(False,))


@pytest.fixture
def scheduler():
    it = Here(celery, lazy=True)
    yield it
    it.close()


@pytest.fixture(autouse=True)
def nobody_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "should_stop", None)


def test_what_is_due_is_done_here_and_no_message_is_sent(monkeypatch, scheduler) -> None:
    called: list[object] = []
    monkeypatch.setitem(celery.tasks, ENTRY.task, called.append)
    monkeypatch.setattr(Here, "apply_async", lambda *_, **__: pytest.fail("a message"))
    scheduler.apply_entry(ENTRY, producer=scheduler.producer)
    scheduler._threads.shutdown()
    assert called == [False]


def test_a_task_that_fails_or_takes_long_holds_up_no_other(monkeypatch, scheduler) -> None:
    done, passed = threading.Event(), []
    acts = [lambda _: passed.append(done.wait(5)), lambda _: 1 / 0, lambda _: done.set()]
    for number, act in enumerate(acts):
        monkeypatch.setitem(celery.tasks, f"maintenance.{number}", act)
        scheduler.apply_entry(SimpleNamespace(task=f"maintenance.{number}", args=(None,)))
    assert done.wait(5)
    scheduler._threads.shutdown()
    assert passed == [True]


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


def test_a_worker_is_beat_only_if_it_is_asked_to_be() -> None:
    assert [EmbeddedBeat(None, embedded_beat=asked).enabled for asked in (False, True)] == [False, True]
    assert "--embedded-beat" in [name for option in celery.user_options["worker"] for name in option.opts]


def test_beat_does_not_look_at_its_clock_until_something_is_due(monkeypatch, scheduler) -> None:
    """Neither before it is due nor of its own accord: each tick either begins something or is followed by a sleep."""
    scheduler.schedule = {"one": scheduler.Entry("one", "maintenance.reap", schedule=every(60), app=celery)}
    scheduler.tick()
    assert scheduler.tick() == scheduler.max_interval
    assert scheduler.adjust(0.004) == 0.004
