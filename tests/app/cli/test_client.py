"""The command line against an API with many kinds of responses."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from app.cli.__main__ import main
from app.up.ports import free_port
from slotkeeper.client import ApiError, ApiUnreachable, Client, OutcomeUnknown

PROBLEM = "application/problem+json"


@pytest.fixture
def api(httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> HTTPServer:
    monkeypatch.setenv("SLOTKEEPER_URL", httpserver.url_for(""))
    monkeypatch.setattr("slotkeeper.client.time.sleep", lambda _: None)
    return httpserver


def run(*words: str, stdin: str = "") -> Result:
    done = CliRunner().invoke(main, words, input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception  # what no command should let through
    return done


def problem(status: int, title: str, detail: str, **more: object) -> Response:
    body = {"title": title, "detail": detail, "status": status, **more}
    return Response(json.dumps(body), status, content_type=PROBLEM)


def test_an_unreachable_api_is_reported_in_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTKEEPER_PORT", str(port := free_port()))
    done = run("jobs")
    assert done.exit_code == 3
    assert done.stderr == (
        f"Error: Nothing answers at http://127.0.0.1:{port}: start it with `slotkeeper up`, or set SLOTKEEPER_URL, "
        "or SLOTKEEPER_HOME to the state folder of an installation on this machine.\n"
    )


@pytest.mark.parametrize("url", ["no-url", "ftp://127.0.0.1", "http://", "http://[::1"])
def test_an_address_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("SLOTKEEPER_URL", url)
    done = run("jobs")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("Error: ")


def test_the_client_prints_the_title_and_the_detail_of_a_problem(api: HTTPServer) -> None:
    api.expect_request("/queue/submit").respond_with_response(problem(422, "No such model", "Register it."))
    done = run("submit", "zimg")
    assert (done.exit_code, done.stderr) == (1, "Error: No such model: Register it.\n")


@pytest.mark.parametrize("status", [200, 404, 500])
def test_an_answer_of_something_else_is_no_traceback(api: HTTPServer, status: int) -> None:
    api.expect_request("/queue/jobs").respond_with_data("<html>It works!</html>", status)
    done = run("jobs")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)


def test_the_key_is_shown_to_the_api(api: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTKEEPER_KEY", "sk_mine")
    api.expect_request("/admin/dlq", headers={"Authorization": "Bearer sk_mine"}).respond_with_json(
        {"jobs": [], "next_cursor": None}
    )
    assert run("dlq", "list").output == "There are no such jobs.\n"


def test_a_waiting_submit_prints_the_job_id_and_each_change_of_state(api: HTTPServer) -> None:
    error = {"code": "server_error", "message": "out of memory"}
    stands: list[dict[str, Any]] = [
        {"status": "queued", "position": 3},
        {"status": "queued", "position": 3},
        {"status": "delayed", "position": None, "attempts": 1, "last_error": error},
        {"status": "completed", "position": None, "result": "a cat"},
    ]
    api.expect_ordered_request("/queue/submit").respond_with_json({"job_id": "1"} | stands[0])
    for stand in stands:
        api.expect_ordered_request("/queue/jobs/1").respond_with_json({"job_id": "1", "attempts": 0} | stand)
    done = run("submit", "zimg", "--wait")
    assert done.stderr.splitlines() == [
        "1  queued  position 3",
        "1  delayed  attempt 1: server_error: out of memory",
    ]
    assert done.stdout == "1  completed  a cat\n" and done.exit_code == 0


def test_numbers_reach_the_api_as_they_were_written(api: HTTPServer) -> None:
    seen: list[bytes] = []
    receipt = {"job_id": "1", "status": "queued", "position": 1}
    api.expect_request("/queue/submit").respond_with_handler(
        lambda request: seen.append(request.get_data()) or Response(json.dumps(receipt), 202)
    )
    assert run("submit", "zimg", '{"seed": 123456789012345678901234567890}').exit_code == 0
    assert b"123456789012345678901234567890" in seen[0]


@pytest.mark.parametrize("payload", ["{", "@/no/such/file", "-"])
def test_a_payload_that_is_no_json_is_wrong_usage(payload: str) -> None:
    done = run("submit", "zimg", payload)
    assert done.exit_code == 2
    assert "PAYLOAD" in done.stderr


def test_the_client_waits_for_retry_after_before_it_repeats_a_request(
    api: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("slotkeeper.client.time.sleep", slept.append)
    answers = iter([Response("{}", 503, {"Retry-After": "3"}), Response("{}", 429), Response('{"ok": 1}')])
    api.expect_request("/x").respond_with_handler(lambda _: next(answers))
    client = Client(api.url_for(""))
    assert client.retry(lambda: client.get("/x")) == {"ok": 1}
    assert slept == [3, 1.0]


def test_a_wrong_request_is_not_sent_again(api: HTTPServer) -> None:
    api.expect_oneshot_request("/x").respond_with_response(problem(422, "Wrong", "field"))
    client = Client(api.url_for(""))
    with pytest.raises(ApiError):
        client.retry(lambda: client.get("/x"))
    assert len(api.log) == 1


def test_patience_ends() -> None:
    client = Client(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ApiUnreachable):
        client.retry(lambda: client.get("/x"), patience_s=0)


def test_lists_are_read_page_by_page_up_to_the_limit(api: HTTPServer) -> None:
    def page(request: Request) -> Response:
        start, limit = int(request.args.get("cursor", 0)), int(request.args["limit"])
        found = [{"n": n} for n in range(start, start + limit)]
        return Response(json.dumps({"jobs": found, "next_cursor": str(start + limit)}))

    api.expect_request("/queue/jobs").respond_with_handler(page)
    found = list(Client(api.url_for("")).iter_pages("/queue/jobs", "jobs", 450))
    assert [item["n"] for item in found] == list(range(450))


def test_settings_of_a_model_are_added_to_those_it_has(api: HTTPServer) -> None:
    path = "/admin/model-configs/org/flux"
    api.expect_request(path, method="GET").respond_with_json({"overrides": {"max_retries": 3}})
    sent: list[object] = []

    def put(request: Request) -> Response:
        sent.append(request.json)
        return Response(json.dumps({"config": request.json}))

    api.expect_request(path, method="PUT").respond_with_handler(put)
    api.expect_request("/admin/models/org/flux").respond_with_json({"servers": []})
    done = run("models", "configure", "org/flux", "poll_interval=0.5", "model_type=async")
    assert sent == [{"max_retries": 3, "poll_interval": 0.5, "model_type": "async"}]
    assert done.stdout.split() == ["poll_interval", "0.5", "model_type", "async"]
    assert (done.exit_code, done.stderr) == (0, "No server serves org/flux yet: see `slotkeeper models list`.\n")


def test_a_ledger_that_does_not_balance_is_exit_status_1(api: HTTPServer) -> None:
    answer = {"accepted": 3, "by_state": {"queued": 2}, "purged": {}, "balanced": False}
    api.expect_request("/admin/ledger").respond_with_json(answer)
    assert run("ledger").exit_code == 1
    assert run("ledger", "--json").exit_code == 1


def test_options_that_do_not_go_together_are_wrong_usage() -> None:
    assert run("up", "--no-demo", "--exit-after-demo").exit_code == 2
    assert run("tenants", "add", "me", "--burst", "3").exit_code == 2


def test_a_command_on_a_missing_database_says_which_command_creates_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tasks.services import database

    monkeypatch.setenv("SLOTKEEPER_HOME", str(tmp_path))
    database.cache_clear()
    try:
        done = run("tenants", "list")
    finally:
        database.cache_clear()
    assert done.exit_code == 1
    assert "slotkeeper migrate" in done.stderr


def test_without_a_valid_key_the_variable_that_holds_it_is_named(api: HTTPServer) -> None:
    api.expect_request("/queue/jobs/j1").respond_with_response(problem(401, "No valid key", "Send a header."))
    done = run("job", "j1")
    assert done.exit_code == 1
    assert "SLOTKEEPER_KEY" in done.stderr and "slotkeeper tenants add" in done.stderr


@pytest.mark.parametrize("words", [("job", "j", "--wait"), ("submit", "zimg", "--wait")])
def test_ctrl_c_ends_the_wait_and_not_the_job_and_is_no_failure(
    api: HTTPServer, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    api.expect_request("/queue/jobs/j").respond_with_json({"job_id": "j", "status": "running"})
    api.expect_request("/queue/submit").respond_with_json({"job_id": "j", "status": "queued"}, 202)

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "wait_for_job", interrupt)
    done = run(*words)
    assert (done.exit_code, "slotkeeper job j --wait" in done.stderr) == (130, True)


def test_ctrl_c_while_several_jobs_are_awaited_names_them(api: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(("first", "second"))
    answer = lambda _: Response(json.dumps({"job_id": next(ids), "status": "queued"}), 202)  # noqa: E731
    api.expect_request("/queue/submit").respond_with_handler(answer)

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "wait_for_job", interrupt)
    done = run("submit", "zimg", "--count", "2", "--wait")
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-3:] == ["The 2 jobs continue; see each with: slotkeeper job ID", "first", "second"]


def test_ctrl_c_in_any_command_is_no_failure(api: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "get", interrupt)
    assert run("servers", "list").exit_code == 130


# -- an API that is away while a job is waited for ---------------------------------------------------------------


def test_waiting_for_a_job_outlives_a_restart_of_the_api(api: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    running = {"job_id": "j", "status": "running", "position": None, "attempts": 1}
    answers: list[Any] = [running, ApiUnreachable("Nothing answers."), ApiError(503, {"title": "Starting"}, 0.0)]
    answers += [running, {**running, "status": "completed", "result": {"ok": True}}]

    def get(_: Client, path: str, **params: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Client, "get", get)
    done = run("job", "j", "--wait")
    assert done.exit_code == 0 and answers == []
    assert "Nothing answers.  The job continues; trying again." in done.stderr


def test_a_wait_for_a_job_raises_outcome_unknown_while_the_api_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(OutcomeUnknown, match="slotkeeper job j --wait"):
        client.wait_for_job("j", patience_s=0.0)


def test_a_failed_job_and_an_unknown_outcome_have_different_exit_statuses(
    api: HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {"job_id": "j", "status": "failed", "attempts": 1, "error": {"code": "bad", "message": "no"}}
    monkeypatch.setattr(Client, "get", lambda *_, **__: failed)
    assert run("job", "j", "--wait").exit_code == 1

    def wait(*_: Any, **__: Any) -> Any:
        raise OutcomeUnknown("Nothing answers.")

    monkeypatch.setattr(Client, "wait_for_job", wait)
    assert run("job", "j", "--wait").exit_code == 3


@pytest.mark.parametrize(("ca", "verify"), [(None, True), ("", True), ("ca.pem", "ca.pem"), (False, False)])
def test_only_the_value_false_disables_certificate_verification(ca: Any, verify: Any) -> None:
    assert Client("https://api.example", ca=ca)._session.verify == verify
