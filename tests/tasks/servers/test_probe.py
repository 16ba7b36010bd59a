"""A server that nobody knows: which preset its answers speak for, and what is told of a job that is tried on it."""

from functools import partial

import pytest

from routing.dispatch.outcome import OutcomeKind
from tasks.servers import Description, HealthKind, presets
from tasks.servers.adapter import run_with_http_client
from tasks.servers.probe import GENERIC, Recognition, Trial, endpoint_for, recognize
from tests.support.scripted import Seen, always, answer, refused_url

ENDPOINTS = [
    ("cog", "/health-check", {"status": "READY", "setup": {}}),
    ("slot-protocol", "/health", {"status": "ok", "active_jobs": 0}),
    ("litserve", "/info", {"model": None, "server": {"devices": ["cpu"], "workers_per_device": 1}}),
    ("bentoml", "/schema.json", {"name": "Cat", "type": "service", "routes": [{"name": "generate", "is_task": False}]}),
    (
        "bentoml-task",
        "/schema.json",
        {"name": "Cat", "type": "service", "routes": [{"name": "paint", "is_task": True}]},
    ),
    ("open-inference-v2", "/v2", {"name": "mlserver", "version": "1.7.1", "extensions": []}),
    ("kserve-v1", "/v1/models", {"models": ["cat"]}),
    ("openai-chat", "/v1/models", {"object": "list", "data": [{"id": "cat", "owned_by": "vllm"}]}),
    ("torchserve", "/ping", {"status": "Healthy"}),
    ("comfyui", "/queue", {"queue_running": [], "queue_pending": []}),
    ("runpod-worker", "/openapi.json", {"info": {"title": "Runpod | Development Worker API"}}),
]


def looked_at(url: str) -> Recognition:
    return run_with_http_client(partial(recognize, url))


def only(path: str, body: object):
    return lambda seen: answer(body) if seen.path == path else answer({"detail": "Not Found"}, 404)


@pytest.mark.parametrize(("preset", "path", "body"), ENDPOINTS, ids=[name for name, *_ in ENDPOINTS])
def test_a_server_is_recognized_by_what_it_answers(preset, path, body, scripted):
    found = looked_at(scripted(only(path, body)).url)
    assert (found.is_there, found.preset) == (True, preset)
    assert found.candidates[0].because == f"GET {path} answered as its servers do"


@pytest.mark.parametrize("is_task", [True, False])
def test_the_method_of_a_bentoml_service_is_what_is_registered(is_task, scripted):
    schema = {"name": "Cat", "type": "service", "routes": [{"name": "paint", "is_task": is_task}]}
    there = scripted(only("/schema.json", schema))
    found = looked_at(there.url)
    assert endpoint_for(there.url, found.preset, found.model) == there.url + "/paint"


def test_llama_cpp_is_no_kserve(scripted):
    """Its /v1/models has a list of objects in `models` beside OpenAI's `data`."""
    body = {"models": [{"name": "cat", "model": "cat"}], "object": "list", "data": [{"id": "cat"}]}
    found = looked_at(scripted(only("/v1/models", body)).url)
    assert found.preset == "openai-chat"
    assert "kserve-v1" not in {one.preset for one in found.candidates}


def test_presets_without_signs_are_known():
    """A plain server has none, RunPod's cloud answers nobody without a key, and what a server streams is asked for."""
    known = {name for name in presets.names() if presets.info(name).signs}
    assert set(presets.names()) - known == {GENERIC, "runpod-endpoint", "cog-stream", "slot-protocol-stream"}


def test_a_server_that_shows_no_sign_may_be_a_plain_one(scripted):
    found = looked_at(scripted(always(answer(b"hello"))).url)
    assert (found.is_there, found.preset) == (True, GENERIC)


def test_nobody_is_asked_twice_where_nobody_listens():
    found = looked_at(refused_url())
    assert (found.is_there, found.preset, len(found.exchanges)) == (False, None, 1)


def test_each_path_is_asked_once(scripted):
    there = scripted(always(answer({}, 404)))
    looked_at(there.url)
    paths = [seen.path for seen in there.seen]
    assert len(paths) == len(set(paths))
    assert {seen.method for seen in there.seen} == {"GET"}


@pytest.mark.parametrize(
    ("url", "preset", "model", "endpoint"),
    [
        ("http://gpu1:8000", "openai-chat", "cat", "http://gpu1:8000/v1/chat/completions"),
        ("http://gpu1:8000/", "open-inference-v2", None, "http://gpu1:8000/v2/models/MODEL"),
        ("http://gpu1:5000", "cog", None, "http://gpu1:5000"),
        ("http://gpu1:8000/my/path", "openai-chat", "cat", "http://gpu1:8000/my/path"),
    ],
)
def test_an_address_without_a_path_gets_that_of_its_kind(url, preset, model, endpoint):
    assert endpoint_for(url, preset, model) == endpoint


def _bento(seen: Seen) -> bytes:
    if seen.path.endswith("/submit"):
        return answer({"task_id": "t1", "status": "in_progress"})
    if "/status" in seen.path:
        return answer({"task_id": "t1", "status": "completed"})
    return answer({"image": "x"}) if "/get" in seen.path else answer(b"")


def tried(there, preset, **more):
    return Trial(there.url + "/generate", Description.model_validate(presets.get(preset)), **more)


def test_a_job_is_tried_as_a_worker_would_and_each_answer_names_its_rule(scripted):
    trial = tried(scripted(_bento), "bentoml-task")
    assert run_with_http_client(trial.health).kind is HealthKind.UP
    outcome = run_with_http_client(partial(trial.run, payload={"prompt": "a cat"}, patience_s=10))
    assert (outcome.kind, outcome.result) == (OutcomeKind.DONE, {"image": "x"})
    told = [(one.step, one.request.split("?")[0], one.means, one.rule.split(":")[0]) for one in trial.exchanges]
    assert told == [
        ("health", "GET /readyz", "up", "default"),
        ("submit", "POST /generate/submit", "pending", "submit.rules[0]"),
        ("status", "GET /generate/status", "done", "default"),
        ("result", "GET /generate/get", "done", "default"),
    ]


def test_of_a_list_of_status_steps_each_is_told_by_its_own_rules(scripted):
    def act(seen: Seen) -> bytes:
        if seen.method == "POST":
            return answer({"prompt_id": seen.json["prompt_id"]})
        return answer({}) if "history" in seen.path else answer({"queue_running": [], "queue_pending": []})

    trial = tried(scripted(act), "comfyui")
    assert run_with_http_client(partial(trial.run, payload={"3": {}}, patience_s=10)).kind is OutcomeKind.LOST
    assert [one.rule.split(":")[0] for one in trial.exchanges] == [
        "default",
        "status[0].rules[2]",
        "status[1].rules[1]",
    ]


def test_a_job_that_takes_too_long_is_given_up_and_the_server_is_told(scripted):
    def act(seen: Seen) -> bytes:
        return answer({"status": "processing", "job_id": "j1"})

    there = scripted(act)
    assert (
        run_with_http_client(partial(tried(there, "slot-protocol").run, payload={}, patience_s=0.3)).kind
        is OutcomeKind.PENDING
    )
    assert there.seen[-1].path == "/cancel/j1"


def test_a_secret_is_sent_and_never_told(scripted):
    there = scripted(lambda seen: answer({"error": f"no such key: {seen.headers['authorization']}"}, 401))
    trial = tried(there, "runpod-endpoint", secret={"RUNPOD_API_KEY": "rpa_not_a_key"}.get)
    outcome = run_with_http_client(partial(trial.run, payload={"prompt": "a cat"}, patience_s=5))
    assert there.seen[0].headers["authorization"] == "Bearer rpa_not_a_key"
    assert "rpa_not_a_key" not in repr(trial.exchanges) + repr(outcome)
    assert "***" in trial.exchanges[0].answer


def test_an_exchange_that_breaks_off_is_told_too():
    trial = Trial(refused_url() + "/generate", Description())
    assert run_with_http_client(partial(trial.run, payload={}, patience_s=1)).kind is OutcomeKind.UNREACHABLE
    assert (trial.exchanges[0].status, trial.exchanges[0].means) == (None, "unreachable")
