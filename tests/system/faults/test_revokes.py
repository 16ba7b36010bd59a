"""Celery's revoke cancels a job through any worker; with real processes and a client that has only Celery."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from socket import gethostname
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from celery.worker.state import revoked
from redis.exceptions import ConnectionError

from tasks.inference import InferRequest, infer
from tests.support.cluster import Cluster
from tests.support.gated import Gate
from tests.support.task_messages import received
from tools.cluster.stack import eventually

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def bare(cluster: Cluster) -> Iterator[Celery]:
    assert cluster.stack.valkey is not None
    with Celery(broker=cluster.stack.valkey.url, backend=cluster.stack.valkey.url) as client:
        yield client


def _send(bare: Celery, model: str, run: float | Gate, **options: Any) -> AsyncResult:
    takes = run.payload if isinstance(run, Gate) else {"seconds": run}
    return bare.send_task("infer", args=[model, takes | {"prompt": "a cat"}], **options)


def _answered(ask: Callable[[], object]) -> object:
    """What workers answer; None: the client's connection was an old one, and the next is new."""
    with suppress(ConnectionError):
        return ask()
    return None


def _admitted(cluster: Cluster, sent: AsyncResult, state: str = "queued") -> None:
    eventually(lambda: cluster.store.get_state(sent.id) == state, f"{sent.id} is {state}")


def _is_revoked(cluster: Cluster, sent: AsyncResult) -> None:
    with pytest.raises(TaskRevokedError):
        sent.get(timeout=60)
    assert (sent.state, cluster.row(sent.id).state) == ("REVOKED", "canceled")


def _revoke(bare: Celery, sent: AsyncResult) -> None:
    sent.revoke()


def _terminate(bare: Celery, sent: AsyncResult) -> None:
    sent.revoke(terminate=True, signal="SIGKILL")


def _terminate_by_control(bare: Celery, sent: AsyncResult) -> None:
    bare.control.terminate([sent.id])


Way = Callable[[Celery, AsyncResult], None]
WAYS = [_revoke, _terminate, _terminate_by_control]


@pytest.mark.parametrize("revoke", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_a_revoked_waiting_job_is_canceled_and_delays_no_other_job(cluster: Cluster, bare: Celery, revoke: Way) -> None:
    cluster.ensure_workers(2)
    model, gate = cluster.model(), cluster.gate()
    first = _send(bare, model, gate)
    cluster.sent(model)
    second, last = _send(bare, model, 0.01), _send(bare, model, 0.01)
    for sent in (second, last):
        _admitted(cluster, sent)
    revoke(bare, second)
    _is_revoked(cluster, second)
    gate.open()
    for sent in (first, last):
        assert sent.get(timeout=60)["prompt"] == "a cat"
    assert cluster.starts(second.id) == 0


def test_a_revoked_job_that_is_delayed_is_canceled(cluster: Cluster, bare: Celery) -> None:
    cluster.ensure_workers(1)
    sent = _send(bare, cluster.model(), 0.01, countdown=600)
    _admitted(cluster, sent, "delayed")
    sent.revoke()
    _is_revoked(cluster, sent)


@pytest.mark.parametrize("revoke", WAYS, ids=lambda way: way.__name__.strip("_"))
@pytest.mark.parametrize("polled", [False, True], ids=["sync", "polled"])
def test_a_revoked_job_that_runs_is_stopped_by_its_server(
    cluster: Cluster, bare: Celery, revoke: Way, polled: bool
) -> None:
    cluster.ensure_workers(2)
    model = cluster.polled_model() if polled else cluster.model()
    sent = _send(bare, model, cluster.gate())
    cluster.sent(model)
    revoke(bare, sent)
    _is_revoked(cluster, sent)
    assert _send(bare, model, 0.01).get(timeout=60)["prompt"] == "a cat", "and its slot is free"


def test_maintenance_executes_a_revoke_while_no_worker_runs(cluster: Cluster, bare: Celery) -> None:
    """The wake-up of the offered job lies at the broker; maintenance receives the revoke."""

    def is_offered() -> bool:
        cluster.cut_off()
        return bool(cluster.lease(model, offered))

    cluster.ensure_workers(0)
    model = cluster.model()
    offered, last = cluster.submit(model, 0.01), cluster.submit(model, 0.01)
    eventually(is_offered, "the first is offered")
    bare.control.revoke([offered])
    cluster.until(offered, "canceled")
    cluster.ensure_workers(1)
    cluster.until(last, "completed")
    assert cluster.starts(offered) == 0


def test_a_message_that_is_revoked_before_its_admission_never_becomes_a_job(cluster: Cluster, bare: Celery) -> None:
    cluster.ensure_workers(0)
    worker = cluster.start_worker()
    model = cluster.model()
    consuming = bare.control.inspect(destination=[f"{worker.name}@{gethostname()}"])
    eventually(lambda: _answered(consuming.ping), "the worker answers")
    sent_id = "revoked-before-it-was-sent"
    bare.control.revoke(sent_id)
    eventually(lambda: sent_id in str(_answered(consuming.revoked)), "the worker has received the revoke")
    sent = _send(bare, model, 0.01, task_id=sent_id)
    with pytest.raises(TaskRevokedError):
        sent.get(timeout=60)
    assert cluster.store.get(sent_id) is None


def test_a_revoke_of_an_ended_job_changes_nothing(cluster: Cluster, bare: Celery) -> None:
    cluster.ensure_workers(2)
    sent = _send(bare, cluster.model(), 0.01)
    assert sent.get(timeout=60)["prompt"] == "a cat"
    other = _send(bare, "nobody-serves-it", 0.01, countdown=600)
    sent.revoke(terminate=True)
    other.revoke()
    assert (sent.state, cluster.row(sent.id).state) == ("SUCCESS", "completed")


def test_a_revoke_by_stamped_headers_is_refused_with_the_reason(cluster: Cluster, bare: Celery) -> None:
    cluster.ensure_workers(1)
    (answer,) = bare.control.revoke_by_stamped_headers({"batch": "b1"}, reply=True, timeout=5, limit=1)
    assert "by their ids" in next(iter(answer.values()))["ok"]


@pytest.mark.parametrize("headers", [{}, {"slotkeeper": {}}])
def test_no_message_of_a_job_is_dropped_as_revoked(headers: dict[str, Any]) -> None:
    """Without the message, the job's offer would hold a slot that no run uses."""
    message = infer.app.amqp.as_task_v2("revoked-one", "infer", args=("zimg",))
    revoked.add("revoked-one")
    try:
        request = InferRequest(received(message._replace(headers=message.headers | headers)), task=infer, app=infer.app)
        assert request.revoked() is False
    finally:
        revoked.discard("revoked-one")
