"""Commands about batches: what they ask for, and what they say."""

from typing import Any

import pytest
from click.testing import CliRunner
from pytest_httpserver import HTTPServer

from app.cli.__main__ import main

ID = "01a205c4-b6d1-7190-8b8b-b3fbb4ae3540"
BATCH: dict[str, Any] = {
    "batch": ID,
    "tenant": "acme",
    "name": None,
    "status": "active",
    "jobs": 3,
    "ended": 1,
    "by_state": {"queued": 2, "completed": 1},
    "created_at": "2027-01-15T08:00:00.000Z",
    "completed_at": None,
}


@pytest.fixture
def api(httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> HTTPServer:
    monkeypatch.setenv("SLOTKEEPER_URL", httpserver.url_for("").rstrip("/"))
    monkeypatch.setenv("COLUMNS", "200")
    return httpserver


def _stdout_of(*args: str) -> str:
    ran = CliRunner().invoke(main, args)
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def test_batches_list_prints_the_progress_of_each_batch(api: HTTPServer) -> None:
    page = {"batches": [BATCH], "next_cursor": None}
    api.expect_request("/batches", "GET", query_string="limit=20").respond_with_json(page)
    printed = _stdout_of("batches", "list")
    assert all(word in printed for word in (ID, "acme", "1 of 3", "2 queued, 1 completed"))


def test_a_batch_is_shown(api: HTTPServer) -> None:
    api.expect_request(f"/batches/{ID}", "GET").respond_with_json(BATCH)
    assert "2 queued, 1 completed" in _stdout_of("batches", "show", ID)


def test_a_batch_is_canceled(api: HTTPServer) -> None:
    answer = {"batch": ID, "canceled": 2, "canceling": 1, "remaining": 0}
    api.expect_request(f"/batches/{ID}/cancel", "POST").respond_with_json(answer)
    assert _stdout_of("batches", "cancel", ID) == "2 canceled, 1 asked to stop.\n"


def test_a_large_batch_is_canceled_by_several_requests(api: HTTPServer) -> None:
    for canceled, remaining, status in ((3000, 500, 202), (500, 0, 200)):
        answer = {"batch": ID, "canceled": canceled, "canceling": 1, "remaining": remaining}
        api.expect_ordered_request(f"/batches/{ID}/cancel", "POST").respond_with_json(answer, status)
    assert _stdout_of("batches", "cancel", ID).endswith("3500 canceled, 2 asked to stop.\n")


def test_the_jobs_of_a_batch_are_listed(api: HTTPServer) -> None:
    page: dict[str, Any] = {"jobs": [], "next_cursor": None}
    api.expect_request("/queue/jobs", "GET", query_string=f"limit=20&batch={ID}").respond_with_json(page)
    assert "no such jobs" in _stdout_of("jobs", "--batch", ID)
