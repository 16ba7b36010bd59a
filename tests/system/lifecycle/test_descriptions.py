"""Servers with another protocol than the slot protocol: from the description to the result in the database.

The scripted responses are copies of those of real servers."""

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from tests.support.http_api import HttpApi
from tests.support.scripted import Act, Scripted, Seen, answer, reset
from tools.cluster.stack import Stack, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

_numbers = itertools.count(1)
Says = Callable[[Seen], Act]
Serve = Callable[..., tuple[str, Scripted]]


@pytest.fixture
def serve(api: HttpApi) -> Iterator[Serve]:
    """Return a function that registers a scripted server for a new described model, and returns both."""
    running: list[tuple[str, Scripted]] = []

    def start(says: Says, *, slots: int = 1, model: str = "", **config: Any) -> tuple[str, Scripted]:
        number = next(_numbers)
        model, name = model or f"described-{number}", f"described-server-{number}"
        there = Scripted(says).__enter__()
        running.append((name, there))
        assert (put := api.call("PUT", f"/admin/model-configs/{model}", json=config)).ok, put.text
        body = {"model": model, "server": name, "endpoint": there.url + "/run", "slots": slots}
        assert (put := api.call("POST", "/admin/register", json=body)).ok, put.text
        return model, there

    yield start
    for name, there in running:
        api.call("DELETE", f"/admin/servers/{name}?force=true")
        there.__exit__()


def _posts(there: Scripted, path: str) -> list[Seen]:
    return [seen for seen in there.seen if seen.path == path and seen.method == "POST"]


def test_a_synchronous_server_with_another_protocol_completes_a_job_after_a_busy_response(
    api: HttpApi, serve: Serve
) -> None:
    def torchserve(seen: Seen) -> Act:
        if seen.path == "/metrics":
            return answer(b"queue_length 0\n")
        if len(_posts(there, "/predictions/cat")) == 1:
            return answer({"code": 503, "type": "ServiceUnavailableException", "message": "No worker"}, 503)
        return answer({"label": "tabby", "of": seen.json["data"]})

    description = {
        "mode": "sync",
        "submit": {
            "path": "/predictions/cat",
            "body": {"data": "{{payload/image}}"},
            "rules": [{"if": {"status": 200}, "then": "done"}],
            "result": "",
        },
        "health": {"path": "/metrics", "active": {"metric": "queue_length"}, "running": False},
        "cancel": None,
    }
    model, there = serve(torchserve, description=description)
    job = api.ended(api.submit(model, {"image": "x.png"}))
    assert (job["status"], job["result"]) == ("completed", {"label": "tabby", "of": "x.png"})
    assert (job["attempts"], job["failures"]) == (1, 0), "a busy response costs no attempt"


def test_a_server_can_be_polled_in_several_status_steps(api: HttpApi, serve: Serve) -> None:
    def comfyui(seen: Seen) -> Act:
        if seen.method == "POST":
            return answer({"prompt_id": seen.json["prompt_id"], "number": 1, "node_errors": {}})
        name = _posts(there, "/prompt")[0].json["prompt_id"]
        if seen.path == "/queue":
            return answer({"queue_running": [[1, name, {}]], "queue_pending": []})
        assert seen.path == f"/history/{name}"
        if len([one for one in there.seen if one.path == seen.path]) < 3:
            return answer({})
        return answer({name: {"outputs": {"images": ["cat.png"]}, "status": {"status_str": "success"}}})

    description = {
        "mode": "async",
        "given_id": "{{job/attempt_id}}",
        "submit": {
            "path": "/prompt",
            "body": {"prompt": "{{payload}}", "prompt_id": "{{job/attempt_id}}"},
            "id": "/prompt_id",
        },
        "status": [
            {
                "path": "/history/{{id}}",
                "result": "/{{id}}/outputs",
                "rules": [
                    {"if": {"pointer": "/{{id}}/status/status_str", "value": "success"}, "then": "done"},
                    {"if": {"status": 200, "pointer": ""}, "then": "next"},
                ],
            },
            {
                "path": "/queue",
                "rules": [
                    {"if": {"status": 200, "mentions_id": True}, "then": "pending"},
                    {"if": {"status": 200, "pointer": "/queue_running"}, "then": "lost"},
                ],
            },
        ],
        "health": {
            "path": "/queue",
            "active": {"count": "/queue_running"},
            "job_ids": "/queue_running",
            "job_ids_item": "/1",
        },
    }
    model, there = serve(comfyui, description=description, poll_interval=0.1)
    job = api.ended(api.submit(model, {"seed": 7}))
    assert (job["status"], job["result"]) == ("completed", {"images": ["cat.png"]})
    assert (job["attempts"], job["crashes"]) == (1, 0)


def test_a_request_holds_the_deadline_the_output_size_the_version_and_the_swap_flag(api: HttpApi, serve: Serve) -> None:
    body_template = {
        "swap": "{{run/swap}}",
        "within_ms": "{{run/deadline_ms}}",
        "tokens": "{{run/output_size}}",
        "version": "{{run/model_version}}",
    }
    config: dict[str, Any] = {
        "description": {
            "submit": {
                "path": "/run?swap={{run/swap}}",
                "headers": {"X-Expected-Tokens": "{{run/output_size}}", "X-Timeout-S": "{{run/deadline_s}}"},
                "body": body_template,
            },
            "output_size": {"pointer": ["/max_completion_tokens", "/max_tokens"], "default": 256},
        },
        "max_poll_time": 30,
    }

    def any_server(seen: Seen) -> Act:
        return answer({"status": "success", "result": None} if seen.method == "POST" else {"status": "ok"})

    model, there = serve(any_server, **config)
    other, name = f"{model}-other", model.replace("described", "described-server")
    assert api.call("PUT", f"/admin/model-configs/{other}", json=config).ok
    body = {"model": other, "server": name, "endpoint": there.url + "/run", "slots": 1, "model_version": "2.1"}
    assert api.call("POST", "/admin/register", json=body).ok
    for wanted, payload in ((model, {}), (model, {"max_tokens": 7}), (other, {}), (other, {}), (model, {})):
        assert api.ended(api.submit(wanted, payload))["status"] == "completed"
    runs = [seen for seen in there.seen if seen.method == "POST"]
    assert [seen.json["swap"] for seen in runs] == [True, False, True, False, True]
    assert [seen.json["version"] for seen in runs] == ["", "", "2.1", "2.1", ""]
    assert [seen.path for seen in runs[:2]] == ["/run?swap=true", "/run?swap=false"]
    assert [seen.json["tokens"] for seen in runs[:2]] == [256, 7]
    assert [seen.headers["x-expected-tokens"] for seen in runs[:2]] == ["256", "7"]
    for seen in runs:
        assert 0 < seen.json["within_ms"] <= 30_000 and 1 <= int(seen.headers["x-timeout-s"]) <= 30


def test_a_server_whose_result_is_fetched_from_elsewhere(api: HttpApi, serve: Serve) -> None:
    def bentoml(seen: Seen) -> Act:
        if seen.method == "POST":
            return answer({"task_id": "t 1"})
        if "/get" in seen.path:
            return answer({"text": "hello"})
        if len(there.seen) < 3:
            return answer(b"Too many requests", 429)  # refused because the job runs
        return answer({"task_id": "t 1", "status": "success"})

    description = {
        "mode": "async",
        "submit": {
            "path": "/generate/submit",
            "id": "/task_id",
            "rules": [{"if": {"pointer": "/task_id"}, "then": "pending"}],
        },
        "status": {"path": "/generate/status?task_id={{id}}"},
        "result": {"path": "/generate/get?task_id={{id}}", "result": ""},
        "cancel": {"method": "PUT", "path": "/generate/cancel?task_id={{id}}", "frees_slot": "no"},
        "health": None,
    }
    model, there = serve(bentoml, description=description, poll_interval=0.1)
    job = api.ended(api.submit(model, {}))
    assert (job["status"], job["result"]) == ("completed", {"text": "hello"})


COG: dict[str, Any] = {
    "mode": "callback",
    "given_id": "{{job/attempt_id}}",
    "submit": {
        "method": "PUT",
        "path": "/predictions/{{job/attempt_id}}",
        "headers": {"Prefer": "respond-async"},
        "body": {
            "input": "{{payload}}",
            "webhook": "{{callback_url}}?token={{callback_token}}",
            "webhook_events_filter": ["completed"],
        },
        "id": "/id",
    },
    "callback": {"rules": [{"if": {"pointer": "/status", "value": "succeeded"}, "then": "done"}], "result": "/output"},
    "cancel": {"path": "/predictions/{{id}}/cancel", "frees_slot": "immediate"},
    "health": {
        "path": "/health-check",
        "active": None,
        "job_ids": None,
        "rules": [{"if": {"pointer": "/status", "value": ["BUSY", "STARTING"]}, "then": "busy"}],
    },
}


class Cog:
    """Takes predictions, and pushes when the test says so."""

    def __init__(self) -> None:
        self.takes: list[dict[str, Any]] = []
        self.health = "BUSY"
        self.canceled: list[str] = []

    def __call__(self, seen: Seen) -> Act:
        if seen.path == "/health-check":
            return answer({"status": self.health})
        if seen.path.endswith("/cancel"):
            self.canceled.append(seen.path)
            return answer({})
        self.takes.append({"id": seen.path.rpartition("/")[2], **seen.json, "headers": seen.headers})
        return answer({"id": self.takes[-1]["id"], "status": "starting"}, 202)

    def push(self, output: Any) -> requests.Response:
        took = self.takes[-1]
        body = {"id": took["id"], "status": "succeeded", "output": output}
        return requests.post(took["webhook"], json=body, timeout=10)


def test_a_server_without_a_status_request_pushes_its_result(api: HttpApi, serve: Serve) -> None:
    cog = Cog()
    model, there = serve(cog, description=COG, poll_interval=0.1)
    job_id = api.submit(model, {"prompt": "a cat"})
    eventually(lambda: cog.takes and len(there.seen) > 5, "the server has the request, and its health is checked")
    assert api.job(job_id)["status"] == "running"

    assert cog.push(["cat.png"]).status_code == 200
    job = api.ended(job_id)
    assert (job["status"], job["result"], job["attempts"]) == ("completed", ["cat.png"], 1)
    assert {seen.method for seen in there.seen if "prediction" in seen.path} == {"PUT"}, "it was never polled"
    assert cog.takes[0]["headers"]["x-model"] == model
    assert 0 < int(cog.takes[0]["headers"]["x-deadline-ms"]) <= 600_000


def test_a_run_without_a_push_is_lost_once_its_server_is_healthy_and_idle(api: HttpApi, serve: Serve) -> None:
    cog = Cog()
    description = {**COG, "callback": {**COG["callback"], "silent_s": 0.5}}
    model, there = serve(cog, description=description, poll_interval=0.1)
    job_id = api.submit(model)
    eventually(lambda: len(there.seen) > 10, "its health is asked")
    assert api.job(job_id)["attempts"] == 1, "the server is busy, so it may still run the job"

    cog.health = "READY"
    eventually(lambda: len(cog.takes) == 2, "it is lost, and run again")
    cog.health = "BUSY"
    assert cog.takes[0]["id"] != cog.takes[1]["id"]
    assert cog.push("second").status_code == 200
    job = api.ended(job_id)
    assert (job["result"], job["crashes"]) == ("second", 1)


def test_a_canceled_run_of_a_server_whose_yes_counts_frees_its_slot_at_once(api: HttpApi, serve: Serve) -> None:
    cog = Cog()
    model, _ = serve(cog, description=COG, poll_interval=0.1)
    first = api.submit(model)
    eventually(lambda: cog.takes, "the server has the request")
    assert api.call("POST", f"/queue/jobs/{first}/cancel").ok
    assert api.ended(first)["status"] == "canceled"
    assert cog.canceled == [f"/predictions/{cog.takes[0]['id']}/cancel"]
    second = api.submit(model)
    eventually(lambda: len(cog.takes) == 2, "the slot is not withheld", 5)
    cog.push("x")
    assert api.ended(second)["status"] == "completed"


def test_a_worker_that_dies_during_its_request_leaves_an_id_by_which_the_next_worker_polls(
    stack: Stack, api: HttpApi, serve: Serve
) -> None:
    """Another request would run the work twice."""
    asked: list[str] = []
    dead = threading.Event()

    def says(seen: Seen) -> Act:
        if seen.method == "POST":
            return lambda _: dead.wait(60) and None
        asked.append(seen.path)
        name = seen.path.rpartition("/")[2]
        return answer({"job_id": name, "status": "done", "result": name})

    description = {"mode": "async", "given_id": "{{job/attempt_id}}", "health": None}
    model, there = serve(says, description=description, poll_interval=0.1)
    job_id = api.submit(model)
    eventually(lambda: _posts(there, "/run"), "the server has the request")
    stack.processes["worker"].stop(signal.SIGKILL)
    stack.worker()
    job = api.ended(job_id)
    dead.set()
    assert (job["result"], job["attempts"], asked) == (f"{job_id}-1", 2, [f"/status/{job_id}-1"])
    assert len(_posts(there, "/run")) == 1


def test_a_run_whose_submit_got_no_response_is_found_by_its_given_id(api: HttpApi, serve: Serve) -> None:
    def says(seen: Seen) -> Act:
        if seen.method == "POST":
            return reset
        return answer({"job_id": seen.path.rpartition("/")[2], "status": "done", "result": "found"})

    description = {"mode": "async", "given_id": "{{job/attempt_id}}", "health": None}
    model, there = serve(says, description=description, poll_interval=0.1)
    job_id = api.submit(model)
    job = api.ended(job_id)
    assert (job["status"], job["result"], job["attempts"]) == ("completed", "found", 1)
    assert [(seen.method, seen.path) for seen in there.seen] == [("POST", "/run"), ("GET", f"/status/{job_id}-1")]


def test_a_run_whose_request_did_not_reach_the_server_is_sent_again(api: HttpApi, serve: Serve) -> None:
    def says(seen: Seen) -> Act:
        posts = _posts(there, "/run")
        if seen.method == "POST":
            return reset if len(posts) == 1 else answer({"job_id": "mine", "status": "running"})
        if seen.path == "/status/mine":
            return answer({"job_id": "mine", "status": "done", "result": len(posts)})
        return answer({"status": "unknown"}, 404)

    description = {"mode": "async", "given_id": "{{job/attempt_id}}", "health": None}
    model, there = serve(says, description=description, poll_interval=0.1)
    job = api.ended(api.submit(model))
    assert (job["result"], job["attempts"], job["crashes"]) == (2, 1, 0)


def test_a_status_path_can_contain_a_value_of_the_payload(api: HttpApi, serve: Serve) -> None:
    def says(seen: Seen) -> Act:
        if seen.method == "POST":
            return answer({"job_id": "r1"})
        return answer({"status": "done", "result": seen.path}) if seen.path == "/of/anna/r1" else answer(b"", 400)

    description = {"mode": "async", "status": {"path": "/of/{{payload/user}}/{{id}}"}, "health": None}
    model, _ = serve(says, description=description, poll_interval=0.1)
    assert api.ended(api.submit(model, {"user": "anna"}))["result"] == "/of/anna/r1"


def test_a_result_that_is_read_once_is_stored_before_the_next_job_has_the_slot(api: HttpApi, serve: Serve) -> None:
    """A worker that died in between would have destroyed it."""
    stored: list[str] = []

    def says(seen: Seen) -> Act:
        if seen.method == "POST":
            if len(_posts(there, "/run")) == 2:
                stored.append(api.job(first)["status"])
            return answer({"job_id": f"r{len(_posts(there, '/run'))}"})
        return answer({"status": "done", "result": seen.path})

    description = {"mode": "async", "keeps_results": False, "health": None}
    model, there = serve(says, description=description, poll_interval=0.1)
    first = api.submit(model)
    second = api.submit(model)
    assert api.ended(second)["result"] == "/status/r2"
    assert stored == ["completed"]
    assert [seen.path for seen in there.seen].count("/status/r1") == 1


SECRET = {"submit": {"headers": {"Authorization": "Bearer {{secret/E2E_KEY}}"}}, "health": None}


def test_a_secret_is_sent_and_rotated_and_never_repeated(stack: Stack, api: HttpApi, serve: Serve) -> None:
    keys: list[str] = []

    def says(seen: Seen) -> Act:
        keys.append(seen.headers["authorization"])
        if seen.json.get("fail"):
            return answer({"error": f"who is {keys[-1]}?", "retryable": False}, 400)
        return answer({"status": "done", "result": "ok"})

    def put(value: str) -> None:
        body = {"value": value, "models": ["secretive"]}
        assert api.call("PUT", "/admin/secrets/E2E_KEY", json=body).ok

    put("first-s3cret")
    model, _ = serve(says, model="secretive", description=SECRET, max_retries=0)
    assert api.ended(api.submit(model))["status"] == "completed"
    put("second-s3cret")

    def asked_with_the_second() -> bool:
        api.ended(api.submit(model))
        return keys[-1] == "Bearer second-s3cret"

    eventually(asked_with_the_second, "workers use the new secret", 10)
    failed = api.ended(api.submit(model, {"fail": True}))
    assert failed["error"]["message"] == "the server answered 400: who is Bearer ***?"
    body_template = [
        api.call("GET", path).text for path in ("/admin/secrets", "/admin/model-configs/secretive", "/admin/servers")
    ]
    body_template += [process.log for process in stack.processes.values()]
    kept = b"".join(path.read_bytes() for path in stack.home.glob("record.db*"))
    assert not any("s3cret" in text for text in body_template) and b"s3cret" not in kept


def test_a_description_that_names_anothers_secret_is_refused(api: HttpApi, serve: Serve) -> None:
    assert api.call("PUT", "/admin/secrets/OTHERS", json={"value": "a-long-value", "models": ["others"]}).ok
    body = {"description": {"submit": {"body": {"key": "{{secret/OTHERS}}"}}}}
    refused = api.call("PUT", "/admin/model-configs/not-others", json=body)
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["pointer"] == "/description/submit/body/key"
    assert api.call("PUT", "/admin/model-configs/others", json=body).ok


def test_a_run_keeps_the_description_it_began_with_also_in_another_worker(
    stack: Stack, api: HttpApi, serve: Serve
) -> None:
    def says(seen: Seen) -> Act:
        if seen.path == "/health":
            return answer({"active_jobs": len(_posts(there, "/run")) - len(ended)})
        if seen.method == "POST":
            return answer({"job_id": f"r{len(_posts(there, '/run'))}"})
        if seen.path in ("/old/r1", "/new/r2") and seen.path in may_end:
            ended.add(seen.path)
            return answer({"status": "done", "result": seen.path})
        return answer({"status": "running"}) if seen.path in ("/old/r1", "/new/r2") else answer({}, 404)

    may_end, ended = set[str](), set[str]()
    old = {"mode": "async", "status": {"path": "/old/{{id}}"}}
    new = {"mode": "async", "status": {"path": "/new/{{id}}"}}
    model, there = serve(says, description=old, poll_interval=0.1, slots=2)
    first = api.submit(model)
    eventually(lambda: [seen for seen in there.seen if seen.path == "/old/r1"], "it is polled")

    answered = api.call("PUT", f"/admin/model-configs/{model}", json={"description": new, "poll_interval": 0.1})
    assert answered.ok
    stack.processes["worker"].stop(signal.SIGKILL)
    stack.worker()
    asked = len(there.seen)
    eventually(lambda: [seen for seen in there.seen[asked:] if seen.path == "/old/r1"], "another worker polls it")
    second = api.submit(model)
    eventually(lambda: [seen for seen in there.seen if seen.path == "/new/r2"], "the next one is polled the new way")
    may_end |= {"/old/r1", "/new/r2"}

    assert api.ended(first)["result"] == "/old/r1"
    assert api.ended(second)["result"] == "/new/r2"
    assert not [seen for seen in there.seen if seen.path in ("/new/r1", "/old/r2")]
