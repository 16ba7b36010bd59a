"""Validations through real processes: a server cannot recognize their jobs, and one with wrong results is drained."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_api import HttpApi
from tests.support.scripted import Scripted, Seen, answer
from tools.cluster.stack import Stack, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_PAYLOAD = {"prompt": "2 + 2", "seed": 7}
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_OF_EACH = {"x-deadline-ms": "[0-9]+", "traceparent": "00-[0-9a-f]{32}-[0-9a-f]{16}-01", "x-callback-token": ".{20,}"}
"""Headers that differ from job to job."""


class Server(Scripted):
    """Answers each run with the same sum."""

    def __init__(self, result: int) -> None:
        super().__init__(lambda seen: self._says(seen, result))
        self.runs: list[Seen] = []

    def _says(self, seen: Seen, result: int) -> bytes:
        if seen.path.endswith("/health"):
            return answer({"active_jobs": 0, "job_ids": []})
        self.runs.append(seen)
        return answer({"status": "success", "result": {"answer": result}})


@pytest.fixture
def api(tmp_path: Path) -> Iterator[HttpApi]:
    with Stack(tmp_path) as stack:
        stack.maintenance("maintenance", "--embedded-beat")
        stack.worker()
        stack.web()
        yield HttpApi(stack)


def _register(api: HttpApi, name: str, server: Server) -> None:
    body = {"model": "sums", "server": name, "endpoint": f"{server.url}/generate", "slots": 1}
    assert api.call("POST", "/admin/register", json=body).ok


def _validate(api: HttpApi, count: int = 1) -> None:
    """Let so many jobs be submitted at once, whenever the last ones were."""
    body = {"model": "sums", "payload": _PAYLOAD, "expected": {"answer": 4}, "every_s": 86_400}
    for n in range(count):
        assert api.call("PUT", f"/admin/validations/sum{n}", json=body).ok


def _shape(seen: Seen) -> tuple[object, ...]:
    """A request, with a word for all that is different in each job."""
    headers = {name: _ID.sub("ID", value) for name, value in seen.headers.items()}
    for name, pattern in _OF_EACH.items():
        if name in headers and re.fullmatch(pattern, headers[name]):
            headers[name] = name
    return seen.method, _ID.sub("ID", seen.path), list(headers.items()), _ID.sub("ID", seen.body.decode())


def test_a_server_cannot_recognize_a_validation_job(api: HttpApi) -> None:
    with Server(4) as server:
        _register(api, "honest", server)
        ordinary = api.submit("sums", _PAYLOAD)
        assert api.ended(ordinary)["status"] == "completed"
        _validate(api)
        eventually(lambda: len(server.runs) == 2, "the validation's job has run", 60)
        first, second = server.runs
        assert _shape(first) == _shape(second)
        assert len(first.headers["x-job-id"]) == len(second.headers["x-job-id"]) == 36
        margin = [int(seen.headers["x-deadline-ms"]) for seen in (first, second) if "x-deadline-ms" in seen.headers]
        assert not margin or 0 < margin[1] - margin[0] < 120_000


def test_a_server_that_lies_is_drained_and_the_last_one_is_not(api: HttpApi) -> None:
    with Server(5) as liar, Server(4) as honest:
        _register(api, "liar", liar)
        _validate(api, 6)
        eventually(lambda: _judged(api) == {"liar": 6}, "six answers are judged", 60)
        assert _state(api, "liar") == "online", "it is the only server of its model"
        _register(api, "honest", honest)
        _validate(api, 6)
        eventually(lambda: sum(_judged(api).values()) == 12, "six more are judged", 60)
        assert _judged(api)["liar"] > 6, "both have run some"
        # The server is drained after all answers of a pass were stored.
        eventually(lambda: _state(api, "liar") == "draining", "the server with wrong answers is drained")
        assert _state(api, "honest") == "online"


def _judged(api: HttpApi) -> dict[str, int]:
    answers = api.call("GET", "/admin/validations/report").json()["servers"]
    return {one["server"]: one["right"] + one["wrong"] for one in answers}


def _state(api: HttpApi, name: str) -> str:
    servers = api.call("GET", "/admin/servers").json()["servers"]
    return next(str(one["state"]) for one in servers if one["server"] == name)
