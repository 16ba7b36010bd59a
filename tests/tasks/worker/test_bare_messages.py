"""A message of a plain Celery client while the database is down: it is the only copy of its job."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from celery.exceptions import Reject

from slotkeeper.jobs.states import State
from tasks import inference
from tasks.inference import infer
from tests.support.harness import Harness
from tests.tasks.worker.start_only import (
    raise_unavailable,
)

sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


class Pauses:
    """A replacement for the heartbeat that counts calls of `wait` and returns from them at once."""

    def __init__(self) -> None:
        self.count = 0
        self.on_wait: Callable[[], None] = lambda: None

    def wait(self, seconds: float) -> None:
        assert seconds >= 1, "retries without a pause would overload the database"
        self.count += 1
        self.on_wait()


@pytest.fixture
def pauses(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Pauses:
    pauses = Pauses()
    monkeypatch.setattr(inference, "dispatcher", lambda: harness.dispatcher)
    monkeypatch.setattr(inference, "this_worker", lambda: type("Worker", (), {"heartbeat": pauses}))
    return pauses


@contextmanager
def _a_bare_message(job_id: str) -> Iterator[None]:
    infer.push_request(id=job_id, headers={}, delivery_info={"priority": 5}, called_directly=False)
    try:
        yield
    finally:
        infer.pop_request()


@sqlite
def test_a_bare_message_is_returned_to_the_broker_if_the_database_stays_down(
    harness: Harness, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is the only copy of the job."""
    harness.register()
    monkeypatch.setattr(harness.store, "submit", raise_unavailable)
    with _a_bare_message("bare"), pytest.raises(Reject) as rejected:
        infer.run("zimg", {"prompt": "a cat"})
    assert rejected.value.requeue is True  # type: ignore[attr-defined]
    assert pauses.count >= 20, "the worker waits for the database first"


@sqlite
def test_a_bare_message_waits_for_the_database_and_its_job_is_stored_once(
    harness: Harness, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.register()
    submit = harness.store.submit
    monkeypatch.setattr(harness.store, "submit", raise_unavailable)

    def restore_after_three_pauses() -> None:
        if pauses.count == 3:
            monkeypatch.setattr(harness.store, "submit", submit)

    pauses.on_wait = restore_after_three_pauses
    with _a_bare_message("bare"), pytest.raises(inference.Ignore):
        infer.run("zimg", {"prompt": "a cat"})
    assert (pauses.count, harness.state("bare")) == (3, State.QUEUED)
    assert harness.run_all() == ["bare"]
