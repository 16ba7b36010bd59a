"""Servers that report no runs: a slot is used again when an event shows that its run is over."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.up.ports import free_port
from tests.support.cluster import Cluster
from tests.support.gated import Gate
from tools.cluster.stack import REPO, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

# Far less than the ten minutes of quarantine of a slot whose run never shows its end.
_SOON_S = 15.0
_SUPERVISED = """while :; do "$@"; sleep 0.3; done"""


class Plain:
    """A plain server in a separate process; `supervised`: a shell restarts it whenever it ends."""

    def __init__(self, folder: Path, *, supervised: bool = False) -> None:
        self.port, self._journal = free_port(), folder / "journal"
        words = [sys.executable, "-m", "tests.support.plain_server", str(self.port), str(self._journal)]
        self._command = ["/bin/sh", "-c", _SUPERVISED, "sh", *words] if supervised else words
        self.endpoint = f"http://127.0.0.1:{self.port}/predict"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=REPO, start_new_session=True, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def lines(self) -> list[str]:
        return self._journal.read_text().splitlines() if self._journal.exists() else []

    def begun(self, job_id: str) -> None:
        eventually(lambda: f"begins {job_id}" in self.lines(), f"{job_id} begins")


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Callable[..., Plain]]:
    made: list[Plain] = []

    def make(**options: Any) -> Plain:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Plain(folder, **options))
        return made[-1]

    yield make
    for server in made:
        server.kill()


def _model(cluster: Cluster, name: str, *servers: Plain, **config: Any) -> str:
    cluster.ensure_workers(1)
    assert cluster.api.call("PUT", f"/admin/model-configs/{name}", json={"preset": "generic-sync", **config}).ok
    for number, server in enumerate(servers):
        body = {"model": name, "server": f"{name}-{number}", "endpoint": server.endpoint, "slots": 1}
        assert cluster.api.call("POST", "/admin/register", json=body).ok
    return name


def _cancel(cluster: Cluster, job_id: str) -> None:
    assert cluster.api.call("POST", f"/queue/jobs/{job_id}/cancel").ok
    cluster.until(job_id, "canceled")


def test_a_canceled_runs_slot_is_used_again_when_its_server_answers_after_all(
    cluster: Cluster, plain: Callable[..., Plain], tmp_path: Path
) -> None:
    server, gate = plain(), Gate(tmp_path / "gate")
    model = _model(cluster, "plain-canceled", server)
    first = cluster.api.submit(model, gate.payload)
    server.begun(first)
    _cancel(cluster, first)
    following = cluster.api.submit(model, {})

    explained = cluster.api.call("GET", f"/queue/jobs/{following}/explain").json()["sentence"]
    assert "is withheld" in explained and "answers the request" in explained
    assert f"begins {following}" not in server.lines(), "SLOT-1: the server runs the first still"
    gate.open()

    cluster.until(following, "completed", _SOON_S)
    assert server.lines() == [f"{what} {job}" for job in (first, following) for what in ("begins", "ends")]


def test_the_slot_of_an_expired_run_is_used_again_after_the_response_of_its_server(
    cluster: Cluster, plain: Callable[..., Plain], tmp_path: Path
) -> None:
    server, gate = plain(), Gate(tmp_path / "gate")
    model = _model(cluster, "plain-expired", server)
    first = cluster.api.submit(model, gate.payload, ttl=5)
    server.begun(first)
    cluster.until(first, "expired")
    assert "ttl" in (cluster.row(first).error_message or "") or cluster.row(first).error_code == "deadline_passed"
    following = cluster.api.submit(model, {})
    gate.open()
    cluster.until(following, "completed", _SOON_S)
    assert server.lines() == [f"{what} {job}" for job in (first, following) for what in ("begins", "ends")]


def test_a_server_that_dies_during_a_run_costs_a_crash_at_once_and_its_slot_is_free_after_its_restart(
    cluster: Cluster, plain: Callable[..., Plain], tmp_path: Path
) -> None:
    server, gate = plain(), Gate(tmp_path / "gate")
    model = _model(cluster, "plain-killed", server)
    first = cluster.api.submit(model, gate.payload)
    server.begun(first)
    began = time.monotonic()
    server.kill()
    eventually(lambda: cluster.row(first).crashes == 1, "the crash is charged", _SOON_S)
    assert time.monotonic() - began < _SOON_S
    gate.open()
    server.start()
    job = cluster.until(first, "completed", _SOON_S)
    assert (job.failures, job.crashes) == (0, 1)


def test_a_job_that_kills_its_servers_takes_down_three_processes_and_the_next_job_runs(
    cluster: Cluster, plain: Callable[..., Plain]
) -> None:
    servers = [plain(supervised=True) for _ in range(6)]
    model = _model(cluster, "plain-poison", *servers)
    poison = cluster.api.submit(model, {"die": True})

    job = cluster.until(poison, "dead", 60)
    assert (job.failures, job.crashes) == (0, 3)
    assert sum(server.lines().count(f"begins {poison}") for server in servers) == 3
    good = [cluster.api.submit(model, {}) for _ in range(6)]
    for job_id in good:
        cluster.until(job_id, "completed", _SOON_S)


def test_an_operator_can_release_a_quarantined_slot(
    cluster: Cluster, plain: Callable[..., Plain], tmp_path: Path
) -> None:
    server, gate = plain(), Gate(tmp_path / "gate")
    model = _model(cluster, "plain-released", server)
    first = cluster.api.submit(model, gate.payload)
    server.begun(first)
    _cancel(cluster, first)
    following = cluster.api.submit(model, {})
    released = cluster.api.call("POST", f"/admin/servers/{model}-0/release", json={})
    assert released.ok and released.json()["quarantined"] == []
    cluster.until(following, "completed", _SOON_S)
    again = cluster.api.call("POST", f"/admin/servers/{model}-0/release", json={"slot": f"{model}-0-slot0"})
    assert again.status_code == 409
    acts = cluster.api.call("GET", "/admin/audit", params={"server": f"{model}-0"}).json()["acts"]
    assert acts[0]["act"] == "server.release" and acts[0]["data"]["slots"] == [f"{model}-0-slot0"]
    gate.open()
