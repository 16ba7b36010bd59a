"""The database holds a notification for each Celery client until it is sent, after any crash and any outage."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from slotkeeper.db import Database
from slotkeeper.jobs.notifications import NOTIFY_AFTER_MS
from slotkeeper.jobs.states import Reason, State
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import JobError
from slotkeeper.outbox.result_notifications import ResultNotification, ResultNotifications
from tasks.results import ResultNotifier
from tests.support.builders import SECOND, T0, a_queued_job, a_running_job, an_ended_job
from tests.support.cluster import Cluster, started_cluster
from tests.support.ends import store_end
from tools.cluster.stack import eventually
from tools.cluster.valkey_process import Valkey

# -- the database ----------------------------------------------------------------------------------------------

FINAL = [State.COMPLETED, State.FAILED, State.EXPIRED, State.CANCELED, State.DEAD]


@pytest.fixture
def notifications(database: Database) -> ResultNotifications:
    return ResultNotifications(database)


def _due(notifications: ResultNotifications, now_ms: int) -> list[str]:
    return [notification.job_id for notification in notifications.claim_due(now_ms, 100)]


@pytest.mark.parametrize("state", FINAL)
def test_every_end_of_a_celery_job_stores_a_notification(
    store: JobStore, notifications: ResultNotifications, state: State
) -> None:
    job = an_ended_job(store, state, envelope="{}")
    assert _due(notifications, T0 + NOTIFY_AFTER_MS) == [job.id]


def test_a_job_canceled_before_its_start_stores_a_notification(
    store: JobStore, notifications: ResultNotifications
) -> None:
    job = a_queued_job(store, envelope="{}")
    moved = store.cancel_waiting(job.id, T0, JobError("canceled", "so"))
    assert moved is not None and moved.notification_id is not None
    assert notifications.is_pending(moved.notification_id)


def test_a_job_of_another_source_stores_no_notification(store: JobStore, notifications: ResultNotifications) -> None:
    run = a_running_job(store)
    moved = store_end(store, run.job.id, run.attempt, Reason.FINISHED, T0, result="{}")
    assert moved is not None and moved.notification_id is None
    assert _due(notifications, T0 + 3600 * SECOND) == []


def test_a_new_notification_is_not_due_before_the_delay(store: JobStore, notifications: ResultNotifications) -> None:
    an_ended_job(store, envelope="{}")
    assert _due(notifications, T0 + NOTIFY_AFTER_MS - 1) == []


def test_a_deleted_notification_is_never_due_again(store: JobStore, notifications: ResultNotifications) -> None:
    an_ended_job(store, envelope="{}")
    (notification,) = notifications.claim_due(T0 + NOTIFY_AFTER_MS, 100)
    notifications.delete([notification.id])
    assert not notifications.is_pending(notification.id)
    assert _due(notifications, T0 + 3600 * SECOND) == []


def test_a_claim_without_due_notifications_writes_nothing(database, monkeypatch) -> None:
    """The claim runs every five seconds, and a write waits for the disk."""
    monkeypatch.setattr(Database, "write", lambda *_, **__: pytest.fail("a write"))
    assert ResultNotifications(database).claim_due(T0, 100) == []


def test_a_claimed_notification_is_due_again_after_a_growing_delay(
    store: JobStore, notifications: ResultNotifications
) -> None:
    job = an_ended_job(store, envelope="{}")
    assert _due(notifications, T0 + NOTIFY_AFTER_MS) == [job.id]
    waits, now = [], T0 + NOTIFY_AFTER_MS
    for _ in range(12):
        begun = now
        while not _due(notifications, now):
            now += NOTIFY_AFTER_MS // 2
        waits.append(now - begun)
    assert waits == sorted(waits) and waits[0] >= NOTIFY_AFTER_MS
    assert waits[-1] <= 600 * SECOND + 2 * NOTIFY_AFTER_MS


def test_a_claim_returns_the_oldest_notifications_up_to_its_limit(
    store: JobStore, notifications: ResultNotifications
) -> None:
    ids = [an_ended_job(store, envelope="{}", now_ms=T0 + n).id for n in range(5)]
    found = [notification.job_id for notification in notifications.claim_due(T0 + 2 * NOTIFY_AFTER_MS, 3)]
    assert found == ids[:3]


def test_each_end_of_a_revived_job_stores_a_notification(store: JobStore, notifications: ResultNotifications) -> None:
    job = an_ended_job(store, State.DEAD, envelope="{}")
    (first,) = notifications.claim_due(T0 + NOTIFY_AFTER_MS, 100)
    store.revive(job.id, T0)
    moved = store.cancel_waiting(job.id, T0)
    notifications.delete([first.id])
    assert moved is not None and moved.notification_id is not None and notifications.is_pending(moved.notification_id)


def test_the_flush_of_a_stopping_worker_waits_until_all_notifications_are_sent(
    store: JobStore, notifications: ResultNotifications
) -> None:
    released, notified = threading.Event(), list[ResultNotification]()

    class Slow(ResultNotifier):
        def notify(self, batch: list[ResultNotification]) -> None:
            released.wait(30)
            notified.extend(batch)
            raise ValueError("an error in one batch ends no thread")

    notifier = Slow(notifications, store)
    assert notifier.flush(0.0), "no notification is in progress"
    notifier.put(ResultNotification("t1", "j1"))
    assert not notifier.flush(0.01)
    released.set()
    notifier.put(ResultNotification("t2", "j2"))
    assert notifier.flush(30) and [notification.id for notification in notified] == ["t1", "t2"]


# -- crashes between the end and its notification --------------------------------------------------------------


@contextmanager
def _bare_client(broker: Valkey | None, backend: Valkey | None) -> Iterator[Celery]:
    """A plain Celery client, without the tasks that it would share with other applications of this process."""
    assert broker is not None and backend is not None
    with Celery(broker=broker.url, backend=backend.url) as client:
        client.finalize()
        client.tasks.pop("infer", None)
        yield client


@pytest.fixture(scope="module")
def bare(cluster: Cluster) -> Iterator[Celery]:
    with _bare_client(cluster.stack.valkey, cluster.stack.valkey) as client:
        yield client


def _infer(bare: Celery, model: str, prompt: str, **payload: Any) -> Any:
    takes = {"prompt": prompt, "seconds": 0.01} | payload
    return bare.signature("infer", args=(model, takes), immutable=True, app=bare)


def _until(cluster: Cluster, sent: AsyncResult, state: str) -> None:
    """Wait until the job exists and is in this state."""
    eventually(lambda: cluster.store.get_state(sent.id) == state, f"{sent.id} is {state}", 60)


@pytest.mark.e2e
@pytest.mark.parametrize("point", ["slot_passed_on", "settle_committed", "result_notified"])
def test_a_chain_continues_although_its_worker_dies_after_the_end_of_a_step(
    cluster: Cluster, bare: Celery, point: str
) -> None:
    cluster.ensure_workers(0)
    worker = cluster.start_worker(SLOTKEEPER_CRASH_AT=point)
    model = cluster.model(2)
    linked = _infer(bare, model, "linked").set(task_id=f"linked-{point}")
    sent = chain(
        _infer(bare, model, "first").set(link=[linked]),
        _infer(bare, model, "second"),
        _infer(bare, model, "third"),
    ).apply_async()
    first = sent.parent.parent
    worker.popen.wait(60)
    cluster.ensure_workers(1)
    _until(cluster, first, "completed")
    assert sent.get(timeout=90)["prompt"] == "third"
    assert first.get(timeout=10)["prompt"] == "first"
    cluster.until(linked.options["task_id"], "completed")
    assert [run["job_id"] for run in cluster.runs(model)].count(sent.parent.id) == 1


@pytest.mark.e2e
def test_a_chord_counts_each_part_once_after_a_repeated_notification(cluster: Cluster, bare: Celery) -> None:
    cluster.ensure_workers(0)
    worker = cluster.start_worker(SLOTKEEPER_CRASH_AT="result_notified")
    model = cluster.model(2)
    header = [_infer(bare, model, str(n)) for n in range(3)]
    body = _infer(bare, model, "body").set(task_id="the-body")
    sent = chord(header)(body)
    worker.popen.wait(60)
    cluster.ensure_workers(1)
    assert sent.get(timeout=90)["prompt"] == "body"
    assert [run["job_id"] for run in cluster.runs(model)].count("the-body") == 1


# -- an outage of the backend ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("results"), appendonly=True) as valkey:
        yield valkey


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, results: Valkey) -> Iterator[Cluster]:
    """An installation whose result backend is a separate Valkey."""
    with started_cluster(tmp_path_factory.mktemp("apart"), SLOTKEEPER_RESULT_URL=results.url) as found:
        yield found


@pytest.mark.e2e
def test_ends_during_an_outage_of_the_result_backend_are_notified_after_it(apart: Cluster, results: Valkey) -> None:
    apart.ensure_workers(1)
    model, gate = apart.model(8), apart.gate()
    with _bare_client(apart.stack.valkey, results) as bare:
        before = _infer(bare, model, "before").apply_async()
        assert before.get(timeout=60)["prompt"] == "before"
        together = group(_infer(bare, model, str(n), **gate.payload) for n in range(3)).apply_async()
        chained = chain(_infer(bare, model, "a", **gate.payload), _infer(bare, model, "b")).apply_async()
        failing = _infer(bare, model, "x", fail="invalid", **gate.payload).apply_async()
        delayed = _infer(bare, model, "d").apply_async(countdown=600)
        apart.sent(model, 5)
        _until(apart, delayed, "delayed")

        results.kill()
        gate.open()
        apart.api.call("POST", f"/queue/jobs/{delayed.id}/cancel")
        for part in (*together.results, chained.parent):  # type: ignore[attr-defined]
            apart.until(part.id, "completed")
        apart.until(failing.id, "failed")
        apart.until(delayed.id, "canceled")
        with closing(Database(apart.store.database.url)) as database:
            eventually(lambda: len(_pending_ids(database)) == 6, "all notifications are pending")
        _worker_has_threads_to_spare(apart, model)
        results.start()

        def is_all_notified() -> bool:
            following = apart.store.get(chained.id)
            return following is not None and following.state is State.COMPLETED and _pending_ids(database) == []

        with closing(Database(apart.store.database.url)) as database:
            eventually(is_all_notified, "no notification is pending any more", 90)

        # Celery's client misses a notification between its first look and its new subscription, so it asks only here.
        _drop_connections(bare)
        assert sorted(found["prompt"] for found in together.get(timeout=90)) == ["0", "1", "2"]
        assert chained.get(timeout=90)["prompt"] == "b"
        assert _result(bare, failing.id).get(timeout=90, propagate=False).__class__.__name__ == "JobFailed"
        with pytest.raises(TaskRevokedError):
            _result(bare, delayed.id).get(timeout=90)


def _pending_ids(database: Database) -> list[str]:
    with database.read() as connection:
        return [row[0] for row in connection.exec_driver_sql("SELECT id FROM result_notifications").all()]


def _worker_has_threads_to_spare(apart: Cluster, model: str) -> None:
    """Check that none of the worker's eight threads hangs on the backend."""
    ids = [apart.submit(model, 0.01) for _ in range(16)]
    for job_id in ids:
        apart.until(job_id, "completed")


def _drop_connections(bare: Celery) -> None:
    bare.backend.client.connection_pool.disconnect()  # type: ignore[attr-defined]


def _result(bare: Celery, job_id: str) -> AsyncResult:
    return AsyncResult(job_id, app=bare)
