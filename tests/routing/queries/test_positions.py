from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError, TimeoutError

from routing.admission import questions
from routing.admission.questions import Position
from routing.queries.interval import Estimate
from routing.queries.positions import QueuePosition, QueuePositions
from slotkeeper.jobs.values import QueuedJob

JOB = QueuedJob("j", 1, "zimg", 5, "default")
SOON = Estimate(2000, 1000, 4000)


class World:
    """What places look at."""

    def __init__(self) -> None:
        self.now, self.looks, self.position = 0.0, 0, Position(3, 500)
        fleet = SimpleNamespace(resolve=lambda name: SimpleNamespace(fleet=name))
        estimates = SimpleNamespace(of=lambda job, position, new: SOON)
        self.places = QueuePositions(fleet, SimpleNamespace(), estimates, lambda: self.now)

    def look(self, queues, fleet, job):
        self.looks += 1
        if isinstance(self.position, Exception):
            raise self.position
        return self.position


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(questions, "position", world.look)
    return world


def test_a_place_is_the_position_and_when_it_should_start(world):
    assert world.places.of_job(JOB) == QueuePosition(4, SOON)


def test_the_place_of_a_job_that_came_just_now_is_not_looked_up(world):
    assert world.places.of_new_job(JOB, Position(0, 500)) == QueuePosition(1, SOON)
    assert world.places.of_new_job(JOB, None) == QueuePosition(), "the room has not answered: it is not asked again"
    assert world.looks == 0


def test_what_is_offered_is_being_started(world):
    world.position = Position(0, None, offered=True)
    assert world.places.of_job(JOB) == QueuePosition(None, SOON, True)


def test_what_does_not_wait_in_line_has_no_place(world):
    world.position = None
    assert world.places.of_job(JOB) == QueuePosition()


def test_a_redis_that_refuses_is_asked_again_at_once(world):
    world.position = ConnectionError()
    assert [world.places.of_job(JOB), world.places.of_job(JOB)] == [QueuePosition(), QueuePosition()]
    assert world.looks == 2


def test_a_redis_that_does_not_answer_costs_its_time_out_once_a_second(world):
    world.position = TimeoutError()
    for now in (0, 0.5, 0.99, 1.0):
        world.now = now
        assert world.places.of_job(JOB) == QueuePosition()
    assert world.looks == 2
