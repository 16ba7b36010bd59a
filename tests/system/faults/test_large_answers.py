"""A large answer disturbs no other run of its worker, and reaches the client that waits for it."""

import json

import pytest
from pytest_httpserver import HTTPServer

from tests.support.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

_WAITS = """
import json, os, sys
from celery import Celery
url = os.environ["SLOTKEEPER_REDIS_URL"]
client = Celery(broker=url, backend=url)
result = client.send_task("infer", args=[sys.stdin.read(), {}], queue="celery").get(timeout=60)
print(len(result["result"]))
"""


def _many_lists(httpserver: HTTPServer, cluster: Cluster, megabytes: int) -> str:
    """Register a model whose server answers so many MB of empty lists."""
    lists = b"[]," * (megabytes * 333_333) + b"[]"
    httpserver.expect_request("/many").respond_with_data(
        b'{"status":"success","result":[' + lists + b"]}", content_type="application/json"
    )
    model = f"many{megabytes}"
    assert cluster.api.call("PUT", f"/admin/model-configs/{model}", json={"preset": "generic-sync"}).ok
    server = {"model": model, "server": f"{model}-server", "endpoint": httpserver.url_for("/many"), "slots": 1}
    assert cluster.api.call("POST", "/admin/register", json=server).ok
    return model


def test_jobs_start_and_end_beside_an_answer_of_20_mb_of_small_lists(httpserver: HTTPServer, cluster: Cluster) -> None:
    cluster.ensure_workers(1)
    large, small = _many_lists(httpserver, cluster, 20), cluster.model(1)
    cluster.until(cluster.submit(small, 0.02), "completed")

    job_id = cluster.api.submit(large, {})
    ended_beside = 0
    while not ended_beside or cluster.row(job_id).state not in ("completed", "dead", "failed"):
        cluster.until(cluster.submit(small, 0.02), "completed")
        ended_beside += 1
    ended = cluster.row(job_id)
    assert (ended.state, ended.crashes, ended.attempt) == ("completed", 0, 1)
    assert ended.result is not None and len(ended.result) > 20_000_000 - 4
    assert ended_beside >= 2, "others ended while it was read"


def test_a_celery_client_gets_a_large_result_from_another_process(httpserver: HTTPServer, cluster: Cluster) -> None:
    (worker,) = cluster.ensure_workers(1)
    model = _many_lists(httpserver, cluster, 2)
    assert json.loads(cluster.stack.run_with_input(_WAITS, model)) == 666_667
    assert "notification_postponed" not in worker.log


def test_the_page_of_a_job_does_not_make_objects_of_very_many_parts(httpserver: HTTPServer, cluster: Cluster) -> None:
    cluster.ensure_workers(1)
    job_id = cluster.api.submit(_many_lists(httpserver, cluster, 1), {})
    cluster.until(job_id, "completed")
    shown = cluster.api.call("GET", f"/page/jobs/{job_id}")
    assert shown.status_code == 200 and "in very many parts" in shown.text and len(shown.text) < 200_000
