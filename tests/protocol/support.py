"""A client of the slot protocol, and a reference server as a process of its own."""

import contextlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
import requests

from tests.protocol.gates import Gate, Held

ROOT = Path(__file__).parents[2]
ENDED = {"success": "completed", "completed": "completed", "done": "completed", "canceled": "canceled"}
ENDED |= {"failed": "failed", "error": "failed"}
DEADLINE_S = 15.0

_numbers = itertools.count(1)


def until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Look again and again until the condition holds; its value."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true in {DEADLINE_S} s"
        time.sleep(0.005)
    return value


def a_job_id() -> str:
    """One that no other test has used, even of another run of this suite on the same server."""
    return f"job-{time.time_ns():x}-{next(_numbers)}"


@dataclass
class Served:
    """A server under test, and what it can do."""

    url: str
    mode: str
    endpoint: str = "/generate"
    max_direct_queue: int = 10
    without: frozenset[str] = frozenset()
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=64))

    def needs(self, ability: str) -> None:
        if ability in self.without:
            pytest.skip(f"this server is said to be without {ability}")

    @property
    def slots(self) -> int:
        return self.health()["slots"]

    def health(self) -> dict[str, Any]:
        answer = requests.get(f"{self.url}/health", timeout=5)
        assert answer.status_code == 200
        return answer.json()

    def generate(self, payload: dict[str, Any] | None = None, **headers: str) -> requests.Response:
        return requests.post(f"{self.url}{self.endpoint}", json=payload or {}, headers=headers, timeout=30)

    def dispatch(self, payload: dict[str, Any] | None = None, job: str = "", attempt: int = 1, **more: str) -> Any:
        """A call as the dispatcher makes it."""
        headers = {"X-Source": "dispatcher", "X-Job-Id": job or a_job_id(), "X-Attempt": str(attempt), **more}
        return self.generate(payload, **headers)

    def status(self, job_id: str) -> requests.Response:
        return requests.get(f"{self.url}/status/{job_id}", timeout=5)

    def cancel(self, job_id: str) -> requests.Response:
        return requests.post(f"{self.url}/cancel/{job_id}", timeout=5)

    def ended(self, job_id: str) -> dict[str, Any]:
        """Poll until the run has ended; what /status says."""
        return until(lambda: (body := self.status(job_id).json())["status"] in ENDED and body, f"the end of {job_id}")

    def outcome(self, answer: requests.Response) -> dict[str, Any]:
        """The end of a run from the answer to its call, in either mode, with `status` in one vocabulary."""
        body = answer.json()
        if body["status"] not in ENDED:
            body = self.ended(body["job_id"])
        return body | {"status": ENDED[body["status"]]}


@dataclass
class Begun:
    """A call whose run waits at the gate."""

    served: Served
    held: Held
    job: str
    answer: "Future[requests.Response]"

    def finish(self, how: str = "return") -> dict[str, Any]:
        self.held.release(how)
        return self.outcome()

    def outcome(self) -> dict[str, Any]:
        return self.served.outcome(self.answer.result(DEADLINE_S))


@dataclass
class Stage:
    """One test's server and gate."""

    served: Served
    gate: Gate

    def payload(self, name: str = "") -> dict[str, Any]:
        return {"gate": self.gate.address, "name": name}

    def begin(self, job: str = "", attempt: int = 1, **headers: str) -> Begun:
        """Have the dispatcher's call run, and wait until it does."""
        job = job or a_job_id()
        answer = self.later(lambda: self.served.dispatch(self.payload(job), job, attempt, **headers))
        return Begun(self.served, self.gate.arrival(), job, answer)

    def begin_direct(self, **headers: str) -> Begun:
        answer = self.later(lambda: self.served.generate(self.payload(), **headers))
        return Begun(self.served, self.gate.arrival(), "", answer)

    def later(self, call: Callable[[], requests.Response]) -> "Future[requests.Response]":
        return self.served.threads.submit(call)

    def fill(self) -> list[Begun]:
        """Take every slot."""
        return [self.begin() for _ in range(self.served.slots)]

    def queue(self, name: str = "", **headers: str) -> str:
        """Make a direct call that has to wait; its id."""
        body = self.served.generate(self.payload(name), **headers).json()
        assert body["status"] == "queued"
        return body["job_id"]


@dataclass
class ServerProcess:
    """What it writes to stderr goes to a file: a pipe that nobody reads would fill, and hold the server up."""

    child: "subprocess.Popen[str]"
    served: Served
    log: IO[str]

    def errors(self) -> str:
        self.log.seek(0)
        return self.log.read()


@contextlib.contextmanager
def process(target: str, *options: str) -> Iterator[ServerProcess]:
    """A reference server on a free port."""
    command = [sys.executable, "-m", "reference_server", target, "--port", "0", *options]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as child,
    ):
        try:
            assert child.stdout
            line = child.stdout.readline()
            started = ServerProcess(child, Served("", "async" if "--async" in options else "sync"), log)
            assert " at http://" in line, (line, started.errors())
            started.served.url = line.split(" at ")[1].strip().removesuffix("/generate")
            yield started
        finally:
            child.kill()
