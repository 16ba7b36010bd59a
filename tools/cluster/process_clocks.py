"""Shift the clocks of processes with libfaketime, which reads the offset from a file.

Only the wall clock is changed.  The monotonic clock stays right, so waits and sleeps last as long as they should.
"""

import os
from pathlib import Path

_LIBRARIES = ("usr/lib/*/faketime", "usr/lib/faketime", "usr/lib64/faketime", "usr/local/lib/faketime")
_FAKE_CLOCK = Path(__file__).parent / "fake_clock"
_CHECKOUT = Path(__file__).resolve().parents[2]
_LEFT_BEHIND = ("faketime_shm_{}", "sem.faketime_sem_{}")  # in shared memory, by a process that was killed
_SHARED = Path("/dev/shm")
RIGHT = "+0"


def library() -> Path | None:
    """Return the path of libfaketime for programs with threads; None: it is not installed."""
    for pattern in _LIBRARIES:
        if paths := sorted(Path("/").glob(f"{pattern}/libfaketimeMT.so.1")):
            return paths[0]
    return None


def python_path(*first: Path) -> str:
    """Return a PYTHONPATH of these folders, the checkout (`tools` is not installed), and what this process has."""
    folders = [*map(str, first), str(_CHECKOUT), os.environ.get("PYTHONPATH")]
    return os.pathsep.join(filter(None, folders))


def environment(preload: Path, clock: Path) -> dict[str, str]:
    """Return the variables for a Python process that reads the offset of its clock from `clock`, once a second."""
    return {
        "LD_PRELOAD": str(preload),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": python_path(_FAKE_CLOCK),
    }


def remove_leftovers(pid: int) -> None:
    """Remove the shared memory that libfaketime leaves behind for an ended process."""
    for name in _LEFT_BEHIND:
        (_SHARED / name.format(pid)).unlink(missing_ok=True)


def set_clock(clock: Path, offset_s: str) -> None:
    """Write the offset of a clock, in seconds, such as "-30"."""
    draft = clock.with_suffix(".new")
    draft.write_text(f"{offset_s}\n")
    draft.replace(clock)  # Atomic: no process may read half of the file.
