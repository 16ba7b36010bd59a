"""`slotkeeper up`: the real processes, started, used from the command line, killed, and stopped."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.support.installation import DEADLINE_S, Installation, Up
from tools.cluster.stack import eventually
from tools.cluster.valkey_process import Valkey

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# Grace and a little more; the rest is for a machine that has much else to do.
STOPPED_WITHIN_S = 30.0


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path / "home")


@pytest.fixture(scope="module")
def _keep_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], tuple[Installation, Up]]]:
    installation, kept = Installation(tmp_path_factory.mktemp("standing") / "home"), list[Up]()

    def running() -> tuple[Installation, Up]:
        if not kept or kept[-1].process.poll() is not None:
            kept.append(stack.enter_context(installation.up()))
            kept[-1].says("Ctrl-C stops everything.")
        return installation, kept[-1]

    with ExitStack() as stack:
        yield running


@pytest.fixture
def running(_keep_running: Callable[[], tuple[Installation, Up]]) -> tuple[Installation, Up]:
    """A running installation that several tests share; it is started again if a test has ended it."""
    return _keep_running()


@dataclass
class Demo:
    """A completed demonstration on a separate Redis, with keys required."""

    installation: Installation
    up: Up
    status: int
    took_s: float
    left: dict[int, str]  # processes


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder, began = tmp_path_factory.mktemp("demo"), time.monotonic()
    with Valkey(folder / "valkey") as valkey:
        settings = {"SLOTKEEPER_REDIS_URL": valkey.url, "SLOTKEEPER_REQUIRE_KEYS": "true"}
        installation = Installation(folder / "home", **settings)
        with installation.up("--exit-after-demo", "--demo-jobs", "6") as up:
            status, left = up.process.wait(DEADLINE_S), installation.processes()
    return Demo(installation, up, status, time.monotonic() - began, left)


def test_up_starts_all_processes_and_ctrl_c_stops_them(installation: Installation) -> None:
    with installation.up() as up:
        up.says("Ctrl-C stops everything.")
        job_id = re.search(r"First job (\S+): completed on zimg-api1-slot\d", up.printed)[1]  # type: ignore[index]
        assert '"url": "https://images.example/zimg/' in up.printed
        for place in (
            f":{installation.ports['PORT']}/docs",
            f":{installation.ports['FLOWER_PORT']}",
            "flower-password",
        ):
            assert place in up.printed
        password = (installation.home / "flower-password").read_text().strip()
        valkey_password = (installation.home / "valkey-password").read_text().strip()
        commands = installation.processes().values()
        assert not [command for command in commands if password in command or valkey_password in command]
        kept = [installation.home, *installation.home.rglob("*")]
        assert [path for path in kept if path.lstat().st_mode & 0o077] == []
        logged = "".join(log.read_text() for log in (installation.home / "logs").iterdir())
        assert password not in logged and valkey_password not in logged

        (yours,) = re.findall(r"yours: +(\S.*)", up.printed)
        elsewhere = {"PATH": os.defpath, "COLUMNS": "200"}  # a second terminal, in the same folder
        done = subprocess.run(
            ["/bin/sh", "-c", yours],
            cwd=installation.home.parent,
            env=elsewhere,
            timeout=DEADLINE_S,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and "completed" in done.stdout, done.stderr

        second = installation.run("up")
        assert second.returncode == 1
        assert re.fullmatch(rf"Error: Another `slotkeeper up` \(pid {up.process.pid}\) runs on .*\n", second.stderr)

        assert up.stop() < STOPPED_WITHIN_S
        assert installation.processes() == {}
        assert installation.open_ports() == []

    with installation.up("--no-demo") as up:
        up.says("Ctrl-C stops everything.")
        assert "First job" not in up.printed
        assert installation.ask("job", job_id)["status"] == "completed"
        assert [server["server"] for server in installation.ask("servers", "list")["servers"]] == [
            "flux-api1",
            "trellis-api1",
            "zimg-api1",
        ]
        assert not installation.pid_of("slotkeeper.serve")
        up.stop(signal.SIGTERM)
    assert installation.processes() == {}


class Follower:
    """Reads the stream of events as anybody would, from the moment that it is made on."""

    def __init__(self, installation: Installation) -> None:
        password = (installation.home / "valkey-password").read_text().strip()
        self._redis: Any = Redis(port=installation.ports["REDIS_PORT"], password=password)
        newest = self._redis.xrevrange("slotkeeper:events", count=1)
        self._last = newest[0][0] if newest else "0"

    def follow(self, has_all: Callable[[list[dict[str, Any]]], bool]) -> list[tuple[dict[str, Any], float]]:
        """Each event until these are all, and how many seconds after its own time it was read."""
        found: list[tuple[dict[str, Any], float]] = []
        end = time.monotonic() + DEADLINE_S
        while not has_all([event for event, _ in found]):
            assert time.monotonic() < end, found
            for _, entries in self._redis.xread({"slotkeeper:events": self._last}, count=1, block=1000):
                (self._last, fields), now = entries[0], time.time()
                event = json.loads(fields[b"event"])
                found.append((event, now - datetime.fromisoformat(event["time"]).timestamp()))
        return found


def test_a_jobs_events_reach_the_stream_within_a_second(running: tuple[Installation, Up]) -> None:
    installation, _ = running
    follower = Follower(installation)
    jobs: list[str] = []  # The installation's own first job may end only now.

    def has_all(events: list[dict[str, Any]]) -> bool:
        return any(event["subject"] in jobs and event["type"] == "job.completed" for event in events)

    with ThreadPoolExecutor() as pool:
        following = pool.submit(follower.follow, has_all)
        jobs.append(installation.ask("submit", "zimg", '{"seconds": 0.05}')["job_id"])
        found = [(event, late_s) for event, late_s in following.result() if event["subject"] in jobs]
    assert [event["type"] for event, _ in found] == ["job.enqueued", "job.started", "job.completed"]
    assert {event["specversion"] for event, _ in found} == {"1.0"}
    assert min(late_s for _, late_s in found) < 1.0, found  # Other events may be late on a busy machine.


def test_a_killed_process_is_restarted_and_jobs_complete_again(running: tuple[Installation, Up]) -> None:
    installation, up = running
    for name in ("worker", "valkey"):
        pid = installation.pid_of({"worker": "worker@", "valkey": "valkey-server"}[name])
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        up.says(f"{name} ended (killed by SIGKILL); it starts again in")
    eventually(lambda: installation.open_ports() == list(installation.ports), "the ports", DEADLINE_S)
    job = installation.ask("submit", "zimg", '{"prompt": "still here"}', "--wait")
    assert job["status"] == "completed"


def test_everything_can_be_done_from_the_command_line(running: tuple[Installation, Up], tmp_path: Path) -> None:
    """The commands run in this process: a new process for each would take a second."""
    ask, run = running[0].ask_here, running[0].run_here

    jobs = ask("submit", "zimg", '{"seconds": 0.05}', "--count", "3", "--priority", "2", "--wait")
    assert [(job["status"], job["priority"]) for job in jobs] == [("completed", 2)] * 3
    assert [one["outcome"] for one in ask("attempts", jobs[0]["job_id"])["attempts"]] == ["finished"]
    assert len(ask("jobs", "--model", "zimg", "--status", "completed", "--limit", "3")) == 3
    assert "completed" in run("jobs").stdout
    assert run("job", jobs[0]["job_id"]).stdout.startswith("job_id")

    lines = tmp_path / "jobs.ndjson"
    lines.write_text('{"model": "zimg", "payload": {"seconds": 0.01}}\n\n{"model": "none", "payload": {}}\n' * 2)
    done = run("submit-file", str(lines))
    assert done.exit_code == 1
    assert "4 lines received.  Jobs: 2.  Refused: 2 lines." in done.stdout
    assert re.search(r"Line 3: .*none", done.stderr)
    before = ask("ledger")["accepted"]
    assert "4 had been received before" in run("submit-file", str(lines)).stdout
    assert ask("ledger")["accepted"] == before

    ask("models", "configure", "zimg", "max_retries=0")
    assert ask("models", "show", "zimg")["overrides"] == {"max_retries": 0}
    eventually(
        lambda: run("submit", "zimg", '{"fail": "error", "seconds": 0}', "--wait").exit_code == 1,
        "a dead job",
        DEADLINE_S,
    )
    dead = ask("dlq", "list")[0]["job_id"]
    assert "max_retries_exceeded" in run("dlq", "show", dead).stdout
    assert run("dlq", "retry", dead).exit_code == 0
    eventually(
        lambda: ask("job", dead)["status"] == "dead" and ask("job", dead)["attempts"] > 1,
        "the second death",
        DEADLINE_S,
    )
    assert "jobs are queued again" in run("dlq", "retry-all", "--yes").stdout
    eventually(lambda: ask("dlq", "list"), "the third death", DEADLINE_S)
    assert run("dlq", "delete", dead).exit_code == 0
    assert run("job", dead).stderr.startswith("Error: ")
    assert run("models", "reset", "zimg").exit_code == 0
    assert {model["model"] for model in ask("models", "list")} == {"zimg", "flux", "trellis"}

    assert run("servers", "pause", "flux-api1").exit_code == 0
    waiting = ask("submit", "flux", "-", stdin='{"prompt": "later"}')
    assert ask("cancel", waiting["job_id"])["status"] == "canceled"
    assert ask("job", waiting["job_id"])["status"] == "canceled"
    assert run("servers", "resume", "flux-api1").exit_code == 0
    ask("servers", "register", "other/model", "other", "http://127.0.0.1:1/generate", "--slots", "3")
    assert "other/model" in run("servers", "list").stdout
    assert run("servers", "drain", "other").exit_code == 0
    assert run("servers", "remove", "other").exit_code == 0

    key = ask("tenants", "add", "acme", "--rate", "5", "--burst", "2")["key"]
    assert key.startswith("sk_")
    assert [tenant["name"] for tenant in ask("tenants", "list")] == ["acme"]
    assert run("tenants", "remove", "acme", "--yes").exit_code == 0
    assert run("migrate").exit_code == 0
    assert ask("ledger")["balanced"]

    refused = run("submit", "none")
    assert refused.exit_code == 1
    assert re.fullmatch(r"Error: .+\n", refused.stderr)
    assert run("submit", "zimg", "{no json").exit_code == 2


def test_the_demo_ends_with_status_0_after_all_of_its_jobs_have_completed(demo: Demo) -> None:
    assert demo.status == 0, demo.up.printed
    assert demo.took_s < DEADLINE_S
    assert demo.up.printed.count("completed") == 6
    assert "6 jobs, all ended well." in demo.up.printed
    assert re.search(r"completed\s+2\s+zimg-api1-slot", demo.up.printed), "one of them was retried"
    assert demo.left == {}


def test_with_keys_required_the_demo_completes_and_leaves_no_tenant(demo: Demo) -> None:
    assert demo.status == 0, demo.up.printed
    assert demo.installation.ask("tenants", "list") == []


def test_an_external_redis_is_used_and_no_valkey_is_started(demo: Demo) -> None:
    assert demo.status == 0, demo.up.printed
    assert not (demo.installation.home / "logs" / "valkey.log").exists()
    refused = demo.installation.run("up", "--no-demo")
    assert refused.returncode == 1
    assert re.fullmatch(r"Error: SLOTKEEPER_REDIS_URL does not answer .*\n", refused.stderr)


def test_a_taken_port_is_named_and_nothing_is_started(installation: Installation) -> None:
    with socket.create_server(("127.0.0.1", installation.ports["FLOWER_PORT"])):
        done = installation.run("up")
    assert done.returncode == 1
    port = installation.ports["FLOWER_PORT"]
    assert re.fullmatch(rf"Error: Port {port} for Flower is taken .* SLOTKEEPER_FLOWER_PORT .*\n", done.stderr)
    assert list((installation.home / "logs").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_leaves_nothing_behind(installation: Installation, number: int) -> None:
    with installation.up("--no-demo") as up:
        up.says("Starting ...")
        up.source(lambda: installation.pid_of("worker@"), "the worker's process")
        assert up.stop(number) < STOPPED_WITHIN_S
        assert installation.processes() == {}


def test_the_processes_of_a_killed_supervisor_end(running: tuple[Installation, Up]) -> None:
    installation, up = running
    up.process.kill()
    up.process.wait()
    eventually(lambda: not installation.processes(), "the end of all processes", DEADLINE_S)
    assert installation.open_ports() == []
