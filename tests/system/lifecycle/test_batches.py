"""A file of thousands of lines while processes die: each line runs once, and results are in the order of lines."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_api import HttpApi
from tools.cluster.postgres_process import Postgres
from tools.cluster.stack import Process, RefServer, Stack, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LINES = 3_000
MODEL = "lines"


@pytest.fixture(params=["sqlite", "postgresql"])
def stack(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stack]:
    postgres: Postgres | None = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    url = postgres.create() if postgres is not None else ""
    with Stack(tmp_path, {"SLOTKEEPER_DATABASE_URL": url} if url else {}) as stack:
        stack.maintenance()
        stack.beat()
        stack.worker()
        stack.web()
        yield stack
    if postgres is not None:
        postgres.drop(url)


def start_upload(stack: Stack, path: Path) -> Process:
    words = ["batches", "submit", str(path), "--model", MODEL, "--json"]
    return stack.start("upload", [sys.executable, "-P", "-m", "app.cli", *words])


def the_batch(api: HttpApi) -> dict[str, Any]:
    batches = api.call("GET", "/batches").json()["batches"]
    return batches[0] if batches else {"next_line": 0, "status": "none", "jobs": 0, "batch": ""}


def runs(server: RefServer) -> int:
    """How many runs have ended at the server."""
    return len(server.journal.read_text().splitlines())


def results(api: HttpApi, batch: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    following: str | None = "0"
    while following is not None:
        answer = api.call("GET", f"/batches/{batch}/results?from={following}")
        found += [json.loads(line) for line in answer.content.splitlines()]
        following = answer.headers.get("Next-Line")
    return found


def test_a_kill_in_the_middle_loses_no_line_and_doubles_none(stack: Stack) -> None:
    api = HttpApi(stack)
    server = stack.server("lines-api1", 16)
    api.register(MODEL, server)
    path = stack.home / "lines.jsonl"
    path.write_text("".join(json.dumps({"payload": {"seconds": 0}, "custom_id": f"c{n}"}) + "\n" for n in range(LINES)))
    upload, web = start_upload(stack, path), stack.processes["web"]
    eventually(lambda: the_batch(api)["next_line"] >= 500, "some lines were received")
    web.kill()
    stack.processes["worker"].kill()
    stack.worker()
    stack.web()
    eventually(lambda: upload.popen.poll() is not None, "the upload has ended", 120)
    assert upload.popen.returncode == 0, upload.log()
    batch = the_batch(api)
    assert (batch["next_line"], batch["jobs"], batch["refused"]) == (LINES, LINES, 0)
    eventually(lambda: the_batch(api)["status"] == "ended", "all lines have run", 200)
    lines = results(api, batch["batch"])
    assert [line["line"] for line in lines] == list(range(LINES))
    assert [line["custom_id"] for line in lines] == [f"c{n}" for n in range(LINES)]
    assert Counter(line["status"] for line in lines) == {"completed": LINES}
    assert api.call("GET", "/admin/ledger").json()["accepted"] == LINES


def test_no_job_of_a_canceled_batch_starts_after_the_response_to_the_cancel(stack: Stack) -> None:
    api = HttpApi(stack)
    server = stack.server("lines-api1", 4)
    api.register(MODEL, server)
    path = stack.home / "lines.jsonl"
    path.write_text("".join(json.dumps({"payload": {"seconds": 0.05}}) + "\n" for _ in range(LINES)))
    upload = start_upload(stack, path)
    eventually(lambda: upload.popen.poll() is not None, "the upload has ended", 120)
    batch = the_batch(api)["batch"]
    eventually(lambda: the_batch(api)["ended"] > 0, "some jobs have ended")
    eventually(lambda: api.call("POST", f"/batches/{batch}/cancel").status_code != 202, "no job remains to be canceled")
    ended_before = runs(server)
    eventually(lambda: the_batch(api)["status"] == "ended", "the batch has ended")
    assert runs(server) - ended_before <= server.slots, "only running jobs have ended since"
    by_state = the_batch(api)["by_state"]
    assert by_state.keys() <= {"completed", "canceled"} and sum(by_state.values()) == LINES
