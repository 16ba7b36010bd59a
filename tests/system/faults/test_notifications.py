"""What Celery's clients wait for is owed in the record until they have been told: after any death, after any outage."""

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
from tests.support.ends import store_end
from tests.support.town import Town, started_town
from tools.cluster.stack import eventually
from tools.cluster.valkey_process import Valkey

# -- the record ------------------------------------------------------------------------------------------------

FINAL = [State.COMPLETED, State.FAILED, State.EXPIRED, State.CANCELED, State.DEAD]


@pytest.fixture
def owed(database: Database) -> ResultNotifications:
    return ResultNotifications(database)


def _due(owed: ResultNotifications, now_ms: int) -> list[str]:
    return [telling.job_id for telling in owed.claim_due(now_ms, 100)]


@pytest.mark.parametrize("state", FINAL)
def test_every_end_of_a_job_that_came_by_celery_is_owed(
    store: JobStore, owed: ResultNotifications, state: State
) -> None:
    job = an_ended_job(store, state, envelope="{}")
    assert _due(owed, T0 + NOTIFY_AFTER_MS) == [job.id]


def test_an_end_before_the_start_is_owed(store: JobStore, owed: ResultNotifications) -> None:
    job = a_queued_job(store, envelope="{}")
    moved = store.cancel_waiting(job.id, T0, JobError("canceled", "so"))
    assert moved is not None and moved.notification_id is not None
    assert owed.is_pending(moved.notification_id)


def test_a_job_that_came_by_another_way_owes_nothing(store: JobStore, owed: ResultNotifications) -> None:
    run = a_running_job(store)
    moved = store_end(store, run.job.id, run.attempt, Reason.FINISHED, T0, result="{}")
    assert moved is not None and moved.notification_id is None
    assert _due(owed, T0 + 3600 * SECOND) == []


def test_whoever_ended_a_job_tells_it_before_anybody_else_looks(store: JobStore, owed: ResultNotifications) -> None:
    an_ended_job(store, envelope="{}")
    assert _due(owed, T0 + NOTIFY_AFTER_MS - 1) == []


def test_what_was_told_is_owed_no_more(store: JobStore, owed: ResultNotifications) -> None:
    an_ended_job(store, envelope="{}")
    (telling,) = owed.claim_due(T0 + NOTIFY_AFTER_MS, 100)
    owed.delete([telling.id])
    assert not owed.is_pending(telling.id)
    assert _due(owed, T0 + 3600 * SECOND) == []


def test_where_nothing_is_due_nothing_is_written(database, monkeypatch) -> None:
    """It is asked every five seconds, and a write waits for the disk."""
    monkeypatch.setattr(Database, "write", lambda *_, **__: pytest.fail("a write"))
    assert ResultNotifications(database).claim_due(T0, 100) == []


def test_what_was_claimed_falls_due_again_and_later_each_time(store: JobStore, owed: ResultNotifications) -> None:
    job = an_ended_job(store, envelope="{}")
    assert _due(owed, T0 + NOTIFY_AFTER_MS) == [job.id]
    waits, now = [], T0 + NOTIFY_AFTER_MS
    for _ in range(12):
        begun = now
        while not _due(owed, now):
            now += NOTIFY_AFTER_MS // 2
        waits.append(now - begun)
    assert waits == sorted(waits) and waits[0] >= NOTIFY_AFTER_MS
    assert waits[-1] <= 600 * SECOND + 2 * NOTIFY_AFTER_MS


def test_the_oldest_is_told_first_and_only_so_many_at_once(store: JobStore, owed: ResultNotifications) -> None:
    ids = [an_ended_job(store, envelope="{}", now_ms=T0 + n).id for n in range(5)]
    found = [telling.job_id for telling in owed.claim_due(T0 + 2 * NOTIFY_AFTER_MS, 3)]
    assert found == ids[:3]


def test_each_end_of_a_revived_job_is_owed(store: JobStore, owed: ResultNotifications) -> None:
    job = an_ended_job(store, State.DEAD, envelope="{}")
    (first,) = owed.claim_due(T0 + NOTIFY_AFTER_MS, 100)
    store.revive(job.id, T0)
    moved = store.cancel_waiting(job.id, T0)
    owed.delete([first.id])
    assert moved is not None and moved.notification_id is not None and owed.is_pending(moved.notification_id)


def test_a_worker_that_stops_in_order_waits_until_what_is_on_its_way_is_told(
    store: JobStore, owed: ResultNotifications
) -> None:
    let_go, told = threading.Event(), list[ResultNotification]()

    class Slow(ResultNotifier):
        def notify(self, batch: list[ResultNotification]) -> None:
            let_go.wait(30)
            told.extend(batch)
            raise ValueError("what is wrong with one ends no thread")

    teller = Slow(owed, store)
    assert teller.flush(0.0), "nothing is on its way"
    teller.put(ResultNotification("t1", "j1"))
    assert not teller.flush(0.01)
    let_go.set()
    teller.put(ResultNotification("t2", "j2"))
    assert teller.flush(30) and [it.id for it in told] == ["t1", "t2"]


# -- deaths between the end and the telling --------------------------------------------------------------------


@contextmanager
def _bare_client(broker: Valkey | None, backend: Valkey | None) -> Iterator[Celery]:
    """Nothing but Celery: tasks of other applications in this process are shared with it, and so taken out."""
    assert broker is not None and backend is not None
    with Celery(broker=broker.url, backend=backend.url) as client:
        client.finalize()
        client.tasks.pop("infer", None)
        yield client


@pytest.fixture(scope="module")
def bare(town: Town) -> Iterator[Celery]:
    with _bare_client(town.stack.valkey, town.stack.valkey) as client:
        yield client


def _infer(bare: Celery, model: str, prompt: str, **payload: Any) -> Any:
    takes = {"prompt": prompt, "seconds": 0.01} | payload
    return bare.signature("infer", args=(model, takes), immutable=True, app=bare)


def _until(town: Town, sent: AsyncResult, state: str) -> None:
    """Wait until the job is there, and in this state."""
    eventually(lambda: town.store.get_state(sent.id) == state, f"{sent.id} is {state}", 60)


@pytest.mark.e2e
@pytest.mark.parametrize("point", ["slot_passed_on", "settle_committed", "result_notified"])
def test_a_chain_goes_on_whenever_its_worker_dies_after_the_end_of_a_step(town: Town, bare: Celery, point: str) -> None:
    town.crew(0)
    worker = town.hire(SLOTKEEPER_CRASH_AT=point)
    model = town.model(2)
    linked = _infer(bare, model, "linked").set(task_id=f"linked-{point}")
    sent = chain(
        _infer(bare, model, "first").set(link=[linked]),
        _infer(bare, model, "second"),
        _infer(bare, model, "third"),
    ).apply_async()
    first = sent.parent.parent
    worker.popen.wait(60)
    town.crew(1)
    _until(town, first, "completed")
    assert sent.get(timeout=90)["prompt"] == "third"
    assert first.get(timeout=10)["prompt"] == "first"
    town.until(linked.options["task_id"], "completed")
    assert [run["job_id"] for run in town.runs(model)].count(sent.parent.id) == 1


@pytest.mark.e2e
def test_a_chord_counts_each_part_once_though_it_is_told_twice(town: Town, bare: Celery) -> None:
    town.crew(0)
    worker = town.hire(SLOTKEEPER_CRASH_AT="result_notified")
    model = town.model(2)
    header = [_infer(bare, model, str(n)) for n in range(3)]
    body = _infer(bare, model, "body").set(task_id="the-body")
    sent = chord(header)(body)
    worker.popen.wait(60)
    town.crew(1)
    assert sent.get(timeout=90)["prompt"] == "body"
    assert [run["job_id"] for run in town.runs(model)].count("the-body") == 1


# -- an outage of the backend ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("results"), appendonly=True) as valkey:
        yield valkey


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, results: Valkey) -> Iterator[Town]:
    """A town whose result backend is a Valkey of its own."""
    with started_town(tmp_path_factory.mktemp("apart"), SLOTKEEPER_RESULT_URL=results.url) as found:
        yield found


@pytest.mark.e2e
def test_what_ended_while_the_result_backend_was_away_is_told_when_it_is_back(apart: Town, results: Valkey) -> None:
    apart.crew(1)
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
            eventually(lambda: len(_owed(database)) == 6, "all of it is owed")
        _worker_has_threads_to_spare(apart, model)
        results.start()

        def is_all_told() -> bool:
            following = apart.store.get(chained.id)
            return following is not None and following.state is State.COMPLETED and _owed(database) == []

        with closing(Database(apart.store.database.url)) as database:
            eventually(is_all_told, "nothing is owed any more", 90)

        # Celery's client misses what is told between its first look and its new subscription: so nobody asks earlier.
        _drop_connections(bare)
        assert sorted(found["prompt"] for found in together.get(timeout=90)) == ["0", "1", "2"]
        assert chained.get(timeout=90)["prompt"] == "b"
        assert _result(bare, failing.id).get(timeout=90, propagate=False).__class__.__name__ == "JobFailed"
        with pytest.raises(TaskRevokedError):
            _result(bare, delayed.id).get(timeout=90)


def _owed(database: Database) -> list[str]:
    with database.read() as connection:
        return [row[0] for row in connection.exec_driver_sql("SELECT id FROM result_notifications").all()]


def _worker_has_threads_to_spare(apart: Town, model: str) -> None:
    """The town's workers have eight: none of them hangs on the backend."""
    ids = [apart.submit(model, 0.01) for _ in range(16)]
    for job_id in ids:
        apart.until(job_id, "completed")


def _drop_connections(bare: Celery) -> None:
    bare.backend.client.connection_pool.disconnect()  # type: ignore[attr-defined]


def _result(bare: Celery, job_id: str) -> AsyncResult:
    return AsyncResult(job_id, app=bare)
