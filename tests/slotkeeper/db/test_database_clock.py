"""All hosts use the time of the database, also when their own clocks are wrong."""

import time

import pytest

from slotkeeper import clock as clocks
from slotkeeper.clock import Clock

COMMON = 1_800_000_000_000


class Host:
    """A host's two clocks, which the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steady, self.wall_ms = 1_000.0, COMMON
        monkeypatch.setattr(clocks.time, "monotonic", lambda: self.steady)
        monkeypatch.setattr(clocks.time, "time_ns", lambda: self.wall_ms * 1_000_000)
        self.clock = Clock()

    def later(self, seconds: float) -> None:
        self.steady += seconds
        self.wall_ms += round(seconds * 1000)

    def sync(self, common_ms: int, took_s: float = 0.001) -> None:
        """Adjust the clock to a response of the database that took `took_s` and holds `common_ms`."""
        self.clock.adjust(common_ms - took_s * 500, self.steady - took_s, self.steady)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_the_clock_of_the_host_counts_until_the_database_clock_is_read(host: Host) -> None:
    assert host.clock.now_ms() == COMMON and host.clock.skew_ms == 0


@pytest.mark.parametrize("wrong_by_ms", [30_000, -30_000, 3_600_000])
def test_a_host_with_a_wrong_clock_uses_the_database_clock(host: Host, wrong_by_ms: int) -> None:
    host.wall_ms += wrong_by_ms
    host.sync(COMMON)
    host.later(10)
    assert host.clock.now_ms() == COMMON + 10_000
    assert host.clock.skew_ms == wrong_by_ms


def test_a_step_of_the_host_clock_changes_nothing_while_the_database_is_unavailable(host: Host) -> None:
    host.sync(COMMON)
    host.wall_ms -= 3_600_000
    host.later(60)
    assert host.clock.now_ms() == COMMON + 60_000


def test_the_response_with_the_shortest_round_trip_sets_the_clock(host: Host) -> None:
    host.sync(COMMON, took_s=0.001)
    host.later(1)
    host.sync(COMMON + 1_000 + 300, took_s=0.8)
    assert host.clock.now_ms() == COMMON + 1_000


def test_a_step_of_the_database_clock_is_followed_at_once(host: Host) -> None:
    host.sync(COMMON)
    host.later(1)
    host.sync(COMMON + 6_000, took_s=0.01)
    assert host.clock.now_ms() == COMMON + 6_000


def test_a_large_clock_difference_is_logged_at_most_once_an_interval(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    host.wall_ms += clocks.MAX_SKEW_MS + 1
    for _ in range(3):
        host.sync(COMMON)
    assert capsys.readouterr().out.count("host_clock_differs") == 1


def test_now_ms_uses_the_shared_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    from slotkeeper.clock import now_ms

    monkeypatch.setattr(clocks.clock, "_ahead_ms", 5_000.0)
    assert abs(now_ms() - 5_000 - time.monotonic() * 1000) < 1_000
