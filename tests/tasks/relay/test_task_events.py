"""Celery's task events, made from the outbox: a receiver gets all events of each job in order, at least once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from slotkeeper.db import Database
from slotkeeper.db.group_commit import Write
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import JobError
from tasks.relay import relay as relay_module
from tasks.relay.relay import Relay
from tasks.relay.sinks import task_events
from tasks.relay.sinks.sink import SinkUnavailable
from tasks.relay.sinks.task_events import CLIENT_HOSTNAME, TaskEventSink
from tests.support.builders import SECOND, T0, a_delayed_job, a_job_in, a_running_job, a_start, an_ended_job
from tests.support.ends import store_end
from tools.cluster.stack import eventually
from tools.cluster.valkey_process import Valkey


@pytest.fixture
def store(sqlite_url: str) -> Iterator[JobStore]:
    database = Database(sqlite_url)
    yield JobStore(database)
    database.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Valkey]:
    with Valkey(tmp_path / "broker") as valkey:
        yield valkey


@pytest.fixture
def app(broker: Valkey) -> Celery:
    app = Celery("events", broker=broker.url, set_as_current=False)
    app.conf.broker_transport = "tasks.extensions.transport:Transport"
    app.conf.broker_connection_timeout = 1
    return app


@contextmanager
def capture_events(app: Celery) -> Iterator[list[dict[str, Any]]]:
    """Run one of Celery's event receivers during the block; the list contains the events that it receives."""
    events: list[dict[str, Any]] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": events.append})
        thread = threading.Thread(target=receiver.capture, kwargs={"limit": None, "wakeup": False})
        with app.connection_for_write() as other:
            thread.start()
            client: Any = other.default_channel.client  # type: ignore[attr-defined]
            eventually(lambda: client.pubsub_numpat() or any(client.pubsub_channels()), "the receiver listens")
        try:
            yield events
        finally:
            receiver.should_stop = True
            thread.join()


def _relay(app: Celery, database: Database) -> Relay:
    return Relay("celery", database, TaskEventSink(app, database), holder="the relay")


def _start_write(store: JobStore, job_id: str, at_ms: int = T0) -> Write[bool]:
    return store.start_write(job_id, "gpu1", "gpu1-slot0", "lease", at_ms, 0, worker="worker@host", fleet="")


def _a_completed_job(store: JobStore) -> str:
    """Store a job that was started after a second and completed two seconds later, and return its id."""
    job_id = a_job_in(store, State.QUEUED).id
    store.database.commit(_start_write(store, job_id, T0 + SECOND))
    store_end(store, job_id, 1, Reason.FINISHED, T0 + 3 * SECOND)
    return job_id


def _types(events: list[dict[str, Any]], job_id: str) -> list[str]:
    return [event["type"].removeprefix("task-") for event in events if event.get("uuid") == job_id]


def test_each_transition_becomes_the_corresponding_task_events(
    app: Celery, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_FIRST_BATCH", "_MAX_BATCH"):
        monkeypatch.setattr(relay_module, name, 1)
    retried_id = a_running_job(store).job.id
    store_end(store, retried_id, 1, Reason.SERVER_ERROR, T0, error=JobError("server_error", "no"), due_ms=T0 + SECOND)
    expected = {
        a_job_in(store, State.QUEUED).id: ["sent"],
        a_delayed_job(store).id: ["sent"],
        retried_id: ["sent", "received", "started", "retried"],
        an_ended_job(store).id: ["sent", "received", "started", "succeeded"],
        an_ended_job(store, State.FAILED).id: ["sent", "received", "started", "failed"],
        a_job_in(store, State.CANCELED).id: ["sent", "received", "started", "revoked"],
    }
    with capture_events(app) as events:
        relay = _relay(app, store.database)
        while relay.relay_batch():
            pass
        eventually(lambda: len(events) >= sum(map(len, expected.values())), "all are received")
    assert {job_id: _types(events, job_id) for job_id in expected} == expected


def test_only_the_last_transition_of_a_job_in_a_batch_is_published(app: Celery, store: JobStore) -> None:
    ended_id = _a_completed_job(store)
    started_id = a_running_job(store).job.id
    store_end(store, started_id, 1, Reason.SERVER_BUSY, T0)
    a_start(store, started_id)
    expected = {ended_id: ["succeeded"], started_id: ["received", "started"], a_delayed_job(store).id: ["sent"]}
    with capture_events(app) as events:
        _relay(app, store.database).relay_batch()
        eventually(lambda: len(events) >= 4, "all are received")
    assert {job_id: _types(events, job_id) for job_id in expected} == expected
    state = app.events.State()
    for event in events:
        state.event(event)
    task = state.tasks[ended_id]
    times = (task.sent, task.received, task.started, task.succeeded)
    assert times == (T0 / 1000, T0 / 1000 + 1, T0 / 1000 + 1, T0 / 1000 + 3), "it describes its task completely"
    assert (task.worker.hostname, task.runtime) == ("worker@host", 2)


def test_jobs_beyond_the_limit_of_sent_events_are_published_when_they_start(
    app: Celery, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_events, "_MAX_SENT", 2)
    relay, job_ids = _relay(app, store.database), [a_job_in(store, State.QUEUED).id for _ in range(4)]
    with capture_events(app) as events:
        relay.relay_batch()
        for job_id in job_ids:
            store.database.commit(_start_write(store, job_id))
        relay.relay_batch()
        eventually(lambda: len(events) >= 10, "all are received")
    started = ["received", "started"]
    assert [_types(events, job_id) for job_id in job_ids] == [["sent", *started]] * 2 + [started] * 2


def test_the_run_of_a_job_is_not_read_from_the_database_if_its_start_was_published(
    app: Celery, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, job_id = _relay(app, store.database), a_job_in(store, State.QUEUED).id
    with capture_events(app) as events:
        store.database.commit(_start_write(store, job_id))
        relay.relay_batch()
        store_end(store, job_id, 1, Reason.FINISHED, T0 + 2 * SECOND)
        with monkeypatch.context() as patch:
            patch.setattr(TaskEventSink, "_read_runs", None)
            relay.relay_batch()
        eventually(lambda: len(events) == 3, "all are received")
    assert events[-1]["hostname"] == "worker@host"


def test_publishing_pauses_for_a_second_after_a_message_without_a_receiver(
    app: Celery, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(task_events, "time", SimpleNamespace(monotonic=lambda: now_s))
    relay = _relay(app, store.database)
    started_id = a_running_job(store).job.id
    relay.relay_batch()
    with capture_events(app) as events:
        now_s += 0.5
        unseen_id = a_job_in(store, State.QUEUED).id
        assert relay.relay_batch(), "the cursor moves on"
        now_s += 0.5
        store_end(store, started_id, 1, Reason.FINISHED, T0 + 2 * SECOND)
        relay.relay_batch()
        eventually(lambda: _types(events, started_id), "the last event is received")
    assert not _types(events, unseen_id)
    assert (_types(events, started_id), events[0]["runtime"]) == (["succeeded"], 2)


def test_an_event_has_the_worker_the_time_and_the_result_of_the_run(app: Celery, store: JobStore) -> None:
    relay, job_id = _relay(app, store.database), a_job_in(store, State.QUEUED).id
    with capture_events(app) as events:
        relay.relay_batch()
        store.database.commit(_start_write(store, job_id))
        relay.relay_batch()
        store_end(store, job_id, 1, Reason.FINISHED, T0 + 2 * SECOND, result='{"url":"x"}')
        relay.relay_batch()
        eventually(lambda: len(events) == 4, "all are received")
    assert [event["hostname"] for event in events] == [CLIENT_HOSTNAME, *["worker@host"] * 3]
    assert [event["timestamp"] for event in events] == [T0 / 1000, T0 / 1000, T0 / 1000, T0 / 1000 + 2]
    assert (events[-1]["runtime"], events[-1]["result"]) == (2, '{"url":"x"}')


def test_a_broker_receives_the_events_of_its_outage_in_order_after_the_outage(
    app: Celery, store: JobStore, broker: Valkey
) -> None:
    relay = _relay(app, store.database)
    job_id = a_running_job(store).job.id
    with capture_events(app):
        relay.relay_batch()
    broker.kill()
    store_end(store, job_id, 1, Reason.SERVER_BUSY, T0)
    with pytest.raises(SinkUnavailable):
        relay.relay_batch()
    broker.start()
    a_start(store, job_id)
    with capture_events(app) as events:
        relay.relay_batch()
        eventually(lambda: len(events) >= 2, "all are received")
    assert _types(events, job_id) == ["received", "started"]


def test_an_event_has_all_fields_of_its_task_for_a_new_receiver_and_a_new_relay(app: Celery, store: JobStore) -> None:
    job_id = a_job_in(store, State.QUEUED).id
    store.database.commit(_start_write(store, job_id))
    _relay(app, store.database).relay_batch()
    store_end(store, job_id, 1, Reason.FINISHED, T0 + 2 * SECOND)
    with capture_events(app) as events:
        _relay(app, store.database).relay_batch()
        eventually(lambda: len(events) == 1, "the event is received")
    state = app.events.State()
    state.event(events[0])
    task = state.tasks[job_id]
    assert (task.name, task.worker.hostname, task.runtime) == ("infer", "worker@host", 2)
    assert "'zimg'" in task.args


def test_the_host_name_of_jobs_without_a_worker_is_not_an_online_worker(app: Celery, store: JobStore) -> None:
    queued_id, retried_id = a_job_in(store, State.QUEUED).id, a_running_job(store).job.id
    store_end(store, retried_id, 1, Reason.SERVER_ERROR, T0, error=JobError("server_error", "no"), due_ms=T0 + SECOND)
    _relay(app, store.database).relay_batch()
    for job_id in (queued_id, retried_id):
        assert store.cancel_waiting(job_id, T0 + 2 * SECOND)
    with capture_events(app) as events:
        _relay(app, store.database).relay_batch()
        eventually(lambda: len(events) == 3, "all are received")
    state = app.events.State()
    for event in events:
        state.event(event)
    assert not any(worker.alive for worker in state.workers.values())
    assert [(event["type"], event["terminated"]) for event in events[:2]] == [("task-revoked", False)] * 2


def test_a_new_receiver_gets_the_events_of_queued_and_running_jobs(app: Celery, store: JobStore) -> None:
    queued_id, running_id, ended_id = (
        a_job_in(store, State.QUEUED).id,
        a_job_in(store, State.QUEUED).id,
        an_ended_job(store).id,
    )
    store.database.commit(_start_write(store, running_id, T0 + 9))
    with capture_events(app) as events:
        TaskEventSink(app, store.database).publish_active()
        eventually(lambda: len(events) == 3, "all are received")
    state = app.events.State()
    for event in events:
        state.event(event)
    assert {job_id: task.state for job_id, task in state.tasks.items()} == {queued_id: "PENDING", running_id: "STARTED"}
    assert (
        state.tasks[running_id].worker.hostname == "worker@host" and state.tasks[running_id].started == (T0 + 9) / 1000
    )
    assert ended_id not in state.tasks and CLIENT_HOSTNAME not in [
        worker.hostname for worker in state.workers.values() if worker.alive
    ]


def test_repeated_events_do_not_change_the_state_in_a_receiver(app: Celery, store: JobStore) -> None:
    job_id = a_job_in(store, State.QUEUED).id
    store.database.commit(_start_write(store, job_id))
    with capture_events(app) as events:
        TaskEventSink(app, store.database).publish_active()
        eventually(lambda: len(events) == 2, "both are received")
        store_end(store, job_id, 1, Reason.FINISHED, T0 + 2 * SECOND, result="1")
        _relay(app, store.database).relay_batch()
        eventually(lambda: len(events) == 3, "all are received")
    state = app.events.State()
    for event in [*events[2:], *events[:2]]:
        state.event(event)
    assert state.tasks[job_id].state == "SUCCESS"
