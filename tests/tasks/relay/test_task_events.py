"""Celery's task events are made from the outbox: a receiver gets each job's life, in order and at least once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from slotkeeper.db import Database
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import JobError
from tasks.relay.relay import Relay
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
    found = Celery("events", broker=broker.url, set_as_current=False)
    found.conf.broker_connection_timeout = 1
    return found


@contextmanager
def received(app: Celery) -> Iterator[list[dict[str, Any]]]:
    """The events that a receiver of Celery's gets while the block lasts."""
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


def _types(events: list[dict[str, Any]], job_id: str) -> list[str]:
    return [it["type"].removeprefix("task-") for it in events if it.get("uuid") == job_id]


def test_each_transition_is_the_task_event_that_says_the_same(app: Celery, store: JobStore) -> None:
    retried = a_running_job(store).job.id
    store_end(store, retried, 1, Reason.SERVER_ERROR, T0, error=JobError("server_error", "no"), due_ms=T0 + SECOND)
    lives = {
        a_job_in(store, State.QUEUED).id: ["sent"],
        a_delayed_job(store).id: ["sent"],
        retried: ["sent", "received", "started", "retried"],
        an_ended_job(store).id: ["sent", "received", "started", "succeeded"],
        an_ended_job(store, State.FAILED).id: ["sent", "received", "started", "failed"],
        a_job_in(store, State.CANCELED).id: ["sent", "received", "started", "revoked"],
    }
    with received(app) as events:
        _relay(app, store.database).relay_batch()
        eventually(lambda: len(events) >= sum(map(len, lives.values())), "all are received")
    assert {job_id: _types(events, job_id) for job_id in lives} == lives


def test_an_event_names_the_worker_the_time_and_what_came_of_the_run(app: Celery, store: JobStore) -> None:
    job_id = a_job_in(store, State.QUEUED).id
    store.database.commit(
        store.start_write(job_id, "gpu1", "gpu1-slot0", "lease", T0, 0, worker="worker@host", fleet="")
    )
    store_end(store, job_id, 1, Reason.FINISHED, T0 + 2 * SECOND, result='{"url":"x"}')
    with received(app) as events:
        _relay(app, store.database).relay_batch()
        eventually(lambda: len(events) == 4, "all are received")
    assert [it["hostname"] for it in events] == [CLIENT_HOSTNAME, *["worker@host"] * 3]
    assert [it["timestamp"] for it in events] == [T0 / 1000, T0 / 1000, T0 / 1000, T0 / 1000 + 2]
    assert (events[-1]["runtime"], events[-1]["result"]) == (2, '{"url":"x"}')


def test_a_broker_that_was_away_gets_every_event_in_order_when_it_is_back(
    app: Celery, store: JobStore, broker: Valkey
) -> None:
    relay = _relay(app, store.database)
    first = a_running_job(store)
    relay.relay_batch()
    broker.kill()
    store_end(store, first.job.id, 1, Reason.SERVER_BUSY, T0)
    with pytest.raises(SinkUnavailable):
        relay.relay_batch()
    broker.start()
    a_start(store, first.job.id)
    with received(app) as events:
        relay.relay_batch()
        eventually(lambda: len(events) >= 3, "all are received")
    assert _types(events, first.job.id) == ["retried", "received", "started"]


def test_an_event_is_whole_for_a_receiver_and_a_relay_that_came_late(app: Celery, store: JobStore) -> None:
    job_id = a_job_in(store, State.QUEUED).id
    store.database.commit(
        store.start_write(job_id, "gpu1", "gpu1-slot0", "lease", T0, 0, worker="worker@host", fleet="")
    )
    _relay(app, store.database).relay_batch()
    store_end(store, job_id, 1, Reason.FINISHED, T0 + 2 * SECOND)
    with received(app) as events:
        _relay(app, store.database).relay_batch()
        eventually(lambda: len(events) == 1, "it is received")
    state = app.events.State()
    state.event(events[0])
    task = state.tasks[job_id]
    assert (task.name, task.worker.hostname, task.runtime) == ("infer", "worker@host", 2)
    assert "'zimg'" in task.args


def test_no_worker_is_online_by_the_name_of_jobs_that_none_had(app: Celery, store: JobStore) -> None:
    waits, retried = a_job_in(store, State.QUEUED).id, a_running_job(store).job.id
    store_end(store, retried, 1, Reason.SERVER_ERROR, T0, error=JobError("server_error", "no"), due_ms=T0 + SECOND)
    _relay(app, store.database).relay_batch()
    for job_id in (waits, retried):
        assert store.cancel_waiting(job_id, T0 + 2 * SECOND)
    with received(app) as events:
        _relay(app, store.database).relay_batch()
        eventually(lambda: len(events) == 3, "all are received")
    state = app.events.State()
    for event in events:
        state.event(event)
    assert not any(worker.alive for worker in state.workers.values())
    assert [(it["type"], it["terminated"]) for it in events[:2]] == [("task-revoked", False)] * 2


def test_a_receiver_that_comes_late_is_told_of_what_waits_and_runs(app: Celery, store: JobStore) -> None:
    waits, runs, ended = a_job_in(store, State.QUEUED).id, a_job_in(store, State.QUEUED).id, an_ended_job(store).id
    store.database.commit(
        store.start_write(runs, "gpu1", "gpu1-slot0", "lease", T0 + 9, 0, worker="worker@host", fleet="")
    )
    with received(app) as events:
        TaskEventSink(app, store.database).publish_active()
        eventually(lambda: len(events) == 3, "all are received")
    state = app.events.State()
    for event in events:
        state.event(event)
    assert {job_id: task.state for job_id, task in state.tasks.items()} == {waits: "PENDING", runs: "STARTED"}
    assert state.tasks[runs].worker.hostname == "worker@host" and state.tasks[runs].started == (T0 + 9) / 1000
    assert ended not in state.tasks and CLIENT_HOSTNAME not in [
        it.hostname for it in state.workers.values() if it.alive
    ]


def test_a_receiver_that_knew_better_is_not_misled(app: Celery, store: JobStore) -> None:
    job_id = a_job_in(store, State.QUEUED).id
    store.database.commit(
        store.start_write(job_id, "gpu1", "gpu1-slot0", "lease", T0, 0, worker="worker@host", fleet="")
    )
    with received(app) as events:
        TaskEventSink(app, store.database).publish_active()
        eventually(lambda: len(events) == 2, "both are received")
        store_end(store, job_id, 1, Reason.FINISHED, T0 + 2 * SECOND, result="1")
        _relay(app, store.database).relay_batch()
        eventually(lambda: len(events) == 6, "all are received")
    state = app.events.State()
    for event in [*events[2:], *events[:2]]:
        state.event(event)
    assert state.tasks[job_id].state == "SUCCESS"
