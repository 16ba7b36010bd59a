"""A server under test, a gate, and what can be done with both."""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import requests

from slotkeeper.conform.gate import Gate, HeldRun

ENDED = {"success": "completed", "completed": "completed", "done": "completed", "canceled": "canceled"}
ENDED |= {"failed": "failed", "error": "failed"}
DEADLINE_S = 15.0

_numbers = itertools.count(1)


class ProtocolViolation(AssertionError):
    """The server does not keep a clause; the message says what was seen instead."""


class Skipped(Exception):
    """A check that does not apply to this server, and why."""


def require(holds: object, otherwise: str) -> None:
    """Raises Violated with what is the case `otherwise`."""
    if not holds:
        raise ProtocolViolation(otherwise)


def require_equal(found: object, wanted: object, what: str) -> None:
    """Raises Violated unless both are equal."""
    require(found == wanted, f"{what} is {found!r}, not {wanted!r}")


def wait_until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Look again and again until the condition holds; its value.  Raises Violated after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        require(time.monotonic() < deadline, f"{what} did not come true in {DEADLINE_S:g} s")
        time.sleep(0.005)
    return value


def a_job_id() -> str:
    """One that no other check has used, even of another round on the same server."""
    return f"job-{time.time_ns():x}-{next(_numbers)}"


@dataclass
class ServerUnderTest:
    """A server under test, and what it can do.

    `without`: which of ABILITIES it does not promise.  `restart`: kills it and starts it again, if that can be done.
    """

    url: str
    mode: str
    endpoint: str = "/generate"
    max_direct_queue: int = 10
    without: frozenset[str] = frozenset()
    restart: Callable[[], None] | None = None
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=64))

    def needs(self, ability: str) -> None:
        """Raises LeftOut."""
        if ability in self.without:
            raise Skipped(f"this server is said to be without {ability}")

    @property
    def slots(self) -> int:
        return int(self.health()["slots"])

    def health(self) -> dict[str, Any]:
        answer = requests.get(f"{self.url}/health", timeout=5)
        require_equal(answer.status_code, 200, "the status of /health")
        found: dict[str, Any] = answer.json()
        return found

    def generate(self, payload: dict[str, Any] | None = None, **headers: str) -> requests.Response:
        return requests.post(f"{self.url}{self.endpoint}", json=payload or {}, headers=headers, timeout=30)

    def dispatch(
        self, payload: dict[str, Any] | None = None, job: str = "", attempt: int = 1, key: str = "", **more: str
    ) -> requests.Response:
        """A call as the dispatcher makes it; with an Idempotency-Key, if there is a `key`."""
        headers = {"X-Source": "dispatcher", "X-Job-Id": job or a_job_id(), "X-Attempt": str(attempt), **more}
        if key:
            headers["Idempotency-Key"] = key
        return self.generate(payload, **headers)

    def post(self, body: bytes) -> requests.Response:
        """A call whose body is just that."""
        headers = {"X-Source": "dispatcher"}
        return requests.post(f"{self.url}{self.endpoint}", data=body, headers=headers, timeout=5)

    def status(self, job_id: str) -> requests.Response:
        return requests.get(f"{self.url}/status/{job_id}", timeout=5)

    def cancel(self, job_id: str) -> requests.Response:
        return requests.post(f"{self.url}/cancel/{job_id}", timeout=5)

    def word(self, job_id: str) -> str:
        """What /status says of it, in one word."""
        return str(self.status(job_id).json()["status"])

    def ended(self, job_id: str) -> dict[str, Any]:
        """Poll until the run has ended; what /status says."""
        found: dict[str, Any] = wait_until(
            lambda: (body := self.status(job_id).json())["status"] in ENDED and body, f"the end of {job_id}"
        )
        return found

    def outcome(self, answer: requests.Response) -> dict[str, Any]:
        """The end of a run from the answer to its call, in either mode, with `status` in one vocabulary."""
        return self.outcome_of(answer.json())

    def outcome_of(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["status"] not in ENDED:
            body = self.ended(body["job_id"])
        return body | {"status": ENDED[body["status"]]}

    def is_idle(self) -> bool:
        now = self.health()
        return now["active_jobs"] == 0 and not now.get("direct_queue")


@dataclass
class StartedRun:
    """A call whose run waits at the gate."""

    served: ServerUnderTest
    held: HeldRun
    job: str
    answer: "Future[requests.Response]"

    def finish(self, how: str = "return") -> dict[str, Any]:
        self.held.release(how)
        return self.outcome()

    def outcome(self) -> dict[str, Any]:
        return self.served.outcome(self.answer.result(DEADLINE_S))


@dataclass
class CheckContext:
    """One check's server and gate."""

    served: ServerUnderTest
    gate: Gate

    def payload(self, name: str = "") -> dict[str, Any]:
        return {"gate": self.gate.address, "name": name}

    def begin(self, job: str = "", attempt: int = 1, key: str = "", **headers: str) -> StartedRun:
        """Have the dispatcher's call run, and wait until it does."""
        job = job or a_job_id()
        answer = self.later(lambda: self.served.dispatch(self.payload(job), job, attempt, key, **headers))
        return StartedRun(self.served, self._arrival(answer), job, answer)

    def begin_direct(self, **headers: str) -> StartedRun:
        answer = self.later(lambda: self.served.generate(self.payload(), **headers))
        return StartedRun(self.served, self._arrival(answer), "", answer)

    def later(self, call: Callable[[], requests.Response]) -> "Future[requests.Response]":
        return self.served.threads.submit(call)

    def fill(self) -> list[StartedRun]:
        """Take every slot."""
        return [self.begin() for _ in range(self.served.slots)]

    def queue(self, name: str = "", **headers: str) -> str:
        """Make a direct call that has to wait; its id."""
        body = self.served.generate(self.payload(name), **headers).json()
        require_equal(body["status"], "queued", "the answer to a direct call when all slots run")
        return str(body["job_id"])

    def _arrival(self, answer: "Future[requests.Response]") -> HeldRun:
        """The run's coming to the gate; what the server said instead, if it does not come."""
        try:
            return self.gate.arrival()
        except TimeoutError:
            said = f"; the server said {answer.result().text[:200]!r}" if answer.done() else ""
            raise ProtocolViolation(f"a call was made, and no run began{said}") from None
