"""The command line against an API that answers in all sorts of ways."""

import json
import re
import shlex
from functools import partialmethod
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


def test_a_server_that_does_not_run_is_one_line_that_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_problem_is_told_as_what_is_wrong_and_what_to_do(api: HTTPServer) -> None:
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


def test_a_job_that_is_waited_for_says_its_id_first_and_each_change(api: HTTPServer) -> None:
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


def test_busy_is_waited_out_as_long_as_the_api_says(api: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
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


class Batches:
    """An API that takes batches, knows keys again, and refuses lines that hold the word `bad`."""

    def __init__(self, api: HTTPServer) -> None:
        self.accepted: list[dict[str, object]] = []
        self.named: set[str | None] = set()
        self.refusals = [Response("{}", 503, {"Retry-After": "1"})]
        api.expect_request("/queue/submit-batch").respond_with_handler(self.answer)

    def answer(self, request: Request) -> Response:
        if self.refusals:
            return self.refusals.pop()
        lines = request.get_data().splitlines()
        for index, line in enumerate(lines):
            if b"bad" in line:
                return problem(422, "Wrong", "bad", index=index)
        known = {job["idempotency_key"] for job in self.accepted}
        new = [job for job in map(json.loads, lines) if job["idempotency_key"] not in known]
        self.accepted += new
        self.named.add(request.args.get("batch"))
        return Response(json.dumps({"batch": request.args.get("batch", "first"), "accepted": len(new)}), 202)


def test_a_file_is_submitted_in_order_without_its_bad_lines(api: HTTPServer, tmp_path: Path) -> None:
    batches = Batches(api)
    lines = [f'{{"model": "zimg", "payload": {{"n": {n}}}}}' for n in range(450)]
    lines[3], lines[7], lines[440] = "bad", "", '{"model": "bad"}'
    path = tmp_path / "jobs.ndjson"
    path.write_text("\n".join(lines))
    done = run("submit-file", str(path), "--run", 'to"day')
    assert done.exit_code == 1
    assert "Accepted: 447 jobs.  Refused: 2 lines." in done.stdout
    assert re.findall("^Line ([0-9]+):", done.stderr, re.MULTILINE) == ["4", "441"]
    assert "Correct the refused lines in the file, and submit them with: slotkeeper submit-file" in done.stderr
    assert [job["payload"]["n"] for job in batches.accepted] == [n for n in range(450) if n not in (3, 7, 440)]  # type: ignore[index]
    keys = {str(job["idempotency_key"]) for job in batches.accepted}
    assert len(keys) == 447 and all(key.startswith('to"day-') for key in keys)


def test_a_line_that_is_taken_out_makes_no_other_line_a_new_job(api: HTTPServer, tmp_path: Path) -> None:
    batches, path = Batches(api), tmp_path / "jobs.ndjson"
    lines = [f'{{"model": "zimg", "payload": {{"n": {n // 2}}}}}' for n in range(450)]  # Each stands there twice.
    path.write_text("\n".join([*lines[:99], "bad", *lines[99:]]))
    assert "Accepted: 450 jobs.  Refused: 1 lines." in run("submit-file", str(path), "--run", "mine").stdout
    path.write_text("\n".join(lines))
    again = run("submit-file", str(path), "--run", "mine")
    assert "Accepted: 0 jobs, and 450 had been accepted before." in again.stdout
    assert len(batches.accepted) == 450


def test_a_line_keeps_its_own_idempotency_key(api: HTTPServer, tmp_path: Path) -> None:
    batches = Batches(api)
    path = tmp_path / "jobs.ndjson"
    path.write_text('{"idempotency_key": "mine", "model": "zimg"}\n{}\n')
    assert run("submit-file", str(path), "--run", "r").exit_code == 0
    mine, other = batches.accepted
    assert mine == {"idempotency_key": "mine", "model": "zimg"} and re.fullmatch(
        "r-[0-9a-f]{32}-1", other["idempotency_key"]
    )


def test_a_file_goes_on_through_a_restart_of_the_api_and_says_so(
    api: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, post, away = Batches(api), Client.post, [True, True]
    monkeypatch.setattr("time.sleep", lambda _: None)

    def post_when_back(client: Client, *request: Any) -> Any:
        if away and away.pop():
            raise ApiUnreachable("Nothing answers at the API.")
        return post(client, *request)

    monkeypatch.setattr(Client, "post", post_when_back)
    (path := tmp_path / "jobs.ndjson").write_text('{"model": "zimg"}\n')
    done = run("submit-file", str(path))
    assert (done.exit_code, len(batches.accepted)) == (0, 1)
    assert done.stderr.count("Nothing answers at the API.  Sending the job again; it is accepted only once.") == 2


def test_a_file_whose_api_stays_away_is_not_known_to_be_submitted(
    api: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stay_away(client: Client, *request: Any) -> Any:
        raise ApiUnreachable("Nothing answers at the API.")

    monkeypatch.setattr(Client, "post", stay_away)
    monkeypatch.setattr(Client, "retry", partialmethod(Client.retry, patience_s=0.0))
    (path := tmp_path / "jobs.ndjson").write_text('{"model": "zimg"}\n')
    done = run("submit-file", str(path), "--run", "mine")
    assert done.exit_code == 3 and "submit the rest with" in done.stderr


def test_a_file_that_was_broken_off_says_how_to_go_on(api: HTTPServer, tmp_path: Path) -> None:
    api.expect_request("/queue/submit-batch").respond_with_response(problem(401, "No valid key", "Send one."))
    path = tmp_path / "jobs.ndjson"
    path.write_text('{"model": "zimg"}\n')
    done = run("submit-file", str(path), "--run", "mine")
    assert done.exit_code == 1
    assert "No valid key: set SLOTKEEPER_KEY" in done.stderr
    assert "--run mine" in done.stderr


@pytest.mark.parametrize("chosen", [None, "to day's"])
def test_the_command_printed_at_ctrl_c_goes_on_with_the_run(
    api: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    batches = Batches(api)
    path = tmp_path / "my jobs.ndjson"
    path.write_text("".join(f'{{"model": "zimg", "payload": {{"n": {n}}}}}\n' for n in range(450)))
    post = Client.post

    def post_until_ctrl_c(client: Client, *request: Any) -> Any:
        if len(batches.accepted) == 200:
            raise KeyboardInterrupt
        return post(client, *request)

    with monkeypatch.context() as patched:
        patched.setattr(Client, "post", post_until_ctrl_c)
        stopped = run("submit-file", str(path), *(["--run", chosen] if chosen else []))
    assert (stopped.exit_code, len(batches.accepted)) == (130, 200)
    first, *_, last = stopped.stderr.splitlines()
    assert last.startswith("200 jobs were accepted; submit the rest with: slotkeeper submit-file ")
    command = shlex.split(last.partition("rest with: ")[2])
    assert command == shlex.split(first.partition("continue with: ")[2]), "it was named before the first line was sent"
    done = run(*command[1:], "--json")
    assert [job["payload"]["n"] for job in batches.accepted] == list(range(450))  # type: ignore[index]
    facts = json.loads(done.stdout)
    assert (facts["accepted"], facts["known"], facts["refused"]) == (250, 200, 0)
    assert "Accepted: 0 jobs, and 450 had been accepted before." in run(*command[1:]).stdout


def test_all_lines_of_a_file_are_one_batch(api: HTTPServer, tmp_path: Path) -> None:
    batches = Batches(api)
    path = tmp_path / "jobs.ndjson"
    path.write_text('{"model": "zimg"}\n' * 450)
    facts = json.loads(run("submit-file", str(path), "--json").stdout)
    assert batches.named == {facts["batch"]} == {facts["run"]}
    batches.named.clear()
    assert json.loads(run("submit-file", str(path), "--run", "r", "--json").stdout)["batch"] == "first"
    assert batches.named == {None, "first"}


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


def test_tenants_of_a_record_that_is_not_there_say_what_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_the_end_of_a_job_is_not_known_where_the_api_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(OutcomeUnknown, match="slotkeeper job j --wait"):
        client.wait_for_job("j", patience_s=0.0)


def test_a_job_that_has_failed_is_another_exit_status_than_one_of_which_nothing_is_known(
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
def test_only_false_leaves_the_certificate_unchecked(ca: Any, verify: Any) -> None:
    assert Client("https://api.example", ca=ca)._session.verify == verify
