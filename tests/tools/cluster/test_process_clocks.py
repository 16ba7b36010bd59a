import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.cluster import process_clocks

# At each line that it reads it tells the time of day, and how long it has slept.
TELLS = """
import sys, time
for _ in sys.stdin:
    began = time.monotonic()
    time.sleep(0.05)
    print(time.time(), time.monotonic() - began, flush=True)
"""


class Clocked:
    """A Python process whose clock is set."""

    def __init__(self, folder: Path) -> None:
        library = process_clocks.library()
        if library is None:
            pytest.skip("libfaketime is not installed")
        self.clock = folder / "clock"
        process_clocks.set_clock(self.clock, process_clocks.RIGHT)
        self.process = subprocess.Popen(
            [sys.executable, "-c", TELLS],
            env=process_clocks.environment(library, self.clock),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def error_s(self) -> float:
        """How wrong its time of day is."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        told, slept_s = map(float, self.process.stdout.readline().split())
        assert 0.04 < slept_s < 5
        return told - time.time()


@pytest.fixture
def clocked(tmp_path: Path) -> Iterator[Clocked]:
    clocked = Clocked(tmp_path)
    yield clocked
    clocked.process.communicate()


@pytest.mark.parametrize("offset_s", [30, -30, 3600, -3600])
def test_a_clock_can_be_wrong_and_right_again_while_sleeps_stay_as_long_as_they_are(
    clocked: Clocked, offset_s: int
) -> None:
    for steps_s in (0, offset_s, 0):
        process_clocks.set_clock(clocked.clock, f"{steps_s:+}")
        until = time.monotonic() + 10
        while abs(clocked.error_s() - steps_s) > 3:
            assert time.monotonic() < until


def test_a_process_that_is_killed_leaves_nothing_in_shared_memory(clocked: Clocked) -> None:
    clocked.error_s()
    process = clocked.process
    process.kill()
    process.wait()
    assert _left_by(process.pid)
    process_clocks.clear_after(process.pid)
    assert not _left_by(process.pid)


def _left_by(pid: int) -> list[Path]:
    return [it for it in Path("/dev/shm").iterdir() if it.name.endswith(f"_{pid}")]
