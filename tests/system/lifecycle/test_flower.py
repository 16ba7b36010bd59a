"""Flower, as `slotkeeper up` runs it: every page requires the password, and it shows every job."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from flower.urls import handlers
from tornado.web import URLSpec

from app.up.ports import free_port
from tests.support.cluster import Cluster, started_cluster
from tools.cluster.stack import BIN, Stack, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

# Its own style sheets and pages without content, which anybody can get where it is published.
OPEN = (r"/static/(.*)", r".*", r"/login/?", "/logout")
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH")


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, tuple[str, str]]]:
    """Flower's URL, and its user name and password."""
    home, port = tmp_path_factory.mktemp("flower"), free_port()
    with Stack(home, {"SLOTKEEPER_FLOWER_PORT": str(port)}) as stack:
        process = stack.start("flower", [str(BIN / "slotkeeper"), "flower"])
        url = f"http://127.0.0.1:{port}"
        process.source(lambda: _status("GET", f"{url}/healthcheck"), "it answers")
        yield url, ("slotkeeper", Path(home, "flower-password").read_text().strip())


def _status(method: str, url: str, auth: tuple[str, str] | None = None) -> int:
    try:
        return requests.request(method, url, auth=auth, timeout=10, allow_redirects=False).status_code
    except requests.ConnectionError:
        return 0


def _addresses() -> list[str]:
    patterns = [
        handler.regex.pattern.removesuffix("$") if isinstance(handler, URLSpec) else handler[0] for handler in handlers
    ]
    return [re.sub(r"\(.[+*]\)", "x", pattern) for pattern in patterns if pattern not in OPEN]


def test_flower_shows_and_does_nothing_without_its_password(flower: tuple[str, tuple[str, str]]) -> None:
    url, _ = flower
    asked = _addresses()
    assert {"/metrics", "/healthcheck", "/api/task/send-task/x", "/tasks"} <= set(asked)
    for who in (None, ("slotkeeper", ""), ("slotkeeper", "wrong"), ("", "")):
        shown = {(method, path): _status(method, url + path, who) for path in asked for method in METHODS}
        # 403: no token against forged requests; 405: not a method there.
        assert {request: status for request, status in shown.items() if status not in (401, 403, 404, 405)} == {}
        assert {shown["GET", path] for path in ("/", "/metrics", "/healthcheck", "/tasks", "/api/workers")} == {401}


def test_flower_is_served_to_a_client_with_the_password(flower: tuple[str, tuple[str, str]]) -> None:
    url, who = flower
    assert {_status("GET", url + path, who) for path in ("/", "/metrics", "/healthcheck", "/tasks")} == {200}


# -- the life of a job ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Callable[[str], dict[str, Any]]]]:
    """An installation with a worker, the relay and Flower; and a function that returns Flower's info of a job."""
    home, port = tmp_path_factory.mktemp("watched"), free_port()
    with started_cluster(home, SLOTKEEPER_FLOWER_PORT=str(port)) as cluster:
        flower = cluster.stack.start("flower", [str(BIN / "slotkeeper"), "flower"])
        cluster.ensure_workers(1)
        url = f"http://127.0.0.1:{port}"
        flower.source(lambda: _status("GET", f"{url}/healthcheck"), "it answers")
        who = ("slotkeeper", Path(home, "flower-password").read_text().strip())
        eventually(lambda: _receives(cluster), "Flower receives task events")
        cluster.stack.relay()

        def task_info(job_id: str) -> dict[str, Any]:
            answer = requests.get(f"{url}/api/task/info/{job_id}", auth=who, timeout=10)
            return answer.json() if answer.ok else {}

        yield cluster, task_info


def _receives(cluster: Cluster) -> bool:
    with cluster.redis() as redis:
        return any(count for _, count in redis.pubsub_numsub("/0.celeryev")) or bool(redis.pubsub_numpat())


def test_flower_shows_a_job_from_its_submit_to_its_end(
    watched: tuple[Cluster, Callable[[str], dict[str, Any]]],
) -> None:
    cluster, task_info = watched
    model, gate = cluster.model(1), cluster.gate()
    running, waiting = cluster.submit(model, gate), cluster.submit(model, 0)

    def source(job_id: str, state: str) -> dict[str, Any]:
        return eventually(lambda: (info := task_info(job_id)).get("state") == state and info, f"Flower shows {state}")

    begun = source(running, "STARTED")
    assert (begun["name"], begun["args"]) == ("infer", f"({model!r},)")
    assert begun["worker"].startswith("worker"), "the worker that runs the job"
    assert source(waiting, "PENDING")["routing_key"] == f"gpu.{model}"

    gate.open()
    ended = source(running, "SUCCESS")
    assert ended["runtime"] > 0 and ended["result"]
    source(waiting, "SUCCESS")


def test_flower_shows_failed_retried_delayed_and_canceled_jobs(
    watched: tuple[Cluster, Callable[[str], dict[str, Any]]],
) -> None:
    cluster, task_info = watched
    model = cluster.model(2, retry_backoff=2)  # Of the events of a job that are sent together, the last one is sent.

    def submit(payload: dict[str, Any], **fields: Any) -> str:
        return cluster.api.submit(model, {"seconds": 0, **payload}, **fields)

    jobs = {
        "FAILURE": submit({"fail": "invalid"}),
        "SUCCESS": submit({"fail": "error", "fail_attempts": 1}),
        "PENDING": submit({}, not_before=600),
        "REVOKED": submit({}, not_before=600),
    }
    assert cluster.api.call("POST", f"/queue/jobs/{jobs['REVOKED']}/cancel").ok

    for state, job_id in jobs.items():
        eventually(lambda state=state, job_id=job_id: task_info(job_id).get("state") == state, f"Flower shows {state}")
    assert task_info(jobs["SUCCESS"])["retried"], "the job was tried again"
    assert "InvalidRequest" in task_info(jobs["FAILURE"])["exception"]
