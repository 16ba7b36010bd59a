"""Ends are told in a thread of their own."""

import threading
from typing import Any

import pytest

from jobs.tellings import Telling
from tasks import telling
from tests.support.threads import no_thread_left


def test_an_end_for_which_there_was_no_thread_keeps_no_later_one_from_being_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = threading.Event()
    monkeypatch.setattr(telling.Teller, "_run", lambda _: told.set())
    owed: Any = None
    teller = telling.Teller(owed)
    with no_thread_left():
        teller.soon(Telling("first", "j1"))  # Nothing is raised: it is a run that has ended that asks.
    teller.soon(Telling("second", "j2"))
    assert told.wait(10)
