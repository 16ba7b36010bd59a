"""The client of the REST API, against an API with many kinds of responses and errors."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from slotkeeper.client import ApiError, ApiUnreachable, Client, ClientError, OutcomeUnknown
from tests.house.tree import REPO


@pytest.fixture
def client(httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr("slotkeeper.client.time.sleep", lambda _: None)
    return Client(httpserver.url_for(""), "sk_mine")


def test_a_submit_that_is_repeated_keeps_its_random_key(httpserver: HTTPServer, client: Client) -> None:
    keys: list[str] = []
    answers = [Response("{}", 503), Response("{}", 429), Response('{"job_id": "1", "status": "queued"}', 202)]

    def accept(request: Request) -> Response:
        keys.append(request.headers["Idempotency-Key"])
        assert request.get_json() == {"model": "zimg", "payload": {"a": 1}, "priority": 2}
        return answers[len(keys) - 1]

    httpserver.expect_request("/queue/submit", method="POST").respond_with_handler(accept)
    assert client.submit("zimg", {"a": 1}, priority=2)["job_id"] == "1"
    assert len(keys) == 3 and len(set(keys)) == 1
    assert len(keys[0]) == 32


def test_two_submits_have_different_keys_and_a_given_key_is_sent(httpserver: HTTPServer, client: Client) -> None:
    keys: list[str] = []

    def accept(request: Request) -> Response:
        keys.append(request.headers["Idempotency-Key"])
        return Response('{"job_id": "1", "status": "queued"}', 202)

    httpserver.expect_request("/queue/submit").respond_with_handler(accept)
    client.submit("zimg", {})
    client.submit("zimg", {})
    client.submit("zimg", {}, idempotency_key="mine")
    assert keys[0] != keys[1] and keys[2] == "mine"


def test_a_refusal_has_code_field_and_remedy_and_is_not_repeated(httpserver: HTTPServer, client: Client) -> None:
    problem = {"code": "unknown_model", "title": "No such model", "detail": "Register it.", "field": "model"}
    httpserver.expect_oneshot_request("/queue/submit").respond_with_json(problem, 422)
    with pytest.raises(ApiError) as refused:
        client.submit("zimgg", {})
    error = refused.value
    assert (error.status, error.code, error.field, error.remedy) == (422, "unknown_model", "model", "Register it.")
    assert str(error) == "No such model: Register it."


def test_with_zero_patience_an_unreachable_api_raises_an_error_at_once() -> None:
    with pytest.raises(ApiUnreachable):
        Client("http://127.0.0.1:1").get_job("1", patience_s=0)


def test_an_id_is_one_segment_of_the_path(httpserver: HTTPServer, client: Client) -> None:
    httpserver.expect_request("/queue/jobs/a/b", method="GET").respond_with_json({"job_id": "a/b", "status": "queued"})
    client.get_job("a/b")
    assert httpserver.log[0][0].environ["REQUEST_URI"] == "/queue/jobs/a%2Fb"


def test_cancel_posts_and_returns_the_job(httpserver: HTTPServer, client: Client) -> None:
    httpserver.expect_request("/queue/jobs/1/cancel", method="POST").respond_with_json(
        {"job_id": "1", "status": "canceled"}
    )
    assert client.cancel("1")["status"] == "canceled"


def in_a_process(code: str, folder: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={"PYTHONPATH": f"{folder}:{REPO}"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_the_package_loads_the_client_at_its_first_use_and_without_click(tmp_path: Path) -> None:
    code = (
        "import json, sys, slotkeeper\n"
        "before = 'requests' in sys.modules\n"
        "slotkeeper.Client('http://127.0.0.1:1')\n"
        "names = ('requests', 'click', 'celery', 'sqlalchemy', 'redis')\n"
        "print(json.dumps({'before': before, 'loaded': [name for name in names if name in sys.modules]}))\n"
    )
    assert in_a_process(code, tmp_path) == {"before": False, "loaded": ["requests"]}


def test_the_import_error_names_the_user_module_that_hides_tasks_and_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("")
    code = (
        "import json\n"
        "try:\n    from slotkeeper import infer\n"
        "except ImportError as error:\n    print(json.dumps({'error': str(error)}))\n"
    )
    error = str(in_a_process(code, tmp_path)["error"])
    assert error.startswith(f"{tmp_path / 'tasks.py'} hides") and "slotkeeper.Client" in error


def test_infer_is_the_celery_task(tmp_path: Path) -> None:
    code = "import json; from slotkeeper import infer; print(json.dumps({'name': infer.name}))"
    assert in_a_process(code, tmp_path) == {"name": "infer"}


def test_a_request_is_repeated_after_a_truncated_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API restarts while it sends its response."""
    monkeypatch.setattr("slotkeeper.client.time.sleep", lambda _: None)
    body = b'{"job_id": "1", "status": "canceled"}'
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        % len(body)
    )
    answers = [head + body[:9], head + body]

    def serve(listener: socket.socket) -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert client.cancel("1")["status"] == "canceled"


@pytest.mark.parametrize("status", [502, 504])
def test_a_proxy_whose_api_starts_again_is_waited_for(httpserver: HTTPServer, client: Client, status: int) -> None:
    page = Response("<html>Bad Gateway</html>", status, content_type="text/html")
    job = Response('{"job_id": "1", "status": "completed"}', content_type="application/json")
    answers = iter([page, job])
    httpserver.expect_request("/queue/jobs/1").respond_with_handler(lambda _: next(answers))
    assert client.wait_for_job("1")["status"] == "completed"


def test_a_502_of_the_api_itself_is_an_error(httpserver: HTTPServer, client: Client) -> None:
    httpserver.expect_oneshot_request("/queue/jobs/1").respond_with_json({"code": "server_failed", "title": "No"}, 502)
    with pytest.raises(ApiError):
        client.get_job("1")


def test_a_proxy_error_that_lasts_leaves_the_outcome_unknown(httpserver: HTTPServer, client: Client) -> None:
    httpserver.expect_request("/queue/jobs/1").respond_with_data("<html>Bad Gateway</html>", 502)
    with pytest.raises(OutcomeUnknown):
        client.wait_for_job("1", patience_s=0)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_payload_is_not_sent_on_to_where_an_answer_points(
    httpserver: HTTPServer, client: Client, status: int
) -> None:
    away = {"Location": httpserver.url_for("/elsewhere")}
    httpserver.expect_oneshot_request("/queue/submit").respond_with_data("", status, headers=away)
    with pytest.raises(ClientError, match="set SLOTKEEPER_URL"):
        client.submit("zimg", {"secret": 1})
    assert [request.path for request, _ in httpserver.log] == ["/queue/submit"]


@pytest.mark.parametrize("body", ["[]", "{}", '{"jobs": 3}', "3", '"x"', "null"])
def test_json_that_is_not_the_apis_is_no_traceback(httpserver: HTTPServer, client: Client, body: str) -> None:
    httpserver.expect_request("/queue/jobs/1").respond_with_data(body)
    httpserver.expect_request("/queue/jobs").respond_with_data(body)
    for ask in (lambda: client.get_job("1"), lambda: list(client.iter_pages("/queue/jobs", "jobs", 10))):
        with pytest.raises(ClientError, match="is not Slotkeeper"):
            ask()


def test_a_strange_retry_after_is_ignored(httpserver: HTTPServer, client: Client) -> None:
    strange = {"Retry-After": "\u00b2"}
    httpserver.expect_oneshot_request("/queue/jobs/1").respond_with_json({}, 503, headers=strange)
    httpserver.expect_oneshot_request("/queue/jobs/1").respond_with_json({"job_id": "1", "status": "queued"})
    assert client.get_job("1")["status"] == "queued"
