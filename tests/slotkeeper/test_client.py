"""The client of the REST API, against an API that answers in all sorts of ways."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from slotkeeper.client import ApiError, ApiUnreachable, Client
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


def test_without_patience_an_api_that_is_away_is_an_error_at_once() -> None:
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


def test_the_package_loads_the_client_when_it_is_used_and_needs_no_click_for_it(tmp_path: Path) -> None:
    code = (
        "import json, sys, slotkeeper\n"
        "before = 'requests' in sys.modules\n"
        "slotkeeper.Client('http://127.0.0.1:1')\n"
        "names = ('requests', 'click', 'celery', 'sqlalchemy', 'redis')\n"
        "print(json.dumps({'before': before, 'loaded': [name for name in names if name in sys.modules]}))\n"
    )
    assert in_a_process(code, tmp_path) == {"before": False, "loaded": ["requests"]}


def test_where_a_module_of_the_user_hides_tasks_the_error_names_it_and_the_remedy(tmp_path: Path) -> None:
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
