"""The drill's server that ignores idempotency keys."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from app.up import ports
from tools.cluster.stack import eventually
from tools.drill.evidence import crowded_starts, server_runs


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    port = ports.free_port()
    command = [sys.executable, "-m", "tools.drill.plain_server", str(port)]
    with subprocess.Popen([*command, str(tmp_path / "journal"), str(tmp_path / "starts")]) as process:
        eventually(lambda: ports.is_open("127.0.0.1", port), "it listens")
        yield f"http://127.0.0.1:{port}"
        process.kill()


def _post(url: str, job_id: str, attempt: int = 1, **payload: object) -> requests.Response:
    headers = {"X-Job-Id": job_id, "X-Attempt": str(attempt)}
    return requests.post(url, json={"number": 7, "seconds": 0, **payload}, headers=headers, timeout=30)


def test_the_plain_server_runs_each_request_and_counts_concurrent_runs(url: str, tmp_path: Path) -> None:
    with requests.Session() as session, pytest.raises(requests.ReadTimeout):
        session.post(url, json={"seconds": 60}, headers={"X-Job-Id": "j1", "X-Attempt": "1"}, timeout=1)
    assert requests.get(f"{url}/health", timeout=5).json() == {"active_jobs": 1, "job_ids": ["j1"]}
    assert _post(url, "j1").json() == {"status": "completed", "result": {"number": 7}}
    assert crowded_starts("a", tmp_path / "starts", 1) == ["j1 attempt 1 on a: 2 runs, 1 slots"]


def test_the_plain_server_fails_and_garbles_first_attempts(url: str, tmp_path: Path) -> None:
    assert _post(url, "j1", fails=1).status_code == 500
    assert "NaN" in _post(url, "j2", garbles=1).text
    assert json.loads(_post(url, "j1", attempt=2, fails=1).text)["result"] == {"number": 7}
    runs = server_runs("a", tmp_path / "journal", tmp_path / "starts", [], 0)
    assert [(run.job_id, run.outcome) for run in runs] == [("j1", "error"), ("j2", "error"), ("j1", "completed")]
