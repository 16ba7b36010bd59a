"""Ends are told in a thread of their own."""

import threading
from typing import Any

import pytest
from celery.signals import worker_shutdown

from slotkeeper.outbox.result_notifications import ResultNotification
from tasks import results
from tests.support.threads import no_thread_left


def test_an_end_for_which_there_was_no_thread_keeps_no_later_one_from_being_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = threading.Event()
    monkeypatch.setattr(results.ResultNotifier, "_run", lambda _: told.set())
    nothing: Any = None
    teller = results.ResultNotifier(nothing, nothing)
    with no_thread_left():
        teller.put(ResultNotification("first", "j1"))  # Nothing is raised: it is a run that has ended that asks.
    teller.put(ResultNotification("second", "j2"))
    assert told.wait(10)


def test_a_worker_that_stops_waits_for_what_its_teller_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()
    monkeypatch.setattr(results.ResultNotifier, "_run", lambda _: None)
    monkeypatch.setattr(results.ResultNotifier, "flush", lambda _, within_s: waited.append(within_s) or True)
    monkeypatch.setattr(worker_shutdown, "receivers", [])
    nothing: Any = None
    teller = results.ResultNotifier(nothing, nothing)
    worker_shutdown.send(sender=None)
    assert waited == [], "it has nothing"
    teller.put(ResultNotification("first", "j1"))
    worker_shutdown.send(sender=None)
    assert len(waited) == 1
