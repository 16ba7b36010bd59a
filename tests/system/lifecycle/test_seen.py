"""What real processes say of themselves, and what is counted of a job that went through them."""

import json
import subprocess
import sys

from tests.support.http_api import HttpApi
from tools.cluster.stack import REPO, Stack, eventually


def _health(stack: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "app.cli", "health", *words]
    return subprocess.run(command, env=stack.env, cwd=REPO, capture_output=True, text=True, check=False)


def _figures(api: HttpApi) -> dict[str, float]:
    lines = api.call("GET", "/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_every_process_is_listed_live_and_ready(stack: Stack, api: HttpApi) -> None:
    roles = {"web", "worker", "maintenance", "webhooks", "beat"}

    def listed() -> bool:
        return {process["role"] for process in api.call("GET", "/admin/processes").json()["processes"]} >= roles

    eventually(listed, "all processes are listed", 30)
    for role in sorted(roles):
        eventually(lambda role=role: _health(stack, role, "--live").returncode == 0, f"{role} lives", 30)
        eventually(lambda role=role: _health(stack, role).returncode == 0, f"{role} is ready", 60)
    processes = api.call("GET", "/admin/processes").json()["processes"]
    workers = [process for process in processes if process["role"] == "worker" and process["alive"]]
    assert workers and {worker["capacity"] for worker in workers} == {64}, "the value of their option -c"
    assert min(worker["canary_ms"] or 0 for worker in workers) < 15_000


def test_the_doctor_finds_nothing_that_fails(stack: Stack, api: HttpApi) -> None:
    def healthy() -> bool:
        command = [sys.executable, "-P", "-m", "app.cli", "doctor", "--json"]
        done = subprocess.run(command, env=stack.env, cwd=REPO, capture_output=True, text=True, check=False)
        return done.returncode == 0 and json.loads(done.stdout)["level"] != "fail"

    eventually(healthy, "all parts are well", 90)


def test_the_metrics_count_completed_jobs(stack: Stack, api: HttpApi) -> None:
    server = stack.server("seen-api1", 1)
    api.register("seen", server)
    jobs = [{"model": "seen", "payload": {"seconds": 0.2}}] * 5
    found = api.call("POST", "/queue/submit-batch", json=jobs).json()["jobs"]  # at once, so that some wait for the slot
    for job in [receipt["job_id"] for receipt in found]:
        assert api.ended(job)["status"] == "completed"
    counted = 'slotkeeper_attempts_ended_total{model="seen",reason="finished"}'
    eventually(lambda: _figures(api).get(counted) == 5, "maintenance has counted the runs", 60)
    figures = _figures(api)
    assert figures['slotkeeper_run_seconds_count{model="seen"}'] == 5
    assert figures['slotkeeper_wait_seconds_count{model="seen",priority="5"}'] == 5
    assert figures["slotkeeper_handoff_seconds_count"] >= 1
    assert figures['slotkeeper_processes{role="worker"}'] == 1
    assert figures['slotkeeper_task_last_run_timestamp_seconds{task="count"}'] > 0
