"""Beat's schedule, and beat as a thread of the worker of maintenance."""

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import beat as celerys
from celery.worker import state

from routing.maintenance import task_runs
from slotkeeper.clock import clock
from tasks import beat, maintenance
from tasks.beat import PERIODS_S, AlignedSchedule
from tasks.celery_app import celery
from tasks.extensions.bootsteps import BeatThread, EmbeddedBeatStep


class FakeService:
    """Stands for Celery's service: ends when it is told to, or by an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.stopped = error, False

    def start(self) -> None:
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture(autouse=True)
def nobody_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "should_stop", None)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets beat's clock to so many seconds after its start."""

    def set_(seconds: float) -> None:
        monkeypatch.setattr(beat.time, "monotonic", lambda: beat._STARTED_AT + seconds)

    return set_


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of tasks in each message that beat has sent."""
    found: list[list[str]] = []
    monkeypatch.setattr(
        celerys.Scheduler, "apply_entry", lambda _, entry, producer=None: found.append(list(entry.args[0]))
    )
    monkeypatch.setattr(beat.Scheduler, "producer", None)
    monkeypatch.setattr(beat.Scheduler, "_count_queued", lambda self: 0)
    return found


@pytest.fixture
def scheduler(at: Any) -> beat.Scheduler:
    at(0.25)
    return beat.Scheduler(celery)


def test_beat_sends_all_when_it_begins_and_each_task_at_the_multiples_of_its_period(
    at: Any, scheduler: beat.Scheduler, sent: list[list[str]]
) -> None:
    assert scheduler.tick() == pytest.approx(0.25)
    (first,) = sent
    assert sorted(first) == sorted(PERIODS_S)
    for now_s, due in ((0.51, {0.5}), (1.02, {0.5, 1.0}), (1.51, {0.5}), (2.01, {0.5, 1.0, 2.0})):
        sent.clear()
        at(now_s)
        assert scheduler.tick() == pytest.approx(0.5 - now_s % 0.5)
        (names,) = sent
        assert sorted(names) == sorted(name for name, every_s in PERIODS_S.items() if every_s in due)
        assert [PERIODS_S[name] for name in names] == sorted(PERIODS_S[name] for name in names)


def test_beat_adds_nothing_to_a_queue_that_no_worker_reads(
    at: Any, scheduler: beat.Scheduler, sent: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for now_s, queued in ((0.5, 0), (40.0, beat._MAX_QUEUED + 1), (80.0, 0)):
        monkeypatch.setattr(beat.Scheduler, "_count_queued", lambda self, queued=queued: queued)
        at(now_s)
        scheduler.tick()
    assert len(sent) == 2


def test_beat_goes_on_soon_after_its_queue_is_read_again(
    at: Any, scheduler: beat.Scheduler, sent: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile no lease of a dead worker is taken back and no delayed job is queued."""
    for now_s, queued in ((40.0, beat._MAX_QUEUED + 1), (41.5, 0)):
        monkeypatch.setattr(beat.Scheduler, "_count_queued", lambda self, queued=queued: queued)
        at(now_s)
        scheduler.tick()
    assert len(sent) == 1


def test_beat_sends_what_is_not_maintenances_as_celery_does(at: Any, scheduler: beat.Scheduler, sent: Any) -> None:
    """Celery adds a task for a backend that keeps results for ever."""
    scheduler.schedule = {}
    scheduler.add(name="cleans", task="celery.backend_cleanup", schedule=AlignedSchedule(1), args=("cleans",))
    at(5.0)
    scheduler.tick()
    assert sent == [["c", "l", "e", "a", "n", "s"]]


def test_what_was_missed_is_sent_once(at: Any) -> None:
    at(0.0)
    due = AlignedSchedule(2)
    last = due.now()
    at(100.5)
    assert due.is_due(last) == (True, 1.5)
    assert due.is_due(due.now()) == (False, 1.5)


def test_beat_measures_time_by_a_clock_that_nobody_sets(at: Any) -> None:
    at(0.0)
    due = AlignedSchedule(2)
    begun = due.now()
    at(2.0)
    assert due.is_due(begun).is_due and due.now() - begun == timedelta(seconds=2)


def test_each_task_on_the_list_is_one_of_maintenance_and_the_other_way_round() -> None:
    assert maintenance._periodic.keys() == PERIODS_S.keys()
    assert {entry["task"] for entry in celery.conf.beat_schedule.values()} == {maintenance.run.name}


def test_the_error_of_one_task_is_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(task_runs.TaskRunRecorder, "note", lambda *_: None)
    for name, act in (("fails", lambda: 1 / 0), ("goes on", lambda: done.append("goes on"))):
        monkeypatch.setitem(PERIODS_S, name, 60.0)
        monkeypatch.setitem(maintenance._periodic, name, maintenance.PeriodicTask(name, act))
    maintenance.run(["fails", "of another release", "goes on"])
    assert done == ["goes on"]


def test_a_task_under_which_the_clock_is_set_writes_by_the_offset_of_its_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets: list[int | None] = []

    def act() -> None:
        clock.offset_ms = 7_200_000
        offsets.append(clock.get_offset_of_writes())

    monkeypatch.setattr(task_runs.TaskRunRecorder, "note", lambda *_: None)
    monkeypatch.setitem(PERIODS_S, "checks", 60.0)
    clock.offset_ms = 0
    maintenance.PeriodicTask("checks", act)()
    assert offsets == [0] and clock.get_offset_of_writes() == 7_200_000


def test_a_task_that_lasts_is_passed_over_and_holds_up_only_those_of_its_own_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends, begun, done = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(task_runs.TaskRunRecorder, "note", lambda *_: None)
    monkeypatch.setattr(maintenance, "_MIN_PERIOD_SHARE", 0.0)
    for name, act in (("lasts", lambda: (begun.set(), ends.wait(10))), ("after", done.set)):
        monkeypatch.setitem(PERIODS_S, name, 0.5)
        monkeypatch.setitem(maintenance._periodic, name, maintenance.PeriodicTask(name, act))
    thread = threading.Thread(target=maintenance.run, args=(["lasts", "after"],))
    thread.start()
    assert begun.wait(10) and not done.is_set()
    maintenance.run(["lasts", "after"])
    assert done.is_set()
    ends.set()
    thread.join()


def test_a_worker_whose_beat_has_ended_ends() -> None:
    BeatThread(FakeService(ZeroDivisionError())).run()  # type: ignore[arg-type]
    assert state.should_stop == 1


def test_a_beat_that_is_told_to_stop_is_no_failure() -> None:
    service = FakeService()
    thread = BeatThread(service)  # type: ignore[arg-type]
    thread.stop()
    thread.run()
    assert service.stopped and state.should_stop is None


def test_a_worker_is_beat_only_if_it_is_asked_to_be() -> None:
    assert [EmbeddedBeatStep(None, embedded_beat=asked).enabled for asked in (False, True)] == [False, True]
    made = EmbeddedBeatStep(None, embedded_beat=True).create(SimpleNamespace(app=celery))
    assert isinstance(made._service.get_scheduler(lazy=True), beat.Scheduler)
    assert "--embedded-beat" in [name for option in celery.user_options["worker"] for name in option.opts]
