import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.cluster import process_clocks

# For each line that it reads it prints the wall-clock time, and how long a sleep of 50 ms took.
PRINTS_TIMES = """
import sys, time
for _ in sys.stdin:
    began = time.monotonic()
    time.sleep(0.05)
    print(time.time(), time.monotonic() - began, flush=True)
"""


class ClockedProcess:
    """A Python process whose clock a test shifts."""

    def __init__(self, folder: Path) -> None:
        library = process_clocks.library()
        if library is None:
            pytest.skip("libfaketime is not installed")
        self.clock = folder / "clock"
        process_clocks.set_clock(self.clock, process_clocks.RIGHT)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRINTS_TIMES],
            env=process_clocks.environment(library, self.clock),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def error_s(self) -> float:
        """Return by how many seconds its wall clock is wrong."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        time_s, slept_s = map(float, self.process.stdout.readline().split())
        assert 0.04 < slept_s < 5
        return time_s - time.time()


@pytest.fixture
def clocked(tmp_path: Path) -> Iterator[ClockedProcess]:
    clocked = ClockedProcess(tmp_path)
    yield clocked
    clocked.process.communicate()


@pytest.mark.parametrize("offset_s", [30, -30, 3600, -3600])
def test_a_clock_can_be_shifted_and_corrected_without_effect_on_sleeps(clocked: ClockedProcess, offset_s: int) -> None:
    for shift_s in (0, offset_s, 0):
        process_clocks.set_clock(clocked.clock, f"{shift_s:+}")
        until = time.monotonic() + 10
        while abs(clocked.error_s() - shift_s) > 3:
            assert time.monotonic() < until


def test_a_process_that_is_killed_leaves_nothing_in_shared_memory(clocked: ClockedProcess) -> None:
    clocked.error_s()
    process = clocked.process
    process.kill()
    process.wait()
    assert _shared_memory_of(process.pid)
    process_clocks.remove_leftovers(process.pid)
    assert not _shared_memory_of(process.pid)


def _shared_memory_of(pid: int) -> list[Path]:
    return [path for path in Path("/dev/shm").iterdir() if path.name.endswith(f"_{pid}")]
