"""Jobs, maintenance and bare clients with each broker: Redis, and RabbitMQ with classic and with quorum queues."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from tests.support.cluster import Cluster, ready, started_cluster
from tools.cluster.rabbitmq_process import NoRabbitMQ, RabbitMQ
from tools.cluster.stack import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    try:
        with RabbitMQ(tmp_path_factory.mktemp("rabbitmq")) as node:
            yield node
    except NoRabbitMQ as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module", params=["redis", "classic", "quorum"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A new installation whose processes and clients use this broker."""
    env: dict[str, str] = {}
    if request.param != "redis":
        node = request.getfixturevalue("rabbitmq")
        url = node.url if request.param == "classic" else node.quorum_url()
        env = {"SLOTKEEPER_BROKER_URL": url, "SLOTKEEPER_BROKER_QUEUES": request.param}
    with started_cluster(tmp_path_factory.mktemp(request.param), **env) as found:
        yield found


def _bare(cluster: Cluster) -> Celery:
    assert cluster.stack.valkey is not None
    app = Celery(broker=cluster.stack.env.get("SLOTKEEPER_BROKER_URL", cluster.stack.valkey.url), set_as_current=False)
    app.conf.result_backend = cluster.stack.valkey.url
    app.conf.task_default_queue_type = cluster.stack.env.get("SLOTKEEPER_BROKER_QUEUES", "classic")
    return app


def test_a_bare_client_gets_its_result_and_a_job_is_tried_again(cluster: Cluster) -> None:
    """A retry comes back by maintenance, which receives its messages by this broker."""
    cluster.ensure_workers(1)
    model = cluster.model(1, retry_backoff=0.1)
    with _bare(cluster) as bare:
        sent = bare.send_task("infer", args=[model, {"prompt": "bare", "fail": "error", "fail_attempts": 1}])
        assert sent.get(timeout=60)["prompt"] == "bare"
    assert cluster.row(sent.id).failures == 1


def test_a_message_starts_a_job_and_inspect_shows_the_job(cluster: Cluster) -> None:
    cluster.ensure_workers(1)
    model, gate = cluster.model(1), cluster.gate()
    job = cluster.submit(model, gate)
    cluster.sent(model)
    with _bare(cluster) as bare:
        found: Any = eventually(lambda: bare.control.inspect(timeout=3).active(), "the workers answer")
        assert job in [run["id"] for runs in found.values() for run in runs]
    gate.open()
    cluster.until(job, "completed")


def test_no_process_loses_its_connection(cluster: Cluster) -> None:
    for process in [*cluster.ensure_workers(1), cluster.stack.processes["maintenance"]]:
        ready(process)
        assert process.log.count("ready.") == 1, "it has connected once"
        assert "Traceback" not in process.log


@pytest.mark.parametrize("cluster", ["classic", "quorum"], indirect=True)
def test_a_memory_alarm_of_rabbitmq_stops_no_process_and_no_job(cluster: Cluster, rabbitmq: RabbitMQ) -> None:
    (worker,) = cluster.ensure_workers(1)
    model, gate = cluster.model(1), cluster.gate()
    accepted = [cluster.submit(model, gate)]
    cluster.sent(model)
    accepted.append(cluster.submit(model, 0.01))

    rabbitmq.run("set_vm_memory_high_watermark", "absolute", "1MB")
    try:
        eventually(lambda: "memory" in rabbitmq.run("eval", "rabbit_alarm:get_alarms()."), "the alarm")
        accepted.append(cluster.submit(model, 0.01))
        gate.open()
        for job_id in accepted:
            cluster.until(job_id, "completed", within_s=30)
    finally:
        rabbitmq.run("set_vm_memory_high_watermark", "0.4")
    accepted.append(cluster.submit(model, 0.01))
    cluster.until(accepted[-1], "completed", within_s=30)
    jobs = [cluster.row(job_id) for job_id in accepted]
    assert [(job.attempt, job.crashes, job.failures) for job in jobs] == [(1, 0, 0)] * len(jobs)
    assert [run["job_id"] for run in cluster.runs(model)] == accepted, "each ran once, in order"
    processes = [worker, *(cluster.stack.processes[name] for name in ("maintenance", "beat", "web"))]
    assert [process.name for process in processes if process.popen.poll() is not None] == []
