"""Set the clock that all processes share, for one test."""

from collections.abc import Callable

import pytest

from slotkeeper.clock import clock


def set_clock(monkeypatch: pytest.MonkeyPatch, read_ms: Callable[[], int]) -> None:
    """Let `now_ms()` return what `read_ms` returns (ms since the epoch), in every module, until the test ends."""
    monkeypatch.setattr(clock, "now_ms", read_ms)
