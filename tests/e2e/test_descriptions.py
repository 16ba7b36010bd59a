"""Servers that speak another way than the slot protocol: described at the door, run by a worker, and their results in
the record.  What they answer is what the real ones were seen to answer."""

import itertools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Api
from tests.support.stack import Stack, eventually
from tests.unit.servers.scripted import Act, Scripted, Seen, answer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

_numbers = itertools.count(1)
Says = Callable[[Seen], Act]
Serve = Callable[..., tuple[str, Scripted]]


@pytest.fixture
def serve(api: Api) -> Iterator[Serve]:
    """Registers a server that says what a test wants, for a model of its own that is described so; answers both."""
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
        api.call("DELETE", f"/admin/servers/{name}")
        there.__exit__()


def _posts(there: Scripted, path: str) -> list[Seen]:
    return [seen for seen in there.seen if seen.path == path and seen.method == "POST"]


def test_a_server_that_answers_at_once_in_its_own_words(api: Api, serve: Serve) -> None:
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
    assert (job["attempts"], job["failures"]) == (1, 0), "it was busy once, which costs nothing"


def test_a_server_that_is_asked_in_several_steps(api: Api, serve: Serve) -> None:
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


def test_a_server_whose_result_is_fetched_from_elsewhere(api: Api, serve: Serve) -> None:
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


def test_a_run_goes_on_by_the_description_it_began_with_also_in_another_worker(
    stack: Stack, api: Api, serve: Serve
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
