"""Presets over the REST API: listed, probed, and the reasons why a registered server gets no jobs."""

from typing import Any

import pytest

from routing.dispatch.outcome import Outcome, OutcomeKind
from tasks.servers import presets
from tasks.services import workers
from tests.support.api import Api, TimedApi
from tests.support.ends import cool_down, decided, end_in_order
from tests.support.scripted import Scripted, Seen, answer, refused_url


@pytest.fixture
def cog():
    def act(seen: Seen) -> bytes:
        if seen.path == "/health-check":
            return answer({"status": "READY"})
        if seen.method == "PUT":
            return answer({"status": "succeeded", "output": seen.json["input"]["prompt"].upper()})
        return answer({}, 404)

    with Scripted(act) as there:
        yield there


def test_presets_are_listed_and_shown(api: Api) -> None:
    listed = api.client.get("/admin/presets").json["presets"]
    assert [one["name"] for one in listed] == list(presets.names())
    shown = api.client.get("/admin/presets/cog").json
    assert shown["description"] == presets.get("cog")
    assert shown["payload"] == {"prompt": "a cat"}
    assert api.client.get("/admin/presets/no-such").status_code == 404


def test_every_preset_can_be_a_models(api: Api) -> None:
    api.client.put("/admin/secrets/RUNPOD_API_KEY", json={"value": "rpa_not_a_key", "models": None})
    for name in presets.names():
        answer = api.client.put(f"/admin/model-configs/{name}", json={"preset": name})
        assert answer.status_code == 200, answer.text


def test_a_model_whose_copy_of_its_preset_is_older_is_named(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.client.put("/admin/model-configs/zimg", json={"preset": "tgi"})
    assert api.client.get("/admin/presets").json["outdated"] == []
    newer = presets.get("tgi") | {"mode": "auto"}
    monkeypatch.setattr(presets, "get", lambda _name: newer)
    assert api.client.get("/admin/presets").json["outdated"] == [{"model": "zimg", "preset": "tgi"}]
    assert api.client.get("/admin/model-configs/zimg").json["preset_behind"]
    api.client.put("/admin/model-configs/zimg", json={"preset": "tgi"})
    assert api.client.get("/admin/presets").json["outdated"] == []


def test_an_unknown_server_is_recognized_and_tried(api: Api, cog: Scripted) -> None:
    found = api.client.post("/admin/servers/probe", json={"url": cog.url, "payload": {"prompt": "a cat"}}).json
    assert (found["reachable"], found["preset"], found["endpoint"]) == (True, "cog", cog.url)
    assert found["health"]["kind"] == "up"
    assert (found["outcome"]["kind"], found["outcome"]["result"]) == ("done", "A CAT")
    assert found["exchanges"][-1]["means"] == "done"
    assert api.client.get("/admin/servers").json["servers"] == []


def test_the_probe_tries_the_next_preset_after_a_404(api: Api) -> None:
    """A BentoML service lists a task, but the URL names a method that is no task."""

    def act(seen: Seen) -> bytes:
        if seen.path == "/schema.json":
            return answer({"type": "service", "routes": [{"route": "/task", "is_task": True}]})
        return answer({"seen": seen.json}) if (seen.method, seen.path) == ("POST", "/generate") else answer({}, 404)

    with Scripted(act) as there:
        body = {"url": f"{there.url}/generate", "payload": {"prompt": "a cat"}}
        found = api.client.post("/admin/servers/probe", json=body).json
    assert [one["preset"] for one in found["candidates"]] == ["bentoml-task", "bentoml"]
    assert (found["preset"], found["outcome"]["kind"]) == ("bentoml", "done")
    assert [one["status"] for one in found["exchanges"] if one["step"] == "submit"] == [404, 200]


def test_without_a_payload_no_job_is_run(api: Api, cog: Scripted) -> None:
    found = api.client.post("/admin/servers/probe", json={"url": cog.url}).json
    assert found["outcome"] is None
    assert {seen.method for seen in cog.seen} == {"GET"}


def test_a_probe_of_an_unreachable_url_reports_reachable_false(api: Api) -> None:
    found = api.client.post("/admin/servers/probe", json={"url": refused_url(), "preset": "cog"}).json
    assert (found["reachable"], found["endpoint"], found["candidates"]) == (False, None, [])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"url": "gpu1:9001"}, "url"),
        ({"url": "http://169.254.169.254/"}, "url"),
        ({"url": "http://user:pass@gpu1/"}, "url"),
        ({"url": "http://gpu1", "preset": "no-such"}, "preset"),
        ({"url": "http://gpu1", "patience": 100}, "patience"),
        ({"url": "http://gpu1", "model": "no model"}, "model"),
    ],
)
def test_an_invalid_probe_request_is_refused_with_its_field(api: Api, body: dict[str, Any], field: str) -> None:
    refused = api.client.post("/admin/servers/probe", json=body)
    assert (refused.status_code, refused.json["field"]) == (422, field)


def reasons(api: Api, server: str = "gpu1") -> list[str]:
    found = api.client.get(f"/admin/servers/{server}/check").json
    assert bool(found["reasons"]) == ("nothing keeps" not in found["sentence"])
    return [one["code"] for one in found["reasons"] if not one["code"].startswith("health_")]


def test_a_server_that_nothing_keeps_from_jobs_waits_for_them(api: Api) -> None:
    api.register()
    assert reasons(api) == ["nothing_waits"]


def test_the_check_reports_a_server_whose_runs_failed_as_misconfigured(api: Api) -> None:
    api.register()
    task = api.started()
    outcome = Outcome(OutcomeKind.RETRY, code="misconfigured", message="the server answered 404: no such route")
    end_in_order(api.dispatcher, task, decided(api.dispatcher, task, outcome))
    assert reasons(api) == ["misconfigured", "nothing_waits"]
    assert "404: no such route" in api.client.get("/admin/servers/gpu1/check").json["sentence"]
    explained = api.client.get(f"/queue/jobs/{task.run.job.id}/explain").json["sentence"]
    assert "attempt 1 failed (misconfigured: the server answered 404: no such route); before the next" in explained


def test_the_check_reports_a_paused_server_with_the_reason(api: Api) -> None:
    api.register()
    api.client.patch("/admin/servers/gpu1", json={"state": "draining", "reason": "new driver"})
    found = api.client.get("/admin/servers/gpu1/check").json
    assert "server_paused" in [one["code"] for one in found["reasons"]]
    assert "new driver" in found["sentence"]


def test_a_paused_model_keeps_its_server_from_jobs(api: Api) -> None:
    api.register()
    api.client.patch("/admin/models/zimg", json={"state": "paused"})
    assert "model_paused" in reasons(api)


def test_the_check_reports_an_unreachable_server_as_down(api: Api) -> None:
    api.register(endpoint=refused_url() + "/generate")
    found = api.client.get("/admin/servers/gpu1/check").json
    assert found["reasons"][0]["code"] == "health_down"
    assert found["health"]["kind"] == "down"


BROKEN = {"status": "SETUP_FAILED", "setup": {"logs": "FileNotFoundError: weights/model.safetensors"}}


def test_the_check_quotes_the_error_of_a_broken_server(api: Api) -> None:
    api.model(preset="cog")
    with Scripted(lambda _: answer(BROKEN)) as server:
        api.register(endpoint=server.url)
        found = api.client.get("/admin/servers/gpu1/check").json
    assert (found["reasons"][0]["code"], found["health"]["kind"]) == ("health_down", "down")
    assert (
        "its health check says that it cannot run jobs (/status is SETUP_FAILED: FileNotFoundError: "
        "weights/model.safetensors)" in found["sentence"]
    )


def test_the_check_of_a_server_names_a_health_timeout_and_not_a_busy_answer(api: Api) -> None:
    api.model(description={"health": {"read_s": 0.1}})
    with Scripted(lambda _: lambda sock: server.stopped.wait(20)) as server:
        api.register(endpoint=server.url + "/generate")
        found = api.client.get("/admin/servers/gpu1/check").json
    assert found["reasons"][0]["code"] == "health_busy"
    assert "its health check is not answered in time; it gets jobs only if" in found["sentence"]


def test_a_wrong_preset_shows_as_a_health_path_that_is_not_known(api: Api, cog: Scripted) -> None:
    api.register(endpoint=cog.url)
    found = api.client.get("/admin/servers/gpu1/check").json
    assert found["reasons"][0]["code"] == "health_foreign"
    api.client.put("/admin/model-configs/zimg", json={"preset": "cog"})
    assert api.client.get("/admin/servers/gpu1/check").json["health"]["kind"] == "up"


def test_full_slots_are_a_reason(api: Api) -> None:
    api.register()
    api.started()
    assert "slots_busy" in reasons(api)


def test_jobs_that_ask_for_what_a_server_does_not_declare_are_a_reason(api: Api) -> None:
    api.register(attributes={"gpu": "T4"})
    api.submitted(constraints={"gpu": "H100"})
    found = api.client.get("/admin/servers/gpu1/check").json
    one = next(one for one in found["reasons"] if one["code"] == "constraints_unmet")
    assert "H100" in one["sentence"]


def test_a_server_that_does_not_exist_is_not_found(api: Api) -> None:
    assert api.client.get("/admin/servers/nobody/check").status_code == 404


def test_no_worker_alive_is_a_reason(api: Api) -> None:
    api.register()
    workers().remove("tests")
    assert "no_worker" in reasons(api)


def test_the_check_reports_the_end_of_a_cooldown(timed_api: TimedApi) -> None:
    timed_api.register()
    cool_down(timed_api.dispatcher, "zimg", "gpu1")
    found = timed_api.client.get("/admin/servers/gpu1/check").json
    one = next(one for one in found["reasons"] if one["code"] == "server_away")
    assert one["until"]
