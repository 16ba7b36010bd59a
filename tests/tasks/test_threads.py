"""Vital threads: if one fails, its process ends, and the supervisor starts the process again."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from queue import Full
from types import SimpleNamespace
from typing import Any

import pytest

from routing.queue.leases import Lease
from slotkeeper.db import Write
from tasks import threads
from tasks.threads import BackgroundTask, WorkQueue
from tasks.worker.event_loop import CommitQueue
from tasks.worker.heartbeat import Heartbeat
from tasks.worker.poller import Poller
from tests.support.builders import eventually
from tests.support.threads import no_thread_left
from tools.cluster.stack import REPO

_FAILS = """
import threading
from tasks import threads

def fail():
    raise ValueError("why")

threads.start_vital_thread("important", fail)
threading.Event().wait(30)
"""


def test_a_vital_thread_that_fails_ends_its_process_and_logs_its_name() -> None:
    process = subprocess.run(
        [sys.executable, "-c", _FAILS], cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == os.EX_SOFTWARE == 70
    output = process.stdout + process.stderr
    assert "important" in output and "why" in output


def test_a_vital_thread_that_returns_does_not_end_its_process() -> None:
    done: list[int] = []
    threads.start_vital_thread("one", lambda: done.append(1)).join(10)
    assert done == [1]


class Halt(BaseException):
    """An exception that no handler of `Exception` catches."""


class _Failing:
    """An object that raises Halt at each access to an attribute."""

    def __getattr__(self, name: str) -> Any:
        raise Halt


def _fail(*_: object) -> Any:
    raise Halt


def _start_background_task() -> None:
    BackgroundTask("work", _fail).request()


def _start_poller() -> None:
    Poller(_Failing(), _Failing(), "w", lambda: 1, _fail).start()  # type: ignore[arg-type]


def _start_heartbeat() -> None:
    heartbeat = Heartbeat(_Failing(), "w", every_ms=1, on_lost_renewals=_fail)  # type: ignore[arg-type]
    heartbeat.add(Lease("zimg", "one", "l", "w", "gpu-slot0"))
    heartbeat.start()


def _start_commit_queue() -> None:
    loop = asyncio.new_event_loop()
    database: Any = SimpleNamespace(try_commit_all=lambda writes: None, commit_all=_fail)
    queue = CommitQueue("commits", loop, database)
    queue.commit(Write(lambda tx: None))
    loop.call_later(0.01, loop.stop)
    loop.run_forever()
    loop.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("start", [_start_background_task, _start_poller, _start_heartbeat, _start_commit_queue])
def test_a_process_ends_when_a_thread_fails_that_it_cannot_do_without(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[], None]
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    start()
    eventually(lambda: exits == [os.EX_SOFTWARE])


def test_requests_during_a_run_of_a_background_task_lead_to_one_more_run() -> None:
    runs: list[int] = []
    may_end = threading.Event()
    task = BackgroundTask("work", lambda: (runs.append(len(runs)), may_end.wait(10)))
    task.request()
    eventually(lambda: runs == [0])
    for _ in range(3):
        task.request()
    may_end.set()
    eventually(lambda: not task._is_running)
    assert runs == [0, 1]


# -- a queue of work ---------------------------------------------------------------------------------------------


def test_a_work_queue_passes_its_items_to_the_handler_in_order_and_in_batches() -> None:
    may_go_on, batches = threading.Event(), list[list[int]]()

    def handle(items: list[int]) -> None:
        may_go_on.wait(10)
        batches.append(items)

    work = WorkQueue("work", handle, batch=3)
    work.put(0)
    eventually(lambda: work.is_empty)
    for number in range(1, 5):
        work.put(number)
    assert not work.flush(0)
    may_go_on.set()
    assert work.flush(10)
    assert batches == [[0], [1, 2, 3], [4]]


def test_a_work_queue_continues_after_an_error() -> None:
    handled = list[str]()

    def handle(items: list[str]) -> None:
        if items == ["wrong"]:
            raise ValueError
        handled.extend(items)

    work = WorkQueue("work", handle)
    for item in ("wrong", "right"):
        work.put(item)
    assert work.flush(10) and handled == ["right"]


def test_a_full_work_queue_refuses_items() -> None:
    may_go_on = threading.Event()
    work = WorkQueue[int]("work", lambda _: may_go_on.wait(10), max_pending=1)
    work.put(0)
    eventually(lambda: work.is_empty)
    work.put(1)
    with pytest.raises(Full):
        work.put(2)
    may_go_on.set()
    assert work.flush(10)


def test_a_work_queue_whose_thread_cannot_be_started_starts_it_with_the_next_item() -> None:
    handled = list[str]()
    work = WorkQueue("work", handled.extend)
    with no_thread_left(), pytest.raises(RuntimeError):
        work.put("first")
    work.put("second")
    assert work.flush(10) and handled == ["second"]
