"""The life of a job in real processes, observed from outside."""

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from pytest_httpserver import HTTPServer
from standardwebhooks import Webhook
from werkzeug import Request

from tests.support.http_api import HttpApi
from tools.cluster.stack import RefServer, Stack, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FLUX = "slotkeeper.serve.demo:flux"


def journal(server: RefServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.journal.read_text().splitlines()]


def test_a_job_of_a_model_that_answers_later_is_polled(stack: Stack, api: HttpApi, server_name: str) -> None:
    server = stack.server(server_name, 2, "--async", function=FLUX)
    api.register("later", server, model_type="async", poll_interval=0.1)

    jobs = [api.ended(api.submit("later", {"prompt": str(n), "seconds": 0.2})) for n in range(3)]

    assert [job["result"]["prompt"] for job in jobs] == ["0", "1", "2"]
    assert len(journal(server)) == 3


def test_a_server_may_push_its_result(stack: Stack, api: HttpApi, server_name: str) -> None:
    server = stack.server(server_name, 1, "--async", "--push", function=FLUX)
    # Polling alone would take a minute.
    api.register("pushing", server, model_type="async", poll_interval=60)

    job = api.ended(api.submit("pushing", {"prompt": "pushed", "seconds": 0.1}), 50)

    assert job["result"]["prompt"] == "pushed"


def test_a_registration_and_a_changed_configuration_take_effect_at_once(
    stack: Stack, api: HttpApi, server_name: str
) -> None:
    api.call("PUT", "/admin/model-configs/later-served", json={})
    waiting = api.submit("later-served", {"seconds": 0.01})
    assert api.job(waiting)["status"] == "queued"

    api.register("later-served", stack.server(server_name, 1))

    assert api.ended(waiting)["status"] == "completed"
    assert api.call("PUT", "/admin/model-configs/later-served", json={"max_payload_bytes": 10}).ok
    refused = api.call("POST", "/queue/submit", json={"model": "later-served", "payload": {"seconds": 0.01}})
    assert refused.status_code == 422, refused.text


def test_a_request_that_is_wrong_in_itself_fails_at_once(stack: Stack, api: HttpApi, server_name: str) -> None:
    api.register("strict", stack.server(server_name, 1))

    job = api.ended(api.submit("strict", {"fail": "invalid"}))

    assert (job["status"], job["attempts"]) == ("failed", 1)


def test_direct_requests_to_a_server_delay_a_job_and_cost_it_no_retry(
    stack: Stack, api: HttpApi, server_name: str
) -> None:
    server = stack.server(server_name, 1)
    api.register("shared", server, max_retries=0)
    with ThreadPoolExecutor(1) as pool:
        direct = pool.submit(requests.post, server.endpoint, json={"seconds": 1.5}, timeout=30)
        health = server.endpoint.replace("/generate", "/health")
        eventually(lambda: requests.get(health, timeout=5).json()["active_jobs"] == 1, "the direct call runs")

        job = api.ended(api.submit("shared", {"seconds": 0.01}))

        assert direct.result().ok
    assert (job["status"], job["attempts"]) == ("completed", 1)


def test_the_client_gets_a_signed_webhook(stack: Stack, api: HttpApi, server_name: str, httpserver: HTTPServer) -> None:
    api.register("hooked", stack.server(server_name, 1))
    httpserver.expect_request("/hook", method="POST").respond_with_data("ok")

    job_id = api.submit("hooked", {"prompt": "hi", "seconds": 0.01}, callback_url=httpserver.url_for("/hook"))

    def hook_requests() -> list[Request]:
        return [request for request, _ in httpserver.log if request.path == "/hook"]

    eventually(hook_requests, "the webhook arrives")
    request = hook_requests()[0]
    (secret,) = api.call("GET", "/admin/webhook-secrets/default").json()["secrets"]
    message = Webhook(secret).verify(request.get_data(), dict(request.headers))
    assert (message["job_id"], message["status"], message["result"]["prompt"]) == (job_id, "completed", "hi")


def test_a_waiting_job_is_canceled_at_once_and_a_running_job_by_its_server(
    stack: Stack, api: HttpApi, server_name: str
) -> None:
    server = stack.server(server_name, 1, "--async", function=FLUX)
    api.register("canceling", server, model_type="async", poll_interval=0.1)
    running = api.submit("canceling", {"seconds": 60})
    eventually(lambda: api.job(running)["status"] == "running", "the first job runs")
    waiting = api.submit("canceling", {"seconds": 60})

    assert api.call("POST", f"/queue/jobs/{waiting}/cancel").status_code == 200
    assert api.job(waiting)["status"] == "canceled"
    assert api.call("POST", f"/queue/jobs/{running}/cancel").status_code == 202
    assert api.ended(running)["status"] == "canceled"
    assert api.call("POST", f"/queue/jobs/{running}/cancel").status_code == 200, (
        "a client that got no response repeats the request"
    )


def test_each_invalid_response_of_a_server_costs_a_retry(
    stack: Stack, api: HttpApi, server_name: str, httpserver: HTTPServer
) -> None:
    server = stack.server(server_name, 1)
    server.endpoint = httpserver.url_for("/generate")
    answers = iter(["<html>busy</html>", "", '{"status":"success","result":{"n":1}}'])
    httpserver.expect_request("/generate").respond_with_handler(lambda _: _answer(next(answers)))
    api.register("garbled", server, retry_backoff=0.1, retry_backoff_max=0.1)

    job = api.ended(api.submit("garbled"))

    assert (job["status"], job["attempts"], job["failures"]) == ("completed", 3, 2)


def _answer(body: str) -> Any:
    from werkzeug import Response

    return Response(body, 200, content_type="text/html")


@pytest.mark.timeout(300)
def test_a_thousand_jobs_run_once_and_in_order_within_the_slots(stack: Stack, api: HttpApi) -> None:
    servers = {model: stack.server(f"{model}-api1", 4) for model in ("thousand-a", "thousand-b")}
    for model in servers:
        api.call("PUT", f"/admin/model-configs/{model}", json={})
    accepted: dict[str, list[str]] = defaultdict(list)
    for n in range(1000):
        model = "thousand-a" if n % 2 else "thousand-b"
        accepted[model].append(api.submit(model, {"seconds": 0.02}))

    for model, server in servers.items():
        api.register(model, server)
    for ids in accepted.values():
        assert api.ended(ids[-1], 120)["status"] == "completed"

    for model, server in servers.items():
        eventually(lambda server=server: len(journal(server)) >= 500, f"{model} has run its jobs")
        runs = journal(server)
        assert sorted(run["job_id"] for run in runs) == sorted(accepted[model])
        health = requests.get(server.endpoint.replace("/generate", "/health"), timeout=5).json()
        assert health["max_active"] <= 4
        started = [api.call("GET", f"/queue/jobs/{job_id}").json() for job_id in accepted[model]]
        assert all(job["status"] == "completed" and job["attempts"] == 1 for job in started)
        assert offers_of(stack, accepted[model]) == sorted(offers_of(stack, accepted[model]))


def offers_of(stack: Stack, job_ids: list[str]) -> list[int]:
    """Return the offer number of each job's start: the order in which the queue released the jobs."""
    script = (
        "import sys, json; from tasks.services import dispatcher; ids = json.load(sys.stdin);"
        "print(json.dumps([e.data['offer'] for i in ids for e in dispatcher().store.list_events(i)"
        " if e.type == 'job.started']))"
    )
    return json.loads(stack.run_with_input(script, json.dumps(job_ids)))
