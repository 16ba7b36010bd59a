"""Commands about presets: the output of presets, probes and checks, and their exit status."""

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pytest_httpserver import HTTPServer

from app.cli.__main__ import main

PRESET = {
    "name": "cog",
    "title": "Cog",
    "servers": "Containers built with Cog",
    "evidence": "live",
    "checked": "Run on cog 0.23.1.",
    "notes": ["It cannot be polled."],
    "endpoint": "http://gpu1:5000",
    "slots": 1,
    "payload": {"prompt": "it's a cat"},
}
EXCHANGE = {
    "step": "submit",
    "request": "PUT /predictions/probe-1",
    "sent": None,
    "status": 200,
    "answer": '{"status":"succeeded"}',
    "took_ms": 9,
    "rule": "submit.rules[0]: {}",
    "means": "done",
}
PROBE: dict[str, Any] = {
    "reachable": True,
    "candidates": [{"preset": "cog", "weight": 10, "because": "GET /health-check answered as its servers do"}],
    "preset": "cog",
    "endpoint": "http://gpu1:5000",
    "model": None,
    "health": {"kind": "up", "active_jobs": None, "job_ids": None, "message": ""},
    "outcome": {"kind": "done", "code": "", "message": "", "result": "A CAT"},
    "exchanges": [EXCHANGE],
}
CHECK: dict[str, Any] = {
    "server": "gpu1",
    "sentence": "gpu1: server 'gpu1' is paused (new driver).",
    "reasons": [{"code": "server_paused", "sentence": "server 'gpu1' is paused", "subject": "gpu1", "until": None}],
    "health": {"kind": "up", "active_jobs": 0, "job_ids": [], "message": ""},
}


@pytest.fixture
def api(httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> HTTPServer:
    monkeypatch.setenv("SLOTKEEPER_URL", httpserver.url_for("").rstrip("/"))
    return httpserver


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def test_presets_are_listed(api: HTTPServer) -> None:
    api.expect_request("/admin/presets").respond_with_json({"presets": [PRESET], "outdated": []})
    ran = run("presets")
    assert ran.exit_code == 0, ran.output
    assert "cog" in ran.stdout and "live" in ran.stdout


def test_a_preset_is_shown_with_commands_that_can_be_pasted(api: HTTPServer) -> None:
    api.expect_request("/admin/presets/cog").respond_with_json({**PRESET, "description": {"mode": "sync"}})
    ran = run("presets", "cog")
    assert '"mode": "sync"' in ran.stdout
    assert "slotkeeper models configure MODEL preset=cog" in ran.stdout
    assert "slotkeeper servers register MODEL SERVER http://gpu1:5000 --slots 1" in ran.stdout
    assert """'{"prompt": "it'"'"'s a cat"}'""" in ran.stdout


def test_a_probe_sends_the_options_and_prints_each_exchange(api: HTTPServer) -> None:
    wanted = {"url": "http://gpu1:5000", "patience": 10.0, "payload": {"prompt": "a cat"}, "model": "flux"}
    api.expect_request("/admin/servers/probe", method="POST", json=wanted).respond_with_json(PROBE)
    ran = run("servers", "probe", "http://gpu1:5000", "--payload", '{"prompt": "a cat"}', "--model", "flux")
    assert ran.exit_code == 0, ran.output
    assert "submit  PUT /predictions/probe-1  9 ms  ->  200" in ran.stdout
    assert "done, by submit.rules[0]" in ran.stdout
    assert "slotkeeper models configure flux preset=cog" in ran.stdout


@pytest.mark.parametrize(
    ("changed", "printed"),
    [
        ({"reachable": False, "preset": None, "endpoint": None, "outcome": None, "health": None}, "No server answers"),
        ({"endpoint": "http://gpu1:5000/v2/models/MODEL"}, "servers probe http://gpu1:5000/v2/models/MODEL"),
        ({"outcome": {"kind": "retry", "code": "server_error", "message": "boom", "result": None}}, "server_error"),
    ],
)
def test_a_failed_probe_exits_with_1(api: HTTPServer, changed: dict[str, Any], printed: str) -> None:
    api.expect_request("/admin/servers/probe").respond_with_json({**PROBE, **changed})
    ran = run("servers", "probe", "http://gpu1:5000")
    assert ran.exit_code == 1
    assert printed in ran.stdout


def test_a_check_names_each_reason_and_fails_if_there_is_one(api: HTTPServer) -> None:
    api.expect_request("/admin/servers/gpu1/check").respond_with_json(CHECK)
    ran = run("servers", "check", "gpu1")
    assert ran.exit_code == 1
    assert "server_paused" in ran.stdout and '"active_jobs": 0' in ran.stdout


def test_a_server_without_work_is_well(api: HTTPServer) -> None:
    idle = {"code": "nothing_waits", "sentence": "no job waits", "subject": None, "until": None}
    api.expect_request("/admin/servers/gpu1/check").respond_with_json({**CHECK, "reasons": [idle]})
    assert run("servers", "check", "gpu1").exit_code == 0


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("presets", "--json"), {"presets": [PRESET]}),
        (("servers", "probe", "http://gpu1", "--json"), PROBE),
        (("servers", "check", "gpu1", "--json"), CHECK),
    ],
)
def test_json_output_is_the_response_of_the_api(api: HTTPServer, words: tuple[str, ...], answer: Any) -> None:
    path = {"presets": "/admin/presets", "probe": "/admin/servers/probe", "check": "/admin/servers/gpu1/check"}
    api.expect_request(next(route for name, route in path.items() if name in words)).respond_with_json(answer)
    assert json.loads(run(*words).stdout) == answer
