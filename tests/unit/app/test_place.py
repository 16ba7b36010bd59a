from dataclasses import replace
from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError, TimeoutError

from app.api.place import Place, Places
from jobs.errors import RecordUnavailable
from jobs.record import Waiting
from jobs.states import State

JOB = Waiting("j", 1, "zimg", 5, "default")


class World:
    """A dispatcher as far as places look at it."""

    def __init__(self, row) -> None:
        self.now, self.ahead, self.slots, self.looks, self.reads = 0.0, 3, 2, 0, 0
        self.latest = [replace(row, state=State.COMPLETED, started_ms=0, finished_ms=ms) for ms in (4000, 6000)]
        catalog = SimpleNamespace(slots_of=lambda model: self.slots)
        fleet = SimpleNamespace(snapshot=lambda: catalog, model=lambda name: SimpleNamespace(fleet=name))
        self.dispatcher = SimpleNamespace(
            fleet=fleet, queues=SimpleNamespace(ahead=self._ahead), store=SimpleNamespace(find=self._find)
        )
        self.places = Places(self.dispatcher, lambda: self.now)

    def _ahead(self, fleet, job):
        self.looks += 1
        if isinstance(self.ahead, Exception):
            raise self.ahead
        return self.ahead

    def _find(self, **_):
        self.reads += 1
        if isinstance(self.latest, Exception):
            raise self.latest
        return self.latest


@pytest.fixture
def world(a_row):
    return World(a_row)


def test_the_guess_is_how_long_those_before_it_take_on_these_slots(world):
    assert world.places.of(JOB) == Place(4, 4 / 2 * 5.0)


def test_without_slots_or_runs_there_is_no_guess(world):
    world.slots = 0
    assert world.places.of(JOB) == Place(4)
    world.slots = 2
    assert world.places.of(replace(JOB, model="flux")) == Place(4)


def test_the_latest_runs_are_read_every_ten_seconds(world):
    for now in (0, 1, 9.9, 10, 11):
        world.now = now
        world.places.of(JOB)
    assert world.reads == 2


def test_without_the_record_the_last_guess_stands(world):
    world.places.of(JOB)
    world.now, world.latest = 20, RecordUnavailable("away")
    assert world.places.of(JOB) == Place(4, 10.0)


def test_what_does_not_wait_in_line_has_no_place(world):
    world.ahead = None
    assert world.places.of(JOB) == Place()


def test_a_redis_that_refuses_is_asked_again_at_once(world):
    world.ahead = ConnectionError()
    assert [world.places.of(JOB), world.places.of(JOB)] == [Place(), Place()]
    assert world.looks == 2


def test_a_redis_that_does_not_answer_costs_its_time_out_once_a_second(world):
    world.ahead = TimeoutError()
    for now in (0, 0.5, 0.99, 1.0):
        world.now = now
        assert world.places.of(JOB) == Place()
    assert world.looks == 2
