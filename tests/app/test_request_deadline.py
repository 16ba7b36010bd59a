"""All steps of a request share one deadline."""

import time
from typing import Any

import pytest

from app.request_deadline import ANSWER_UNTIL
from routing.queue.queues import Queues
from routing.queue.worker_capacity import WorkerCapacity
from slotkeeper.db.time_limits import time_left
from slotkeeper.jobs.store import JobStore
from tests.support.api import Api
from tests.support.visitor import visitor


def _note_time_left(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[float]:
    left: list[float] = []
    original = getattr(owner, name)

    def noting(*args: Any, **more: Any) -> Any:
        left.append(time_left())
        return original(*args, **more)

    monkeypatch.setattr(owner, name, noting)
    return left


@pytest.mark.parametrize(
    ("method", "path", "step"),
    [
        ("GET", "/queue/jobs/{job}", (JobStore, "get")),
        ("POST", "/queue/jobs/{job}/cancel", (JobStore, "cancel_waiting")),
        ("POST", "/admin/dlq/{job}/retry", (JobStore, "revive")),
        ("POST", "/queue/submit", (JobStore, "submit")),
    ],
)
def test_reads_submits_cancels_and_retries_use_the_remaining_time_of_the_request(
    api: Api, monkeypatch: pytest.MonkeyPatch, method: str, path: str, step: tuple[Any, str]
) -> None:
    api.model()
    job = api.submitted()
    left = _note_time_left(monkeypatch, *step)
    environ = {ANSWER_UNTIL: time.monotonic() + 8}
    body = {"json": {"model": "zimg", "payload": {}}} if path.endswith("submit") else {}
    api.client.open(path.format(job=job), method=method, environ_overrides=environ, **body)
    assert 7 < left[0] <= 8
    assert time_left() > 1e9, "the next request of this thread has its own time"


@pytest.mark.parametrize(("act", "step"), [("cancel", "cancel_waiting"), ("retry", "revive")])
def test_so_have_the_forms_of_a_job(api: Api, monkeypatch: pytest.MonkeyPatch, act: str, step: str) -> None:
    api.model()
    job = api.submitted()
    left = _note_time_left(monkeypatch, JobStore, step)
    visitor(api, **{ANSWER_UNTIL: time.monotonic() + 8}).post(f"/page/jobs/{job}/{act}")
    assert 6 < left[0] <= 8


def test_a_request_that_may_take_long_has_no_deadline(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.model()
    listed = _note_time_left(monkeypatch, type(api.database), "read")
    api.client.post("/admin/dlq/retry-all")
    assert min(listed) > 1e9


def test_a_submit_skips_redis_if_too_little_time_is_left(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.model()
    environ = {ANSWER_UNTIL: time.monotonic() + 7}
    monkeypatch.setattr(api.dispatcher.queues._settings, "redis_timeout_s", 7.5)
    asked = _note_time_left(monkeypatch, Queues, "enqueue_new")
    answer = api.client.post("/queue/submit", json={"model": "zimg", "payload": {}}, environ_overrides=environ)
    assert (answer.status_code, asked) == (202, [])


def test_a_submit_does_not_look_for_workers_while_redis_is_down(
    mortal_api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal_api.model()
    mortal_api.register()
    mortal_api.valkey.kill()
    asked = _note_time_left(monkeypatch, WorkerCapacity, "is_any_alive")
    assert mortal_api.submit().status_code == 202
    assert asked == []
