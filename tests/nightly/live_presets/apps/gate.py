"""Runs that end when a test says so, and are counted."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def pass_through(gate: str) -> None:
    """Note a run, and wait until there is a file of this name; "" is always open."""
    for _ in steps(gate):
        time.sleep(0.02)


def steps(gate: str) -> Iterator[None]:
    """The same, where the caller waits."""
    if not gate:
        return
    with open(f"{gate}.runs", "a") as runs:
        runs.write("begun\n")
    while not Path(gate).exists():
        yield


@contextmanager
def noted(prompt: str) -> Iterator[None]:
    """Write the begin and the end of a run to the file LIVE_JOURNAL; the prompt "die" ends the whole server."""
    _note("begins", prompt)
    if prompt.startswith("die"):
        os.killpg(int(Path(os.environ["LIVE_GROUP"]).read_text()), signal.SIGKILL)
        os._exit(1)  # This process may have a separate group.
    try:
        yield
    finally:
        _note("ends", prompt)


def _note(what: str, prompt: str) -> None:
    if "LIVE_JOURNAL" in os.environ:
        with open(os.environ["LIVE_JOURNAL"], "a") as journal:
            journal.write(f"{time.monotonic():.3f} {what} {prompt}\n")
