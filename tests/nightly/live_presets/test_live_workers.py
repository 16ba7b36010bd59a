"""A worker is killed while a job of its runs at a real server of others: the job ends once all the same.

Where the server can be asked, or pushes, the next worker goes on with the run.  Where the answer went with the
connection, the job is run again, on the same slot, once the server is free of the first run.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests

from slotkeeper.jobs.values import Job
from tests.nightly.live_presets.servers import LLAMA_CONTEXT, Live, chat, installed, prompt, started, wanted
from tests.support.cluster import Cluster
from tools.cluster.stack import eventually

pytestmark = [pytest.mark.live_servers, pytest.mark.timeout(600)]

# As docs/reference/descriptions.md describes a server that pushes.
PUSHES: dict[str, Any] = {
    "mode": "callback",
    "submit": {
        "headers": {"Prefer": "respond-async"},
        "body": {"input": "{{payload}}", "webhook": "{{callback_url}}?token={{callback_token}}"},
        "id": "/id",
    },
    "callback": {
        "rules": [{"if": {"pointer": "/status", "value": "succeeded"}, "then": "done"}],
        "result": "/output",
        "silent_s": 60,
    },
}


@dataclass(frozen=True)
class Case:
    """`runs`: how often the job is run at the server, in all."""

    preset: str
    package: str
    payload: Callable[[str], dict[str, Any]]
    runs: int
    result: Any
    description: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"{self.preset}-{self.package}"


def painted(gate: str) -> dict[str, Any]:
    return prompt("a cat") | {"gate": gate}


def gated_chat(gate: str) -> dict[str, Any]:
    return chat(f"gate:{gate}")


CASES = [
    Case("cog", "cog", painted, 2, "A CAT"),
    Case("cog", "cog", painted, 1, "A CAT", PUSHES, "cog-that-pushes"),
    Case("bentoml", "bentoml", painted, 2, {"image": "A CAT"}),
    Case("bentoml-task", "bentoml", painted, 1, {"image": "A CAT"}),
    Case("openai-chat", "litserve", gated_chat, 2, None),
]


def _wanted_cases() -> list[Case]:
    there = {(live.preset, live.package) for live in wanted()}
    return [case for case in CASES if (case.preset, case.package) in there]


def _live(preset: str, package: str) -> Live:
    return next(live for live in wanted() if (live.preset, live.package) == (preset, package))


def _register(cluster: Cluster, model: str, url: str, config: dict[str, Any]) -> None:
    response = cluster.api.call("PUT", f"/admin/model-configs/{model}", json=config)
    assert response.ok, response.text
    body = {"model": model, "server": f"{model}-server", "endpoint": url, "slots": 1}
    response = cluster.api.call("POST", "/admin/register", json=body)
    assert response.ok, response.text


def _remove(cluster: Cluster, model: str) -> None:
    with suppress(requests.RequestException):
        cluster.api.call("DELETE", f"/admin/servers/{model}-server?force=true")


def _killed_under(cluster: Cluster, job: str, is_under_way: Callable[[], Any]) -> None:
    """The only worker dies while the job runs at its server; another takes over."""
    (worker,) = cluster.ensure_workers(1)
    eventually(is_under_way, f"{job} runs at its server", 60)
    worker.kill()
    cluster.start_worker()


def _ended_once(cluster: Cluster, model: str, job: str) -> Job:
    row = cluster.until(job, "completed", 120)
    why = cluster.why(job)
    assert why.count("finished") == 1 and why[-1] == "finished", why
    assert row.failures == 0, "the death of a worker is no wrong answer"
    eventually(lambda: cluster.taken(model) == {}, "its slot is free", 60)
    return row


@pytest.mark.parametrize("case", _wanted_cases(), ids=str)
def test_a_job_whose_worker_is_killed_ends_once(cluster: Cluster, tmp_path: Path, case: Case):
    live, gate = _live(case.preset, case.package), tmp_path / "gate"
    runs = Path(f"{gate}.runs")
    model = f"killed-under-{case}"
    with started(live, installed(live.package)) as url:
        config = {"preset": case.preset, "poll_interval": 0.2, "max_poll_time": 60}
        if case.description:
            config["description"] = case.description
        _register(cluster, model, url + live.path, config)
        try:
            cluster.ensure_workers(1)
            job = cluster.api.submit(model, case.payload(str(gate)))
            resumes = case.runs == 1
            _killed_under(cluster, job, lambda: runs.exists() and (cluster.row(job).remote_id if resumes else True))
            cluster.started(job, 2)
            gate.touch()
            _ended_once(cluster, model, job)
            assert len(runs.read_text().splitlines()) == case.runs
            shown = cluster.api.ended(job)
            assert case.result is None or shown["result"] == case.result
        finally:
            gate.touch()
            _remove(cluster, model)


LLAMA: dict[str, Any] = {"health": {"active": {"metric": "llamacpp:requests_processing"}, "path": "/metrics"}}


def _endless() -> dict[str, Any]:
    """Return a request whose run continues until it is stopped, or its context is full."""
    return chat("a cat", max_tokens=LLAMA_CONTEXT)


@pytest.fixture
def llama(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """A model of llama.cpp's server, whose slots are counted by its metrics; and where that is."""
    live = _live("openai-chat", "xllamacpp")
    with started(live, installed(live.package)) as url:
        model = f"llama-{time.time_ns():x}"
        _register(cluster, model, url + live.path, {"preset": live.preset, "description": LLAMA, "max_poll_time": 120})
        try:
            yield model, url
        finally:
            _remove(cluster, model)


def _runs(url: str) -> int:
    """How many requests it is at, by its own count."""
    lines = requests.get(f"{url}/metrics", timeout=20).text.splitlines()
    return int(next(line for line in lines if line.startswith("llamacpp:requests_processing ")).split()[1])


needs_llama = pytest.mark.skipif(
    not any(live.package == "xllamacpp" for live in wanted()), reason="LIVE names other servers"
)


@needs_llama
def test_a_stream_of_llama_cpp_is_forwarded_in_parts_and_the_whole_text_is_the_result(
    cluster: Cluster, llama: tuple[str, str]
):
    model, _ = llama
    cluster.ensure_workers(1)
    job = cluster.api.submit(model, chat("a cat", max_tokens=3000))
    with cluster.api.session.get(f"{cluster.stack.url}/queue/jobs/{job}/stream", stream=True, timeout=60) as stream:
        parts = [line.removeprefix(b"data: ") for line in stream.iter_lines() if line.startswith(b"data: ")]
    texts = [part["text"] for part in map(json.loads, parts) if "text" in part]
    result = cluster.api.ended(job)["result"]
    assert len(texts) > 1 and "".join(texts) == result["output"]
    assert (result["finish_reason"], len(result["output"])) == ("length", 3000)


@needs_llama
def test_a_canceled_job_of_llama_cpp_ends_there_and_the_next_has_its_slot(cluster: Cluster, llama: tuple[str, str]):
    model, url = llama
    cluster.ensure_workers(1)
    job = cluster.api.submit(model, _endless())
    eventually(lambda: _runs(url) == 1, "it is at it", 60)
    assert cluster.api.call("POST", f"/queue/jobs/{job}/cancel").ok
    assert cluster.until(job, "canceled").state == "canceled"
    eventually(lambda: _runs(url) == 0, "it has stopped", 60)
    following = cluster.api.submit(model, chat("a cat", max_tokens=8))
    assert cluster.api.ended(following)["status"] == "completed"


@needs_llama
def test_a_job_of_llama_cpp_whose_worker_is_killed_ends_once(cluster: Cluster, llama: tuple[str, str]):
    """The connection goes with the worker, and its generation with that; the job is run again."""
    model, url = llama
    cluster.ensure_workers(1)
    job = cluster.api.submit(model, chat("a cat", max_tokens=6000))
    _killed_under(cluster, job, lambda: _runs(url) == 1)
    cluster.started(job, 2)
    row = _ended_once(cluster, model, job)
    assert row.attempt == 2
    assert len(cluster.api.ended(job)["result"]["output"]) == 6000
