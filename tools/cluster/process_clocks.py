"""Processes whose clocks can be wrong: libfaketime, told by a file.

Only the time of day is changed.  Threads wait by the monotonic clock, and how long they wait is no matter of what time
it is.
"""

import os
from pathlib import Path

_LIBRARIES = ("usr/lib/*/faketime", "usr/lib/faketime", "usr/lib64/faketime", "usr/local/lib/faketime")
_CLOCKED = Path(__file__).parent / "fake_clock"
_CHECKOUT = Path(__file__).resolve().parents[2]
_LEFT_BEHIND = ("faketime_shm_{}", "sem.faketime_sem_{}")  # in memory that all share, by a process that was killed
_SHARED = Path("/dev/shm")
RIGHT = "+0"


def library() -> Path | None:
    """libfaketime, that for programs with threads; None: it is not installed."""
    for pattern in _LIBRARIES:
        if found := sorted(Path("/").glob(f"{pattern}/libfaketimeMT.so.1")):
            return found[0]
    return None


def python_path(*first: Path) -> str:
    """Return a PYTHONPATH of these folders, the checkout (`tools` is not installed), and what this process has."""
    folders = [*map(str, first), str(_CHECKOUT), os.environ.get("PYTHONPATH")]
    return os.pathsep.join(filter(None, folders))


def environment(preload: Path, clock: Path) -> dict[str, str]:
    """Of a Python process that reads in `clock` how wrong its time is, once a second."""
    return {
        "LD_PRELOAD": str(preload),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": python_path(_CLOCKED),
    }


def clear_after(pid: int) -> None:
    """Remove what libfaketime keeps for a process that has ended."""
    for name in _LEFT_BEHIND:
        (_SHARED / name.format(pid)).unlink(missing_ok=True)


def set_clock(clock: Path, offset_s: str) -> None:
    """Let it be `offset_s` later, such as "-30"."""
    draft = clock.with_suffix(".new")
    draft.write_text(f"{offset_s}\n")
    draft.replace(clock)  # no process may read half of it
