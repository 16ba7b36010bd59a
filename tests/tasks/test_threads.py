"""A thread that a process cannot do without: if it fails, the process ends, and its supervisor starts it again."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from routing.queue.leases import Lease
from slotkeeper.db import Write
from tasks import threads
from tasks.threads import BackgroundTask
from tasks.worker.event_loop import CommitQueue
from tasks.worker.heartbeat import Heartbeat
from tasks.worker.poller import Poller
from tests.support.builders import eventually
from tools.cluster.stack import REPO

_FAILS = """
import threading
from tasks import threads

def fail():
    raise ValueError("why")

threads.start_vital_thread("important", fail)
threading.Event().wait(30)
"""


def test_a_thread_that_fails_ends_its_process_and_says_which_it_was() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _FAILS], cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == os.EX_SOFTWARE == 70
    said = ran.stdout + ran.stderr
    assert "important" in said and "why" in said


def test_a_thread_that_has_done_its_work_ends_alone() -> None:
    done: list[int] = []
    threads.start_vital_thread("one", lambda: done.append(1)).join(10)
    assert done == [1]


class Halt(BaseException):
    """Nobody foresees it."""


class _Fails:
    """Whatever is asked of it ends the thread that asks."""

    def __getattr__(self, name: str) -> Any:
        raise Halt


def _fail(*_: object) -> Any:
    raise Halt


def _aside() -> None:
    BackgroundTask("chores", _fail).request()


def _poller() -> None:
    Poller(_Fails(), _Fails(), "w", lambda: 1, _fail).start()  # type: ignore[arg-type]


def _heartbeat() -> None:
    heartbeat = Heartbeat(_Fails(), "w", every_ms=1, on_unknown_leases=_fail)  # type: ignore[arg-type]
    heartbeat.add(Lease("zimg", "one", "l", "w", "gpu-slot0"))
    heartbeat.start()


def _record() -> None:
    loop = asyncio.new_event_loop()
    it = CommitQueue("record", loop, SimpleNamespace(try_commit_all=lambda writes: None, commit_all=_fail))  # type: ignore[arg-type]
    it.commit(Write(lambda tx: None))
    loop.call_later(0.01, loop.stop)
    loop.run_forever()
    loop.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("start", [_aside, _poller, _heartbeat, _record])
def test_a_process_ends_when_a_thread_fails_that_it_cannot_do_without(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[], None]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    start()
    eventually(lambda: ended == [os.EX_SOFTWARE])


def test_who_asks_for_work_aside_before_it_begins_is_served_together_with_others() -> None:
    done: list[str] = []
    ended = threading.Event()
    it = BackgroundTask("promises", lambda: (done.append("all"), ended.set()), delay_s=0.2)
    for _ in range(3):
        it.request()
    assert ended.wait(10)
    eventually(lambda: not it._is_running)
    assert done == ["all"]
