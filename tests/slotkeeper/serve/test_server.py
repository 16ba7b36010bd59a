"""The rules of the reference server beyond the protocol, on real processes."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import requests
from pytest_httpserver import HTTPServer

from slotkeeper.conform.check_context import CheckContext, ServerUnderTest, wait_until
from slotkeeper.conform.gate import Gate
from slotkeeper.conform.reference import started as process
from slotkeeper.serve import ReferenceServer, ServeConfig, ServeError, gated
from slotkeeper.serve.demo import flux, zimg
from slotkeeper.serve.served_function import TargetError, load
from tests.slotkeeper.serve import gates

ROOT = Path(__file__).parents[3]


@contextmanager
def embedded(function: Callable, **options) -> Iterator[ServerUnderTest]:
    """The server inside this process, where that makes no difference."""
    with ReferenceServer(function, ServeConfig(port=0, **options)) as server:
        yield ServerUnderTest(server.url, "async" if options.get("asynchronous") else "sync")


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "slotkeeper.serve", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)


# The command


def test_a_port_that_is_taken_is_one_line_with_its_number():
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        ended = run_command("slotkeeper.serve.demo:zimg", "--port", port)
    assert ended.returncode == 1
    assert f"port {port} of 127.0.0.1" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("slotkeeper.serve.demo", "package.module:function"),
        ("no_such_module:function", "no module 'no_such_module'"),
        ("slotkeeper.serve.nowhere:function", "no module 'slotkeeper.serve.nowhere'"),
        ("slotkeeper.serve.demo:nobody", "no function 'nobody'"),
        ("slotkeeper.serve.demo:__doc__", "no function '__doc__'"),
    ],
)
def test_a_target_that_cannot_be_served_is_refused_with_the_reason(target: str, why: str):
    with pytest.raises(TargetError, match=why):
        load(target)


def test_a_target_that_cannot_be_served_ends_the_command_in_one_line():
    ended = run_command("no_such_module:function")
    assert (ended.returncode, ended.stderr) == (1, "Error: there is no module 'no_such_module'\n")


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"port": 70000},
        {"endpoint": "generate"},
        {"endpoint": "/health"},
        {"endpoint": "/status/x"},
        {"max_direct_queue": -1},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(wrong: dict):
    with pytest.raises(ValueError):
        ServeConfig(**wrong)


def test_a_journal_that_cannot_be_written_is_refused(tmp_path: Path):
    with pytest.raises(ServeError, match="journal"):
        ReferenceServer(zimg, ServeConfig(port=0, journal=tmp_path / "missing" / "journal"))


# Stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_cleanly_at_a_signal(number: int):
    with process("slotkeeper.serve.gated:model") as started:
        requests.get(started.served.url + "/health", timeout=5)
        started.child.send_signal(number)
        assert started.child.wait(timeout=5) == 0
        assert started.errors() == ""


def test_a_stopping_server_finishes_what_runs_and_starts_nothing():
    with closing(Gate()) as gate, process("slotkeeper.serve.gated:model", "--slots", "2") as started:
        harness = CheckContext(started.served, gate)
        run = harness.begin()
        started.child.terminate()
        wait_until(lambda: started.served.health()["status"] == "stopping", "the stop")
        refused = started.served.dispatch(harness.payload())
        assert (refused.status_code, refused.json()["status"]) == (503, "busy")
        assert run.finish()["status"] == "completed"
        assert started.child.wait(timeout=5) == 0


def test_after_the_grace_runs_are_canceled():
    with closing(Gate()) as gate, process("slotkeeper.serve.gated:model", "--grace", "0") as started:
        run = CheckContext(started.served, gate).begin()
        started.child.terminate()
        assert run.outcome()["status"] == "canceled"
        assert started.child.wait(timeout=5) == 0


def test_a_second_signal_ends_it_at_once():
    with closing(Gate()) as gate, process("slotkeeper.serve.gated:deaf") as started:
        harness = CheckContext(started.served, gate)
        harness.later(lambda: harness.served.dispatch(harness.payload()))
        gate.arrival()
        started.child.terminate()
        wait_until(lambda: started.served.health()["status"] == "stopping", "the stop")
        started.child.terminate()
        assert started.child.wait(timeout=5) == 128 + signal.SIGTERM


# The journal


def test_the_journal_has_a_line_per_run_and_no_overlap_in_a_slot(tmp_path: Path):
    journal = tmp_path / "journal"
    with process("slotkeeper.serve.gated:model", "--slots", "2", "--journal", str(journal)) as started:
        served = started.served
        answers = [served.threads.submit(served.generate, {"n": n}) for n in range(12)]
        accepted = [a.result(10).json() for a in answers if a.result(10).status_code == 200]
        for body in accepted:
            served.outcome(_answer(body))
        served.dispatch({"fail": "error"}, job="a", attempt=4)
        served.dispatch({"fail": "invalid"}, job="b")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert len(lines) == len(accepted) + 2
    for slot in (0, 1):
        runs = sorted((line["started_ns"], line["ended_ns"]) for line in lines if line["slot"] == slot)
        assert all(one[0] <= one[1] <= other[0] for one, other in pairwise(runs))
    last = {line["job_id"]: line for line in lines}
    assert (last["a"]["attempt"], last["a"]["outcome"], last["a"]["source"]) == (4, "error", "dispatcher")
    assert (last["b"]["run_id"], last["b"]["outcome"]) == ("b.1", "invalid")
    assert lines[0]["source"] == "direct"


def _answer(body: dict) -> requests.Response:
    answer = requests.Response()
    answer._content = json.dumps(body).encode()
    return answer


def test_a_line_is_there_when_the_end_is_known(tmp_path: Path):
    journal = tmp_path / "journal"
    with embedded(gated.model, journal=journal) as served:
        served.dispatch(job="a")
        assert json.loads(journal.read_text())["job_id"] == "a"


# The push


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("payload", "word"), [({}, "completed"), ({"fail": "error"}, "failed")])
def test_the_end_is_pushed_to_the_callback(httpserver: HTTPServer, asynchronous: bool, payload: dict, word: str):
    handler = httpserver.expect_request("/callback/a", method="POST", headers={"Authorization": "Bearer secret"})
    handler.respond_with_data("")
    headers = {"X-Callback-Url": httpserver.url_for("/callback/a"), "X-Callback-Token": "secret"}
    with embedded(gated.model, push=True, asynchronous=asynchronous) as served:
        served.dispatch(payload, job="a", **headers)
        wait_until(lambda: httpserver.log, "the push")
        request, _ = httpserver.log[0]
        assert request.get_json() == served.status("a").json()
        assert (request.get_json()["status"], request.get_json()["job_id"]) == (word, "a.1")


def test_a_push_is_retried_after_a_server_error_and_not_after_a_client_error(httpserver: HTTPServer):
    for status in (500, 503, 404, 200):
        httpserver.expect_ordered_request("/").respond_with_data("", status=status)
    headers = {"X-Callback-Url": httpserver.url_for("/"), "X-Callback-Token": "secret"}
    server = ReferenceServer(gated.model, ServeConfig(port=0, push=True))
    assert server._pusher
    server._pusher._pause_s = 0.001
    with server:
        ServerUnderTest(server.url, "sync").dispatch({}, **headers)
        assert server._pusher.wait(10)
    assert [response.status_code for _, response in httpserver.log] == [500, 503, 404]


def test_without_the_option_nothing_is_pushed(httpserver: HTTPServer):
    headers = {"X-Callback-Url": httpserver.url_for("/"), "X-Callback-Token": "secret"}
    with embedded(gated.model) as served:
        assert served.dispatch({}, **headers).status_code == 200
    assert httpserver.log == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a/", "http://", "http://a:99999/", "nothing"])
def test_a_callback_that_is_no_web_address_is_refused(url: str):
    with embedded(gated.model, push=True) as served:
        answer = served.dispatch({}, **{"X-Callback-Url": url, "X-Callback-Token": "secret"})
    assert answer.status_code == 400


# Models


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", [zimg, flux])
def test_the_demo_models_answer_with_a_url(model: Callable, asynchronous: bool):
    with embedded(model, asynchronous=asynchronous) as served:
        ended = served.outcome(served.dispatch({"prompt": "a cat", "seconds": 0}))
    assert ended["result"]["prompt"] == "a cat"
    assert ended["result"]["url"].startswith("https://")


@pytest.mark.parametrize(
    ("payload", "status"),
    [({"fail": "error"}, 500), ({"fail": "invalid"}, 422), ({"seconds": "long"}, 422), ({"seconds": -1}, 422)],
)
def test_the_demo_models_fail_as_the_payload_requests(payload: dict, status: int):
    with embedded(zimg) as served:
        assert served.dispatch({"seconds": 0, **payload}).status_code == status


def test_a_demo_model_fails_for_the_requested_number_of_attempts():
    payload = {"seconds": 0, "fail": "error", "fail_attempts": 2}
    with embedded(zimg) as served:
        statuses = [served.dispatch(payload, job="a", attempt=attempt).status_code for attempt in (1, 2, 3)]
    assert statuses == [500, 500, 200]


def test_a_demo_model_crashes_the_server_on_request():
    with process("slotkeeper.serve.demo:zimg") as started:
        with pytest.raises(requests.ConnectionError):
            started.served.dispatch({"seconds": 0, "fail": "crash"})
        assert started.child.wait(timeout=5) == 3


def test_a_demo_model_ends_when_canceled():
    with embedded(flux, asynchronous=True) as served:
        job_id = served.dispatch({"seconds": 3600}).json()["job_id"]
        assert served.cancel(job_id).json()["status"] == "canceling"
        assert served.ended(job_id)["status"] == "canceled"


def test_a_coroutine_can_be_served():
    with embedded(gates.coroutine) as served:
        assert served.dispatch({"a": 1}).json()["result"] == {"echo": {"a": 1}}


def test_a_run_whose_model_cannot_receive_a_cancel_is_not_reported_as_canceling():
    with closing(Gate()) as gate, embedded(gated.deaf) as served:
        harness = CheckContext(served, gate)
        answer = harness.later(lambda: served.dispatch(harness.payload(), job="a"))
        held = gate.arrival()
        assert served.cancel("a").json()["status"] == "processing"
        held.release()
        assert answer.result(10).json()["status"] == "success"


def test_a_result_that_is_no_json_is_final_and_frees_the_slot():
    with embedded(gates.unspeakable) as served:
        answer = served.dispatch()
        assert (answer.status_code, answer.json()["retryable"]) == (422, False)
        assert "return JSON values, bytes, an image or a file" in answer.json()["error"]
        assert served.health()["active_jobs"] == 0


def _leave(payload: dict) -> None:
    raise SystemExit


def test_a_function_that_tries_to_exit_only_ends_its_run():
    with embedded(_leave) as served:
        assert served.dispatch().status_code == 500
        assert served.health()["active_jobs"] == 0


def test_health_reports_the_maximum_of_concurrent_runs_and_the_served_model():
    with closing(Gate()) as gate, embedded(gated.model, slots=3, model="zimg", endpoint="/run") as served:
        served.endpoint = "/run"
        harness = CheckContext(served, gate)
        for run in [harness.begin(), harness.begin()]:
            run.finish()
        now = served.health()
    assert (now["max_active"], now["active_jobs"]) == (2, 0)
    assert (now["model"], now["mode"], now["endpoint"]) == ("zimg", "sync", "/run")


# Bytes on the wire


@pytest.fixture(scope="module")
def small() -> Iterator[ServerUnderTest]:
    """A server that takes bodies of at most 1000 bytes."""
    with embedded(gated.model, max_body_bytes=1000) as served:
        yield served


def say(served: ServerUnderTest, *pieces: bytes) -> bytes:
    """Send the pieces, then listen until the server hangs up."""
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as line, line.makefile("rb") as answers:
        for piece in pieces:
            line.sendall(piece)
        return answers.read()


POST = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
CLOSE = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"rubbish\r\n\r\n", 400),
        (b"GET /health HTTP/3\r\n\r\n", 400),
        (POST + b"no colon\r\n\r\n", 400),
        (POST + b"Name : value\r\n\r\n", 400),
        (POST + b"Host: localhost\r\n\r\n", 400),
        (POST + b"Origin: null\r\nOrigin: http://localhost\r\n\r\n", 400),
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: two\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411),
        (POST + b"Content-Length: 1001\r\n\r\n" + b"x" * 1001, 413),
        (POST + b"Content-Length: 99999999999999999999\r\n\r\n", 413),
        (POST + b"A: " + b"x" * 70_000 + b"\r\n\r\n", 431),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_in_json_and_ends_the_connection(small, request_bytes, status):
    head, _, body = say(small, request_bytes).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"Connection: close" in head
    assert json.loads(body)["status"] == "failed"


def test_a_body_of_exactly_the_bound_is_read(small: ServerUnderTest):
    payload = {"x": "y" * (1000 - len('{"x": ""}'))}
    assert small.dispatch(payload).status_code == 200


def test_a_large_body_is_refused_and_the_answer_arrives(small: ServerUnderTest):
    """Without reading on for a moment the system resets the connection under the client that still sends."""
    answer = say(small, POST + b"Content-Length: 5000000\r\n\r\n", b"x" * 5_000_000)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_requests_sent_in_one_piece_or_in_many_are_answered_in_order(small: ServerUnderTest):
    request = POST + b'Content-Length: 7\r\n\r\n{"a":1}' + CLOSE
    whole = say(small, request)
    pieces = say(small, *(request[at : at + 1] for at in range(len(request))))
    for answers in (whole, pieces):
        assert answers.count(b"HTTP/1.1 200") == 2
        assert answers.index(b'"echo"') < answers.index(b'"active_jobs"')


def test_a_client_that_expects_100_continue_receives_it(small: ServerUnderTest):
    host, _, port = small.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as line, line.makefile("rb") as answers:
        line.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert answers.readline() == b"HTTP/1.1 100 Continue\r\n"
        line.sendall(b"{}" + CLOSE)
        assert b'"success"' in answers.read()


def test_an_old_client_is_answered_and_hung_up_on(small: ServerUnderTest):
    assert b'"active_jobs"' in say(small, b"GET /health HTTP/1.0\r\n\r\n")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/generate", 405),
        ("POST", "/health", 405),
        ("POST", "/status/a", 405),
        ("GET", "/cancel/a", 405),
        ("GET", "/nothing", 404),
        ("GET", "/", 404),
    ],
)
def test_a_wrong_path_or_method_returns_a_json_error(small: ServerUnderTest, method: str, path: str, status: int):
    answer = requests.request(method, small.url + path, timeout=5)
    assert (answer.status_code, answer.json()["status"]) == (status, "failed")


@pytest.mark.parametrize("body", ["[]", "1", "null", '"text"'])
def test_a_payload_that_is_no_object_is_refused(small: ServerUnderTest, body: str):
    assert requests.post(small.url + "/generate", data=body, timeout=5).status_code == 400


@pytest.mark.parametrize("name", ["X-Job-Id", "Idempotency-Key"])
@pytest.mark.parametrize("value", ["x" * 201, "gr\xfc\xdf"])
def test_an_id_that_is_not_valid_in_a_path_is_refused(small: ServerUnderTest, name: str, value: str):
    answer = requests.post(
        small.url + "/generate", data="{}", headers={name: value.encode("latin-1"), "X-Source": "dispatcher"}, timeout=5
    )
    assert answer.status_code == 400


def test_an_id_is_found_by_its_percent_encoded_path(small: ServerUnderTest):
    small.dispatch(job="a/b c")
    assert small.status("a%2Fb%20c").json()["job_id"] == "a/b c.1"
