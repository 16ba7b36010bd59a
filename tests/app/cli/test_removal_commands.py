"""Commands that remove: their requests and their output."""

from typing import Any

import pytest
from click.testing import CliRunner, Result
from pytest_httpserver import HTTPServer

from app.cli.__main__ import main

DONE: dict[str, Any] = {"name": "zimg", "state": "done", "remaining": {}, "quarantined": 0, "lost": [], "idle": []}


@pytest.fixture
def api(httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> HTTPServer:
    monkeypatch.setenv("SLOTKEEPER_URL", httpserver.url_for("").rstrip("/"))
    monkeypatch.setenv("COLUMNS", "200")
    return httpserver


def _run(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def test_a_model_is_removed(api: HTTPServer) -> None:
    api.expect_request("/admin/models/zimg", "DELETE", query_string="").respond_with_json({**DONE, "idle": ["gpu1"]})
    ran = _run("models", "remove", "zimg")
    assert (ran.exit_code, ran.stdout.splitlines()) == (
        0,
        ["zimg is removed.", "These servers serve no model now: gpu1."],
    )


def test_models_remove_drain_prints_the_remaining_jobs(api: HTTPServer) -> None:
    leaving = {**DONE, "state": "leaving", "remaining": {"queued": 2, "running": 1}}
    api.expect_request("/admin/models/zimg", "DELETE", query_string="drain=true").respond_with_json(leaving, 202)
    printed = "zimg gets no new jobs, and is removed when these have ended: 2 queued, 1 running."
    assert _run("models", "remove", "zimg", "--drain").stdout.strip() == printed


def test_a_forced_removal_of_a_server_prints_the_jobs_that_lost_their_runs(api: HTTPServer) -> None:
    lost = {**DONE, "name": "gpu1", "lost": ["j1", "j2"]}
    api.expect_request("/admin/servers/gpu1", "DELETE", query_string="force=true").respond_with_json(lost)
    assert (
        "These jobs lost their runs, and run again on other servers: j1, j2."
        in _run("servers", "remove", "gpu1", "--force").stdout
    )


def test_a_removal_is_called_off(api: HTTPServer) -> None:
    api.expect_request("/admin/models/zimg/removal", "DELETE").respond_with_json({})
    assert _run("models", "keep", "zimg").stdout == "The removal of zimg is canceled.\n"
