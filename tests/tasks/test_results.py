"""The result notifier, which notifies clients of ended jobs in a separate thread."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.backends.redis import RedisBackend
from celery.signals import worker_shutdown
from kombu.exceptions import EncodeError

from slotkeeper.outbox.result_notifications import ResultNotification
from tasks import notify_large_result, results
from tasks.inference import JobResult, ResultBackendUnavailable, infer
from tests.support.threads import no_thread_left


def test_a_failure_to_start_the_thread_does_not_prevent_later_notifications(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = threading.Event()
    monkeypatch.setattr(results.ResultNotifier, "notify", lambda _, batch: started.set())
    unused: Any = None
    notifier = results.ResultNotifier(unused, unused)
    with no_thread_left():
        # `put` raises no error, because the worker calls it at the end of a run.
        notifier.put(ResultNotification("first", "j1"))
    notifier.put(ResultNotification("second", "j2"))
    assert started.wait(10)


def test_a_worker_that_stops_waits_until_its_pending_notifications_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    flushes = list[float]()
    monkeypatch.setattr(results.ResultNotifier, "flush", lambda _, within_s: flushes.append(within_s) or True)
    monkeypatch.setattr(worker_shutdown, "receivers", [])
    unused: Any = None
    notifier = results.ResultNotifier(unused, unused)  # The signal holds no reference to it.
    worker_shutdown.send(sender=None)
    assert len(flushes) == 1
    del notifier


@pytest.mark.parametrize("status, is_repeated", [(os.EX_TEMPFAIL, True), (1, False), (-9, False)])
def test_a_large_result_whose_notification_fails_does_not_block_other_results(
    monkeypatch: pytest.MonkeyPatch, status: int, is_repeated: bool
) -> None:
    """Only after an outage is the process of a large result started again: any other error would occur again."""
    statuses, notified = iter([status, 0]), list[str]()
    monkeypatch.setattr(results.subprocess, "run", lambda command, check: SimpleNamespace(returncode=next(statuses, 0)))
    monkeypatch.setattr(results, "is_expensive_to_parse", lambda result: result == "large")
    monkeypatch.setattr(results, "notify_clients", lambda job: notified.append(job.id))
    monkeypatch.setattr(results, "_RETRY_S", 0.0)
    jobs = {name: SimpleNamespace(id=name, result=name) for name in ("large", "small")}
    pending: Any = SimpleNamespace(is_pending=lambda _: True, delete=lambda ids: deleted.extend(ids))
    deleted = list[str]()
    store: Any = SimpleNamespace(get=jobs.get)
    notifier = results.ResultNotifier(pending, store)
    notifier.notify([ResultNotification("1", "large"), ResultNotification("2", "small")])
    assert notified == ["small"]
    assert deleted == (["1", "2"] if is_repeated else ["2"]), "a failed notification stays pending"


def test_clients_are_notified_of_a_result_that_is_too_large_for_celery_to_encode(monkeypatch) -> None:
    def cannot_encode(_: Any) -> None:
        raise EncodeError("too large") from MemoryError()

    notified = list[Any]()
    monkeypatch.setattr(results, "notify_clients", cannot_encode)
    monkeypatch.setattr(results, "notify_too_large", notified.append)
    job: Any = SimpleNamespace(id="j")
    notify_large_result._notify(job)
    assert notified == [job]


def test_an_unreachable_result_backend_raises_an_error_of_one_sentence() -> None:
    backend = RedisBackend("redis://127.0.0.1:1/0", app=Celery(set_as_current=False))
    backend.retry_policy = {"max_retries": 1, "interval_start": 0}
    with pytest.raises(ResultBackendUnavailable, match="result backend does not answer") as raised:
        JobResult("job-1", backend=backend).get(timeout=5)
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    assert "slotkeeper job job-1" in str(raised.value)
    for read in (lambda result: result.state, lambda result: result.status, lambda result: result.ready()):
        with pytest.raises(ResultBackendUnavailable):
            read(JobResult("job-1", backend=backend))


def test_the_result_of_a_job_is_found_by_its_id() -> None:
    assert isinstance(infer.AsyncResult("job-1"), JobResult)
