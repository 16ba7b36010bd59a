"""Probes of an unknown server: the presets that its responses are signs of, and a job that is tried on it."""

from functools import partial

import pytest

from routing.dispatch.outcome import OutcomeKind
from tasks.servers import Description, HealthKind, presets
from tasks.servers.probe import GENERIC, Recognition, Trial, endpoint_for, recognize
from tasks.servers.session import run_with_http_client
from tests.support.scripted import Seen, always, answer, refused_url

ENDPOINTS = [
    ("cog", "/health-check", {"status": "READY", "setup": {}}),
    ("slot-protocol", "/health", {"status": "ok", "active_jobs": 0}),
    ("litserve", "/info", {"model": None, "server": {"devices": ["cpu"], "workers_per_device": 1}}),
    ("bentoml", "/schema.json", {"name": "Cat", "type": "service", "routes": [{"name": "generate", "is_task": False}]}),
    ("gradio", "/gradio_api/info", {"named_endpoints": {"/paint": {"parameters": []}}, "unnamed_endpoints": {}}),
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


def run_recognize(url: str) -> Recognition:
    return run_with_http_client(partial(recognize, url))


def respond_only_to(path: str, body: object):
    return lambda seen: answer(body) if seen.path == path else answer({"detail": "Not Found"}, 404)


@pytest.mark.parametrize(("preset", "path", "body"), ENDPOINTS, ids=[name for name, *_ in ENDPOINTS])
def test_a_server_is_recognized_by_its_responses(preset, path, body, scripted):
    found = run_recognize(scripted(respond_only_to(path, body)).url)
    assert (found.is_there, found.preset) == (True, preset)
    assert found.candidates[0].because == f"GET {path} answered as its servers do"


API, TASK = {"name": "draw", "route": "/sketch"}, {"name": "paint", "route": "/render"}


@pytest.mark.parametrize(
    ("routes", "path"),
    [
        pytest.param([API | {"is_task": False}], "/sketch", id="a method"),
        pytest.param([TASK | {"is_task": True}], "/render", id="a task"),
        pytest.param([API | {"is_task": False}, TASK | {"is_task": True}], "/render", id="a task after a method"),
    ],
)
def test_the_endpoint_of_a_bentoml_service_has_the_route_of_its_method(routes, path, scripted):
    server = scripted(respond_only_to("/schema.json", {"name": "Cat", "type": "service", "routes": routes}))
    found = run_recognize(server.url)
    assert endpoint_for(server.url, found.preset, found.model) == server.url + path


def test_the_endpoint_of_a_gradio_function_has_its_name(scripted):
    server = scripted(respond_only_to("/gradio_api/info", {"named_endpoints": {"/paint": {}, "/undo": {}}}))
    found = run_recognize(server.url)
    assert endpoint_for(server.url, found.preset, found.model) == server.url + "/gradio_api/run/paint"


def test_llama_cpp_is_not_recognized_as_kserve(scripted):
    """Its /v1/models has a list of objects in `models` beside OpenAI's `data`."""
    body = {"models": [{"name": "cat", "model": "cat"}], "object": "list", "data": [{"id": "cat"}]}
    found = run_recognize(scripted(respond_only_to("/v1/models", body)).url)
    assert found.preset == "openai-chat"
    assert "kserve-v1" not in {one.preset for one in found.candidates}


def test_only_three_presets_have_no_signs():
    """A plain server has none, RunPod's cloud requires a key, and cog streams only if the request demands it."""
    with_signs = {name for name in presets.names() if presets.info(name).signs}
    assert set(presets.names()) - with_signs == {GENERIC, "runpod-endpoint", "cog-stream"}


def test_the_generic_preset_is_tried_on_a_server_without_signs(scripted):
    found = run_recognize(scripted(always(answer(b"hello"))).url)
    assert (found.is_there, found.preset) == (True, GENERIC)


def test_after_a_refused_connection_no_other_path_is_requested():
    found = run_recognize(refused_url())
    assert (found.is_there, found.preset, len(found.exchanges)) == (False, None, 1)


def test_each_path_is_requested_once(scripted):
    server = scripted(always(answer({}, 404)))
    run_recognize(server.url)
    paths = [seen.path for seen in server.seen]
    assert len(paths) == len(set(paths))
    assert {seen.method for seen in server.seen} == {"GET"}


@pytest.mark.parametrize(
    ("url", "preset", "model", "endpoint"),
    [
        ("http://gpu1:8000", "openai-chat", "cat", "http://gpu1:8000/v1/chat/completions"),
        ("http://gpu1:8000/", "open-inference-v2", None, "http://gpu1:8000/v2/models/MODEL"),
        ("http://gpu1:5000", "cog", None, "http://gpu1:5000"),
        ("http://gpu1:8000/my/path", "openai-chat", "cat", "http://gpu1:8000/my/path"),
    ],
)
def test_a_url_without_a_path_gets_the_path_of_its_preset(url, preset, model, endpoint):
    assert endpoint_for(url, preset, model) == endpoint


def _bento(seen: Seen) -> bytes:
    if seen.path.endswith("/submit"):
        return answer({"task_id": "t1", "status": "in_progress"})
    if "/status" in seen.path:
        return answer({"task_id": "t1", "status": "completed"})
    return answer({"image": "x"}) if "/get" in seen.path else answer(b"")


def make_trial(server, preset, **options):
    return Trial(server.url + "/generate", Description.model_validate(presets.get(preset)), **options)


def test_a_trial_runs_a_job_like_a_worker_and_names_the_rule_of_each_response(scripted):
    trial = make_trial(scripted(_bento), "bentoml-task")
    assert run_with_http_client(trial.health).kind is HealthKind.UP
    outcome = run_with_http_client(partial(trial.run, payload={"prompt": "a cat"}, patience_s=10))
    assert (outcome.kind, outcome.result) == (OutcomeKind.DONE, {"image": "x"})
    exchanges = [(one.step, one.request.split("?")[0], one.means, one.rule.split(":")[0]) for one in trial.exchanges]
    assert exchanges == [
        ("health", "GET /readyz", "up", "default"),
        ("submit", "POST /generate/submit", "pending", "submit.rules[0]"),
        ("status", "GET /generate/status", "done", "default"),
        ("result", "GET /generate/get", "done", "default"),
    ]


def test_each_status_step_is_judged_by_its_own_rules(scripted):
    def act(seen: Seen) -> bytes:
        if seen.method == "POST":
            return answer({"prompt_id": seen.json["prompt_id"]})
        return answer({}) if "history" in seen.path else answer({"queue_running": [], "queue_pending": []})

    trial = make_trial(scripted(act), "comfyui")
    assert run_with_http_client(partial(trial.run, payload={"3": {}}, patience_s=10)).kind is OutcomeKind.LOST
    assert [one.rule.split(":")[0] for one in trial.exchanges] == [
        "default",
        "status[0].rules[2]",
        "status[1].rules[1]",
    ]


def test_a_job_that_takes_too_long_is_canceled_at_its_server(scripted):
    server = scripted(always(answer({"status": "processing", "job_id": "j1"})))
    trial = make_trial(server, "slot-protocol")
    assert run_with_http_client(partial(trial.run, payload={}, patience_s=0.3)).kind is OutcomeKind.PENDING
    assert server.seen[-1].path == "/cancel/j1"


def test_a_secret_is_sent_to_the_server_and_masked_in_the_trial(scripted):
    server = scripted(lambda seen: answer({"error": f"no such key: {seen.headers['authorization']}"}, 401))
    trial = make_trial(server, "runpod-endpoint", secret={"RUNPOD_API_KEY": "rpa_not_a_key"}.get)
    outcome = run_with_http_client(partial(trial.run, payload={"prompt": "a cat"}, patience_s=5))
    assert server.seen[0].headers["authorization"] == "Bearer rpa_not_a_key"
    assert "rpa_not_a_key" not in repr(trial.exchanges) + repr(outcome)
    assert "***" in trial.exchanges[0].answer


def test_a_trial_lists_an_exchange_without_a_response():
    trial = Trial(refused_url() + "/generate", Description())
    assert run_with_http_client(partial(trial.run, payload={}, patience_s=1)).kind is OutcomeKind.UNREACHABLE
    assert (trial.exchanges[0].status, trial.exchanges[0].means) == (None, "unreachable")
