import threading

import pytest

from app.patience import HAS_LEFT, MAY_WAIT, Patience
from jobs.states import State


class Time:
    """A clock that only a pause moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def _patience(most: int = 1) -> tuple[Patience, Time]:
    time = Time()
    return Patience(most, time.pause, time), time


def test_the_looks_grow_rarer_up_to_a_quarter_of_a_second():
    patience, time = _patience()
    patience.wait(lambda: State.QUEUED, 10)
    assert time.pauses[0] == 0.020
    assert time.pauses == sorted(time.pauses[:-1]) + time.pauses[-1:]
    assert max(time.pauses) == 0.250
    assert time.now == pytest.approx(10)


@pytest.mark.parametrize("state", [State.COMPLETED, State.DEAD, None])
def test_it_ends_with_the_job_or_when_that_is_gone(state):
    patience, time = _patience()
    states = iter([State.QUEUED, State.RUNNING, state])
    patience.wait(lambda: next(states), 60)
    assert len(time.pauses) == 2


@pytest.mark.parametrize("seconds", [0, -1])
def test_who_does_not_want_to_wait_does_not(seconds):
    patience, time = _patience()
    patience.wait(lambda: State.QUEUED, seconds)
    assert time.pauses == []


def test_beyond_the_bound_nobody_waits_and_room_is_given_back():
    patience, time = _patience(most=1)
    inside, leave = threading.Event(), threading.Event()

    def look() -> State | None:
        inside.set()
        leave.wait(10)
        return None

    first = threading.Thread(target=patience.wait, args=(look, 60))
    first.start()
    inside.wait(10)
    patience.wait(lambda: State.QUEUED, 60)
    assert time.pauses == []
    leave.set()
    first.join(10)
    patience.wait(lambda: State.QUEUED, 1)
    assert time.pauses


def test_room_is_given_back_when_looking_fails():
    patience, time = _patience(most=1)
    with pytest.raises(ZeroDivisionError):
        patience.wait(lambda: 1 / 0, 60)  # type: ignore[arg-type, return-value]
    patience.wait(lambda: State.QUEUED, 1)
    assert time.pauses


def test_whose_thread_is_not_for_waiting_does_not():
    patience, time = _patience()
    patience.wait(lambda: State.QUEUED, 10, {MAY_WAIT: False})
    assert time.pauses == []


def test_who_has_left_is_not_waited_for_any_more():
    patience, time = _patience()
    patience.wait(lambda: State.QUEUED, 10, {MAY_WAIT: True, HAS_LEFT: lambda: len(time.pauses) == 3})
    assert len(time.pauses) == 3
