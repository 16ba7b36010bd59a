"""Ends are told in a thread of their own."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from celery.signals import worker_shutdown
from kombu.exceptions import EncodeError

from slotkeeper.outbox.result_notifications import ResultNotification
from tasks import notify_large_result, results
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


@pytest.mark.parametrize("status, is_repeated", [(os.EX_TEMPFAIL, True), (1, False), (-9, False)])
def test_a_large_result_that_cannot_be_notified_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, status: int, is_repeated: bool
) -> None:
    """Only an outage is waited for; what else ends the process of a large result would end it again."""
    statuses, tried = iter([status, 0]), list[str]()
    monkeypatch.setattr(results.subprocess, "run", lambda command, check: SimpleNamespace(returncode=next(statuses, 0)))
    monkeypatch.setattr(results, "is_expensive_to_parse", lambda result: result == "large")
    monkeypatch.setattr(results, "notify_clients", lambda job: tried.append(job.id))
    monkeypatch.setattr(results, "_RETRY_S", 0.0)
    jobs = {name: SimpleNamespace(id=name, result=name) for name in ("large", "small")}
    pending: Any = SimpleNamespace(is_pending=lambda _: True, delete=lambda ids: deleted.extend(ids))
    deleted = list[str]()
    store: Any = SimpleNamespace(get=jobs.get)
    notifier = results.ResultNotifier(pending, store)
    notifier.notify([ResultNotification("1", "large"), ResultNotification("2", "small")])
    assert tried == ["small"]
    assert deleted == (["1", "2"] if is_repeated else ["2"]), "it is claimed again later"


def test_a_result_that_celery_cannot_encode_for_its_size_is_notified_as_too_large(monkeypatch) -> None:
    def cannot_encode(_: Any) -> None:
        raise EncodeError("it is too large") from MemoryError()

    told = list[Any]()
    monkeypatch.setattr(results, "notify_clients", cannot_encode)
    monkeypatch.setattr(results, "notify_too_large", told.append)
    job: Any = SimpleNamespace(id="j")
    notify_large_result._notify(job)
    assert told == [job]
