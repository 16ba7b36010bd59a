"""Presets against the servers that they are of, installed from the registry into virtual environments of their own.

    make live-presets                    # takes minutes, and a few hundred MiB in var/live
    make live-presets LIVE="cog mosec"

Not part of `make test`: what is installed is the newest release, so that a change of theirs is seen here first.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from routing.outcome import Kind, Outcome
from tasks.servers import Call, Description, HealthKind, Server, new_session, presets
from tasks.servers.probe import GENERIC, recognize

pytestmark = [pytest.mark.live_servers, pytest.mark.timeout(600)]

REPO = Path(__file__).resolve().parents[2]
APPS = Path(__file__).parent / "apps"
VENVS = Path(os.environ.get("SLOTKEEPER_LIVE_HOME") or REPO / "var" / "live")
_STARTS_WITHIN_S = 120.0
_ENDS_WITHIN_S = 15


def prompt(word: str, sleep: float = 0) -> dict[str, Any]:
    return {"prompt": word, **({"sleep": sleep} if sleep else {})}


def tensor(number: float) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [number]}]}


@dataclass(frozen=True)
class Live:
    """A server: what is installed, how it is started, and what it should make of a job that ends so or so.

    `says`: payloads and what must come of them: good, wrong, boom (an error of the model), slow (two seconds).
    """

    preset: str
    package: str
    command: tuple[str, ...]  # {port} stands for the port; of the virtual environment's bin
    path: str
    ready: str
    payloads: dict[str, Any]
    becomes: dict[str, Kind]
    result: Any
    folder: str = "."
    env: dict[str, str] = field(default_factory=dict)
    when_full: Kind = Kind.DONE  # of those that queue inside
    cancels: bool = False
    recognized: bool = True

    def __str__(self) -> str:
        return f"{self.preset}-{self.package.partition('[')[0]}"


WORDS = {"good": prompt("a cat"), "wrong": {"nope": 1}, "boom": prompt("boom"), "slow": prompt("slow", 2)}
NUMBERS = {"good": tensor(1.0), "wrong": {"nope": 1}, "boom": tensor(-1.0), "slow": tensor(102.0)}
FINAL = {"wrong": Kind.FAILED, "boom": Kind.RETRY}
COSTS_A_RETRY = {"wrong": Kind.RETRY, "boom": Kind.RETRY}
PAINTED = {"image": "A CAT"}

SERVERS = [
    Live("litserve", "litserve", ("python", "litserve_app.py"), "/predict", "/health", WORDS, COSTS_A_RETRY, PAINTED),
    Live(
        "bentoml",
        "bentoml",
        ("bentoml", "serve", "bentoml_app:Cat", "--port", "{port}", "--host", "127.0.0.1"),
        "/generate",
        "/readyz",
        WORDS,
        FINAL,
        PAINTED,
        when_full=Kind.BUSY,
    ),
    Live(
        "bentoml-task",
        "bentoml",
        ("bentoml", "serve", "bentoml_app:Cat", "--port", "{port}", "--host", "127.0.0.1"),
        "/paint",
        "/readyz",
        WORDS,
        COSTS_A_RETRY,
        PAINTED,
        when_full=Kind.BUSY,
    ),
    Live(
        "cog",
        "cog",
        ("python", "-m", "cog.server.http", "--host", "127.0.0.1"),
        "",
        "/health-check",
        WORDS,
        COSTS_A_RETRY,
        "A CAT",
        env={"COG_PREDICT_TYPE_STUB": "cog_app.py:Predictor"},
        when_full=Kind.BUSY,
        cancels=True,
    ),
    Live(
        "open-inference-v2",
        "mlserver",
        ("mlserver", "start", "."),
        "/v2/models/cat",
        "/v2/models/cat/ready",
        NUMBERS,
        FINAL,
        None,
        folder="mlserver",
        env={"MLSERVER_HTTP_PORT": "{port}", "MLSERVER_PARALLEL_WORKERS": "0", "MLSERVER_HOST": "127.0.0.1"},
    ),
    Live(
        "runpod-worker",
        "runpod",
        ("python", "runpod_app.py", "--rp_serve_api", "--rp_api_host", "127.0.0.1", "--rp_api_port", "{port}"),
        "",
        "/openapi.json",
        WORDS,
        COSTS_A_RETRY,
        PAINTED,
    ),
    Live(
        GENERIC,
        "mosec",
        ("python", "mosec_app.py", "--port", "{port}", "--address", "127.0.0.1"),
        "/inference",
        "/",
        WORDS,
        FINAL,
        PAINTED,
    ),
    Live(
        GENERIC,
        "starlette",
        ("python", "starlette_app.py"),
        "/predict",
        "/",
        WORDS,
        FINAL,
        PAINTED,
    ),
]
_ALSO = {"starlette": ["uvicorn"]}


def _wanted() -> list[Live]:
    names = set(os.environ.get("LIVE", "").split())
    return [one for one in SERVERS if not names or names & {one.preset, one.package}]


@dataclass
class Running:
    live: Live
    url: str
    server: Server

    @property
    def endpoint(self) -> str:
        return self.url + self.live.path

    def submit(self, which: str) -> tuple[Call, Outcome]:
        call = Call(f"job-{time.time_ns():x}", 1, self.live.payloads[which], deadline_s=30.0)
        return call, self.server.submit(call)

    def ended(self, which: str) -> Outcome:
        """What comes of a job, polled if need be."""
        call, outcome = self.submit(which)
        while outcome.kind is Kind.PENDING and outcome.remote_id:
            outcome = self.server.status(call, outcome.remote_id)
        return outcome


@pytest.fixture(scope="module", params=_wanted(), ids=str)
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    live: Live = request.param
    with _started(live, _installed(live.package)) as url, new_session(4) as session:
        description = Description.model_validate(presets.get(live.preset))
        yield Running(live, url, Server(url + live.path, description, session=session))


def _installed(package: str) -> Path:
    """The virtual environment's bin."""
    home = VENVS / package
    done = home / ".installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin" / "pip"), "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, package, *_ALSO.get(package, [])], check=True)
        done.touch()
    return home / "bin"


@contextmanager
def _started(live: Live, binaries: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [part.replace("{port}", port) for part in live.command]
    env = {name: value.replace("{port}", port) for name, value in live.env.items()}
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen(
        [str(binaries / command[0]), *command[1:]],
        cwd=APPS / live.folder,
        env={**os.environ, "PATH": path, "PORT": port, "PYTHONPATH": "", **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as child:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url + live.ready, child)
            yield url
        finally:
            child.terminate()  # Some start processes in sessions of their own, which only they can end.
            with suppress(subprocess.TimeoutExpired):
                child.wait(_ENDS_WITHIN_S)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _wait_for(url: str, child: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while time.monotonic() < deadline:
        assert child.poll() is None, f"the server ended with {child.returncode}"
        try:
            answer = requests.get(url, timeout=2)
            if answer.status_code < 500 and "STARTING" not in answer.text:
                return
        except requests.RequestException:
            pass
        time.sleep(0.2)
    pytest.fail(f"{url} did not answer within {_STARTS_WITHIN_S:g} s")


def test_a_job_is_done_with_its_result(running: Running):
    outcome = running.ended("good")
    assert outcome.kind is Kind.DONE, outcome
    if running.live.result is not None:
        assert outcome.result == running.live.result


@pytest.mark.parametrize("which", ["wrong", "boom"])
def test_what_goes_wrong_means_what_the_preset_says(running: Running, which: str):
    outcome = running.ended(which)
    assert outcome.kind is running.live.becomes[which], outcome


def test_a_job_right_after_a_failed_one_is_answered(running: Running):
    for _ in range(10):
        assert running.ended("boom").kind is Kind.RETRY
        assert running.ended("good").kind is Kind.DONE


def test_health_is_up_and_under_a_job_it_is_not_down(running: Running):
    if running.server.description.health is None:
        pytest.skip("this preset has no health check")
    assert running.server.health().kind is HealthKind.UP
    with _slow_one_under_way(running):
        assert running.server.health().kind in (HealthKind.UP, HealthKind.BUSY)


def test_a_full_server_is_busy_or_queues(running: Running):
    with _slow_one_under_way(running):
        _, outcome = running.submit("good")
        assert outcome.kind in (running.live.when_full, Kind.PENDING if running.live.when_full is Kind.DONE else None)


def test_a_run_can_be_canceled(running: Running):
    if not running.live.cancels:
        pytest.skip("its servers do not cancel what runs")
    found: list[Outcome] = []
    call = Call("job-to-cancel", 1, running.live.payloads["slow"], deadline_s=30.0)
    thread = threading.Thread(target=lambda: found.append(running.server.submit(call)))
    thread.start()
    _until(lambda: running.server.cancel(call))
    thread.join(20)
    assert found[0].kind is Kind.CANCELED


def test_it_is_recognized(running: Running):
    found = recognize(running.url)
    # A BentoML service that has a task, too, shows signs of both.
    assert running.live.preset in (found.preset, *(one.preset for one in found.candidates))
    assert urlsplit(running.url).port


@contextmanager
def _slow_one_under_way(running: Running) -> Iterator[None]:
    call = Call(f"slow-{time.time_ns():x}", 1, running.live.payloads["slow"], deadline_s=30.0)
    ends: list[Outcome] = []
    thread = threading.Thread(target=lambda: ends.append(running.server.submit(call)))
    thread.start()
    time.sleep(0.7)  # Nothing outside says that it has begun.
    try:
        yield
    finally:
        thread.join(30)
        while ends and ends[0].kind is Kind.PENDING and ends[0].remote_id:
            ends[0] = running.server.status(call, ends[0].remote_id)


def _until(holds: Any) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
