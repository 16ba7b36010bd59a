"""One Valkey for all simulations of a session; each finds it empty."""

from collections.abc import Callable, Iterator

import pytest
from redis import Redis

from app.simulate import Outcome, Scenario, run
from app.simulate.valkey import private_valkey
from app.up.errors import UpError

Play = Callable[[Scenario], Outcome]


@pytest.fixture(scope="session")
def simulator() -> Iterator[Redis]:
    try:
        with private_valkey() as redis:
            yield redis
    except UpError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def play(simulator: Redis) -> Play:
    """Simulate a scenario."""

    def play(scenario: Scenario) -> Outcome:
        simulator.flushall()
        return run(scenario, redis=simulator)

    return play
