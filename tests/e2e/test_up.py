"""`slotkeeper up`: the real processes, started, used from the command line, hurt, and stopped."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from local.ports import free_port, is_open
from tests.support.valkey import Valkey

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SLOTKEEPER = str(Path(sys.executable).with_name("slotkeeper"))
DEADLINE_S = 120.0
# Grace and a little more; the rest is for a machine that has much else to do.
STOPPED_WITHIN_S = 30.0


class Installation:
    """A state folder, its ports, and what runs on them."""

    def __init__(self, home: Path, **settings: str) -> None:
        self.home = home
        self.ports = {name: free_port() for name in ("PORT", "REDIS_PORT", "FLOWER_PORT")}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLOTKEEPER_")}
        chosen = {f"SLOTKEEPER_{name}": str(port) for name, port in self.ports.items()}
        self.environment = {**inherited, **chosen, "SLOTKEEPER_HOME": str(home), "COLUMNS": "200", **settings}

    def run(self, *words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        """A command that ends by itself."""
        return subprocess.run(
            [SLOTKEEPER, *words],
            input=stdin,
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.home.parent,
            timeout=DEADLINE_S,
            check=False,
        )

    def ask(self, *words: str, stdin: str = "") -> Any:
        """What a command answers as JSON."""
        done = self.run(*words, "--json", stdin=stdin)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    @contextmanager
    def up(self, *options: str) -> Iterator["Up"]:
        """Started; stopped at the end of the block, if that has not been done in it."""
        started = Up(self, options)
        try:
            yield started
        finally:
            started.process.kill()  # Its guardian ends the rest.
            started.process.wait()
            until(lambda: not self.processes(), "the end of all processes")

    def processes(self) -> dict[int, str]:
        """Pid and command of every process that has our folder in its environment, and of our Valkey."""
        mark = f"SLOTKEEPER_HOME={self.home}".encode()
        valkey = f"valkey-server 127.0.0.1:{self.ports['REDIS_PORT']}"  # It writes this over its environment.
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit():
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command and (valkey in command or mark in (entry / "environ").read_bytes().split(b"\0")):
                    found[int(entry.name)] = command
            except OSError:
                continue
        return found

    def pid_of(self, part: str) -> int | None:
        return next((pid for pid, command in self.processes().items() if part in command), None)

    def open_ports(self) -> list[str]:
        return [name for name, port in self.ports.items() if is_open("127.0.0.1", port)]


class Up:
    """A running `slotkeeper up`."""

    def __init__(self, installation: Installation, options: tuple[str, ...]) -> None:
        self._printed = installation.home.parent / "printed"
        with open(self._printed, "w") as printed:
            self.process = subprocess.Popen(
                [SLOTKEEPER, "up", *options],
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=installation.environment,
                cwd=installation.home.parent,
                # As a script's `slotkeeper up &` has it.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
            )

    @property
    def printed(self) -> str:
        return self._printed.read_text()

    def says(self, words: str) -> None:
        """Wait until it has said this."""
        until(lambda: words in self.printed or self.process.poll() is not None, words)
        assert words in self.printed, self.printed

    def stop(self, number: int = signal.SIGINT) -> float:
        """Ask it to stop; the seconds that it took."""
        began = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(DEADLINE_S) == 0, self.printed
        return time.monotonic() - began


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true in {seconds} s"
        time.sleep(0.02)
    return value


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path / "home")


def test_one_command_starts_everything_and_ctrl_c_ends_everything(installation: Installation) -> None:
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
        room = (installation.home / "valkey-password").read_text().strip()
        commands = installation.processes().values()
        assert not [command for command in commands if password in command or room in command]
        kept = [installation.home, *installation.home.rglob("*")]
        assert [path for path in kept if path.lstat().st_mode & 0o077] == []
        logged = "".join(log.read_text() for log in (installation.home / "logs").iterdir())
        assert password not in logged and room not in logged

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
            "zimg-api1",
        ]
        assert not installation.pid_of("reference_server")
        up.stop(signal.SIGTERM)
    assert installation.processes() == {}


def test_a_killed_process_comes_back_and_jobs_go_on(installation: Installation) -> None:
    with installation.up() as up:
        up.says("Ctrl-C stops everything.")
        for name in ("worker", "valkey"):
            pid = installation.pid_of({"worker": "worker@", "valkey": "valkey-server"}[name])
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            up.says(f"{name} ended (killed by SIGKILL); it starts again in")
        until(lambda: installation.open_ports() == list(installation.ports), "the ports")
        job = installation.ask("submit", "zimg", '{"prompt": "still here"}', "--wait")
        assert job["status"] == "completed"
        up.stop()


def test_everything_can_be_done_from_the_command_line(installation: Installation, tmp_path: Path) -> None:
    with installation.up() as up:
        up.says("Ctrl-C stops everything.")
        ask, run = installation.ask, installation.run

        jobs = ask("submit", "zimg", '{"seconds": 0.05}', "--count", "3", "--priority", "2", "--wait")
        assert [(job["status"], job["priority"]) for job in jobs] == [("completed", 2)] * 3
        assert [one["outcome"] for one in ask("attempts", jobs[0]["job_id"])["attempts"]] == ["finished"]
        assert len(ask("jobs", "--model", "zimg", "--status", "completed", "--limit", "3")) == 3
        assert "completed" in run("jobs").stdout
        assert run("job", jobs[0]["job_id"]).stdout.startswith("job_id")

        lines = tmp_path / "jobs.ndjson"
        lines.write_text('{"model": "zimg", "payload": {"seconds": 0.01}}\n\n{"model": "none", "payload": {}}\n' * 2)
        done = run("submit-file", str(lines), "--run", "once")
        assert done.returncode == 1
        assert "2 jobs were accepted, 2 lines refused." in done.stdout
        assert re.search(r"Line 3: .*none", done.stderr)
        before = ask("ledger")["accepted"]
        assert "2 jobs were accepted" in run("submit-file", str(lines), "--run", "once").stdout
        assert ask("ledger")["accepted"] == before

        ask("models", "configure", "zimg", "max_retries=0")
        assert ask("models", "show", "zimg")["overrides"] == {"max_retries": 0}
        until(lambda: run("submit", "zimg", '{"fail": "error", "seconds": 0}', "--wait").returncode == 1, "a dead job")
        dead = ask("dlq", "list")[0]["job_id"]
        assert "max_retries_exceeded" in run("dlq", "show", dead).stdout
        assert run("dlq", "retry", dead).returncode == 0
        until(lambda: ask("job", dead)["status"] == "dead" and ask("job", dead)["attempts"] > 1, "the second death")
        assert "jobs are queued again" in run("dlq", "retry-all", "--yes").stdout
        until(lambda: ask("dlq", "list"), "the third death")
        assert run("dlq", "delete", dead).returncode == 0
        assert run("job", dead).stderr.startswith("Error: ")
        assert run("models", "reset", "zimg").returncode == 0
        assert {model["model"] for model in ask("models", "list")} == {"zimg", "flux"}

        assert run("servers", "pause", "flux-api1").returncode == 0
        waiting = ask("submit", "flux", "-", stdin='{"prompt": "later"}')
        assert ask("cancel", waiting["job_id"])["status"] == "canceled"
        assert ask("job", waiting["job_id"])["status"] == "canceled"
        assert run("servers", "resume", "flux-api1").returncode == 0
        ask("servers", "register", "other/model", "other", "http://127.0.0.1:1/generate", "--slots", "3")
        assert "other/model" in run("servers", "list").stdout
        assert run("servers", "drain", "other").returncode == 0
        assert run("servers", "remove", "other").returncode == 0

        key = ask("tenants", "add", "me", "--rate", "5", "--burst", "2")["key"]
        assert key.startswith("sk_")
        assert [tenant["name"] for tenant in ask("tenants", "list")] == ["me"]
        assert run("tenants", "remove", "me").returncode == 0
        assert run("migrate").returncode == 0
        assert ask("ledger")["balanced"]

        refused = run("submit", "none")
        assert refused.returncode == 1
        assert re.fullmatch(r"Error: .+\n", refused.stderr)
        assert run("submit", "zimg", "{no json").returncode == 2
        up.stop()


def test_the_demo_ends_by_itself_when_all_has_ended_well(installation: Installation) -> None:
    began = time.monotonic()
    with installation.up("--exit-after-demo", "--demo-jobs", "6") as up:
        assert up.process.wait(DEADLINE_S) == 0, up.printed
    assert time.monotonic() - began < DEADLINE_S
    assert up.printed.count("completed") == 6
    assert "6 jobs, all ended well." in up.printed
    assert re.search(r"completed\s+2\s+zimg-api1-slot", up.printed), "one of them was retried"
    assert installation.processes() == {}


def test_with_keys_required_the_demo_brings_its_own(tmp_path: Path) -> None:
    installation = Installation(tmp_path / "home", SLOTKEEPER_REQUIRE_KEYS="true")
    with installation.up("--exit-after-demo") as up:
        assert up.process.wait(DEADLINE_S) == 0, up.printed
    assert ": completed on" in up.printed
    assert installation.ask("tenants", "list") == []


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
        until(lambda: installation.pid_of("worker@"), "the worker's process")
        assert up.stop(number) < STOPPED_WITHIN_S
        assert installation.processes() == {}


def test_when_it_is_killed_its_processes_do_not_stay(installation: Installation) -> None:
    with installation.up("--no-demo") as up:
        up.says("Ctrl-C stops everything.")
        up.process.kill()
        up.process.wait()
        until(lambda: not installation.processes(), "the end of all processes")
    assert installation.open_ports() == []


def test_a_redis_of_ones_own_is_used_and_none_is_started(tmp_path: Path) -> None:
    with Valkey(tmp_path) as valkey:
        installation = Installation(tmp_path / "home", SLOTKEEPER_REDIS_URL=valkey.url)
        with installation.up("--exit-after-demo") as up:
            assert up.process.wait(DEADLINE_S) == 0, up.printed
        assert not (installation.home / "logs" / "valkey.log").exists()
    refused = installation.run("up", "--no-demo")
    assert refused.returncode == 1
    assert re.fullmatch(r"Error: SLOTKEEPER_REDIS_URL does not answer .*\n", refused.stderr)
