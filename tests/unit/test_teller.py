"""Ends are told in a thread of their own."""

import threading
from typing import Any

import pytest
from celery.signals import worker_shutdown

from slotkeeper.outbox.result_notifications import ResultNotification
from tasks import telling
from tests.support.threads import no_thread_left


def test_an_end_for_which_there_was_no_thread_keeps_no_later_one_from_being_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = threading.Event()
    monkeypatch.setattr(telling.Teller, "_run", lambda _: told.set())
    nothing: Any = None
    teller = telling.Teller(nothing, nothing)
    with no_thread_left():
        teller.soon(ResultNotification("first", "j1"))  # Nothing is raised: it is a run that has ended that asks.
    teller.soon(ResultNotification("second", "j2"))
    assert told.wait(10)


def test_a_worker_that_stops_waits_for_what_its_teller_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()
    monkeypatch.setattr(telling.Teller, "_run", lambda _: None)
    monkeypatch.setattr(telling.Teller, "flush", lambda _, within_s: waited.append(within_s) or True)
    monkeypatch.setattr(worker_shutdown, "receivers", [])
    nothing: Any = None
    teller = telling.Teller(nothing, nothing)
    worker_shutdown.send(sender=None)
    assert waited == [], "it has nothing"
    teller.soon(ResultNotification("first", "j1"))
    worker_shutdown.send(sender=None)
    assert len(waited) == 1
