"""Work that is done aside."""

import threading
from typing import NoReturn

import pytest

from tasks.aside import Aside


def test_work_for_which_no_thread_could_be_had_is_done_when_it_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_to_be_had(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    done = threading.Event()
    work = Aside("work", done.set)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none_to_be_had)
        work.ask()  # Nothing is raised: it is the heartbeat that asks.
    assert not done.is_set()
    work.ask()
    assert done.wait(10)
