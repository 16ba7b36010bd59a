"""Earlier times of the shared clock, after the clock was set."""

import pytest

from slotkeeper.clock import Clock, Step

NOW = 1_000_000


@pytest.mark.parametrize(
    ("steps", "duration", "ago"),
    [
        ([], 300, NOW - 300),
        ([Step(NOW - 100, 5_000)], 100, NOW - 100),
        ([Step(NOW - 100, 5_000)], 300, NOW - 5_300),
        ([Step(NOW - 100, -5_000)], 100, NOW - 100),
        ([Step(NOW - 100, -5_000)], 300, NOW - 100),
        ([Step(NOW - 5_500, -5_000)], 6_000, NOW - 5_500),
        ([Step(NOW - 100, -50)], 300, NOW - 250),
        ([Step(NOW - 100, 5_000), Step(NOW - 5_200, 1_000)], 150, NOW - 5_150),
        ([Step(NOW - 100, 5_000), Step(NOW - 5_200, 1_000)], 300, NOW - 6_300),
    ],
)
def test_ago_ms_returns_the_earlier_time_of_the_clock_across_its_steps(
    steps: list[Step], duration: int, ago: int
) -> None:
    clock = Clock()
    clock.steps = steps
    assert clock.ago_ms(duration, NOW) == ago
