"""The schedule of beat, the tasks that it sends, and beat as a thread of a worker."""

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import beat as celery_beat
from celery.worker import state

from routing.maintenance import task_runs
from slotkeeper.clock import clock
from tasks import beat, maintenance
from tasks.beat import AlignedSchedule
from tasks.celery_app import celery
from tasks.extensions.bootsteps import BeatThread, EmbeddedBeatStep
from tasks.periods import PERIODS_S


class FakeService:
    """Stands for Celery's beat service: `start` returns at once, or raises an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.stopped = error, False

    def start(self) -> None:
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture(autouse=True)
def _running_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "should_stop", None)


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets beat's clock, in seconds after its start."""

    def set_clock(seconds: float) -> None:
        monkeypatch.setattr(beat.time, "monotonic", lambda: beat._STARTED_AT + seconds)

    return set_clock


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list to which each message of beat adds the names of its tasks."""
    messages: list[list[str]] = []
    monkeypatch.setattr(
        celery_beat.Scheduler, "apply_entry", lambda _, entry, producer=None: messages.append(list(entry.args[0]))
    )
    monkeypatch.setattr(beat.Scheduler, "producer", None)
    monkeypatch.setattr(beat.Scheduler, "_count_queued", lambda self: 0)
    return messages


@pytest.fixture
def scheduler(set_clock: Any) -> beat.Scheduler:
    set_clock(0.25)
    return beat.Scheduler(celery)


def test_beat_sends_all_tasks_at_its_start_and_each_at_the_multiples_of_its_period(
    set_clock: Any, scheduler: beat.Scheduler, sent: list[list[str]]
) -> None:
    assert scheduler.tick() == pytest.approx(0.25)
    (first,) = sent
    assert sorted(first) == sorted(PERIODS_S)
    for now_s, due in ((0.51, {0.5}), (1.02, {0.5, 1.0}), (1.51, {0.5}), (2.01, {0.5, 1.0, 2.0})):
        sent.clear()
        set_clock(now_s)
        assert scheduler.tick() == pytest.approx(0.5 - now_s % 0.5)
        (names,) = sent
        assert sorted(names) == sorted(name for name, period_s in PERIODS_S.items() if period_s in due)
        assert [PERIODS_S[name] for name in names] == sorted(PERIODS_S[name] for name in names)


def test_beat_sends_nothing_to_a_queue_that_no_worker_consumes(
    set_clock: Any, scheduler: beat.Scheduler, sent: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for now_s, queued in ((0.5, 0), (40.0, beat._MAX_QUEUED + 1), (80.0, 0)):
        monkeypatch.setattr(beat.Scheduler, "_count_queued", lambda self, queued=queued: queued)
        set_clock(now_s)
        scheduler.tick()
    assert len(sent) == 2


def test_beat_sends_again_within_seconds_when_its_queue_is_consumed_again(
    set_clock: Any, scheduler: beat.Scheduler, sent: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then no lease of a dead worker is reaped, and no delayed job is queued."""
    for now_s, queued in ((40.0, beat._MAX_QUEUED + 1), (41.5, 0)):
        monkeypatch.setattr(beat.Scheduler, "_count_queued", lambda self, queued=queued: queued)
        set_clock(now_s)
        scheduler.tick()
    assert len(sent) == 1


def test_beat_sends_tasks_that_are_not_maintenance_as_celery_does(
    set_clock: Any, scheduler: beat.Scheduler, sent: Any
) -> None:
    """Celery adds such a task for a backend that does not expire results."""
    scheduler.schedule = {}
    scheduler.add(name="cleans", task="celery.backend_cleanup", schedule=AlignedSchedule(1), args=("cleans",))
    set_clock(5.0)
    scheduler.tick()
    assert sent == [["c", "l", "e", "a", "n", "s"]]


def test_a_task_that_missed_several_periods_is_sent_once(set_clock: Any) -> None:
    set_clock(0.0)
    schedule = AlignedSchedule(2)
    last = schedule.now()
    set_clock(100.5)
    assert schedule.is_due(last) == (True, 1.5)
    assert schedule.is_due(schedule.now()) == (False, 1.5)


def test_beat_measures_time_by_a_monotonic_clock(set_clock: Any) -> None:
    set_clock(0.0)
    schedule = AlignedSchedule(2)
    started = schedule.now()
    set_clock(2.0)
    assert schedule.is_due(started).is_due and schedule.now() - started == timedelta(seconds=2)


def test_the_schedule_names_exactly_the_tasks_of_maintenance() -> None:
    assert maintenance._periodic.keys() == PERIODS_S.keys()
    assert {entry["task"] for entry in celery.conf.beat_schedule.values()} == {maintenance.run.name}


def test_a_failed_or_unknown_task_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(task_runs.TaskRunRecorder, "note", lambda *_: None)
    for name, function in (("fails", lambda: 1 / 0), ("works", lambda: done.append("works"))):
        monkeypatch.setitem(PERIODS_S, name, 60.0)
        monkeypatch.setitem(maintenance._periodic, name, maintenance.PeriodicTask(name, function))
    maintenance.run(["fails", "of another release", "works"])
    assert done == ["works"]


def test_a_task_uses_one_clock_offset_for_its_writes_if_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets: list[int | None] = []

    def set_host_clock() -> None:
        clock.offset_ms = 7_200_000
        offsets.append(clock.get_offset_of_writes())

    monkeypatch.setattr(task_runs.TaskRunRecorder, "note", lambda *_: None)
    monkeypatch.setitem(PERIODS_S, "checks", 60.0)
    clock.offset_ms = 0
    maintenance.PeriodicTask("checks", set_host_clock)()
    assert offsets == [0] and clock.get_offset_of_writes() == 7_200_000


def test_a_task_that_takes_long_is_skipped_and_delays_only_the_tasks_of_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, started, done = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(task_runs.TaskRunRecorder, "note", lambda *_: None)
    monkeypatch.setattr(maintenance, "_MIN_PERIOD_SHARE", 0.0)
    for name, function in (("slow", lambda: (started.set(), may_end.wait(10))), ("next", done.set)):
        monkeypatch.setitem(PERIODS_S, name, 0.5)
        monkeypatch.setitem(maintenance._periodic, name, maintenance.PeriodicTask(name, function))
    thread = threading.Thread(target=maintenance.run, args=(["slow", "next"],))
    thread.start()
    assert started.wait(10) and not done.is_set()
    maintenance.run(["slow", "next"])
    assert done.is_set()
    may_end.set()
    thread.join()


def test_a_worker_ends_with_status_1_if_its_beat_thread_fails() -> None:
    BeatThread(FakeService(ZeroDivisionError())).run()  # type: ignore[arg-type]
    assert state.should_stop == 1


def test_stopping_the_beat_thread_does_not_end_the_worker() -> None:
    service = FakeService()
    thread = BeatThread(service)  # type: ignore[arg-type]
    thread.stop()
    thread.run()
    assert service.stopped and state.should_stop is None


def test_a_worker_runs_beat_only_with_the_option_embedded_beat() -> None:
    assert [EmbeddedBeatStep(None, embedded_beat=given).enabled for given in (False, True)] == [False, True]
    thread = EmbeddedBeatStep(None, embedded_beat=True).create(SimpleNamespace(app=celery))
    assert isinstance(thread._service.get_scheduler(lazy=True), beat.Scheduler)
    assert "--embedded-beat" in [name for option in celery.user_options["worker"] for name in option.opts]
