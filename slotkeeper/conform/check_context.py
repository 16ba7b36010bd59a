"""The objects that a check uses: the server under test, the gate, and the runs that wait at it."""

import http.client
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson
import requests

from slotkeeper.conform.gate import Gate, HeldRun

ENDED = {"success": "completed", "completed": "completed", "done": "completed", "canceled": "canceled"}
ENDED |= {"failed": "failed", "error": "failed"}
DEADLINE_S = 15.0

_numbers = itertools.count(1)


class ProtocolViolation(AssertionError):
    """The server violates a clause of the protocol; the message describes what the check observed."""


class Skipped(Exception):
    """The check does not apply to this server; the message has the reason."""


def require(holds: object, otherwise: str) -> None:
    """Raise ProtocolViolation with the message `otherwise` unless the condition holds."""
    if not holds:
        raise ProtocolViolation(otherwise)


def require_equal(found: object, wanted: object, what: str) -> None:
    """Raise ProtocolViolation unless both values are equal.  `what` names the compared value in the message."""
    require(found == wanted, f"{what} is {found!r}, not {wanted!r}")


def wait_until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Poll until the condition returns a true value, and return it.  Raises ProtocolViolation after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        require(time.monotonic() < deadline, f"{what} did not come true in {DEADLINE_S:g} s")
        time.sleep(0.005)
    return value


def a_job_id() -> str:
    """Return a job id that no other check has used, also no earlier test of the same server."""
    return f"job-{time.time_ns():x}-{next(_numbers)}"


def is_stream(answer: requests.Response) -> bool:
    """Return whether a call was answered with server-sent events."""
    return answer.headers.get("Content-Type", "").startswith("text/event-stream")


def last_event(answer: requests.Response) -> dict[str, Any]:
    """Return the last event of a stream that has ended, which describes the end of the run."""
    data = [line[6:] for line in answer.content.splitlines() if line.startswith(b"data: ")]
    require(data, "the stream has no event")
    found: dict[str, Any] = orjson.loads(data[-1])
    return found


@dataclass
class ServerUnderTest:
    """The server under test and its properties; the methods send requests to it.

    `mode` is sync, async or stream.  `headers` are sent with each request.  `without` contains the ABILITIES that the
    server lacks.  `restart` kills the server and starts it again; None if the test cannot do this.
    """

    url: str
    mode: str
    endpoint: str = "/generate"
    max_direct_queue: int = 10
    without: frozenset[str] = frozenset()
    restart: Callable[[], None] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=64))

    def needs(self, ability: str) -> None:
        """Raise Skipped if the server lacks this ability."""
        if ability in self.without:
            raise Skipped(f"this server is said to be without {ability}")

    @property
    def slots(self) -> int:
        """The number of slots according to /health."""
        return int(self.health()["slots"])

    def health(self, timeout_s: float = 5) -> dict[str, Any]:
        """Return the body of /health.  Raises ProtocolViolation unless the HTTP status is 200."""
        answer = self._send("GET", "/health", timeout=timeout_s)
        require_equal(answer.status_code, 200, "the status of /health")
        found: dict[str, Any] = answer.json()
        return found

    def generate(self, payload: dict[str, Any] | None = None, **headers: str) -> requests.Response:
        """Send a call with these headers; without X-Source it is a direct call."""
        return self._send("POST", self.endpoint, timeout=30, json=payload or {}, headers=headers)

    def dispatch(
        self, payload: dict[str, Any] | None = None, job: str = "", attempt: int = 1, key: str = "", **more: str
    ) -> requests.Response:
        """Send a call like the dispatcher, with an Idempotency-Key if `key` is not empty."""
        headers = {"X-Source": "dispatcher", "X-Job-Id": job or a_job_id(), "X-Attempt": str(attempt), **more}
        if key:
            headers["Idempotency-Key"] = key
        return self.generate(payload, **headers)

    def post(self, body: bytes) -> requests.Response:
        """Send dispatcher traffic with exactly these bytes as the body."""
        return self._send("POST", self.endpoint, data=body, headers={"X-Source": "dispatcher"})

    def status(self, job_id: str) -> requests.Response:
        return self._send("GET", f"/status/{job_id}")

    def cancel(self, job_id: str) -> requests.Response:
        return self._send("POST", f"/cancel/{job_id}")

    def word(self, job_id: str) -> str:
        """Return the field `status` of /status."""
        return str(self.status(job_id).json()["status"])

    def ended(self, job_id: str) -> dict[str, Any]:
        """Poll /status until the run has ended, and return its last body."""
        found: dict[str, Any] = wait_until(
            lambda: (body := self.status(job_id).json())["status"] in ENDED and body, f"the end of {job_id}"
        )
        return found

    def outcome(self, answer: requests.Response) -> dict[str, Any]:
        """Return the body that describes the end of the run, from the response to its call, in either mode.

        Waits for the end if necessary.  `status` is completed, failed or canceled, also if the server uses a synonym.
        """
        return self.outcome_of(last_event(answer) if is_stream(answer) else answer.json())

    def outcome_of(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the same as `outcome`, from the body of the response."""
        if body["status"] not in ENDED:
            body = self.ended(body["job_id"])
        return body | {"status": ENDED[body["status"]]}

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection that is kept between calls; `begin_request` sends one."""
        parts = urlsplit(self.url)
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5)

    def begin_request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str = "", **headers: str
    ) -> None:
        """Send a request over a connection."""
        connection.request(method, f"{urlsplit(self.url).path}{path}", body or None, {**self.headers, **headers})

    def _send(
        self, method: str, path: str, *, timeout: float = 5, headers: Mapping[str, str] | None = None, **body: Any
    ) -> requests.Response:
        given = {**self.headers, **(headers or {})}
        return requests.request(method, f"{self.url}{path}", headers=given, timeout=timeout, **body)

    def is_idle(self) -> bool:
        """Return True if no run is processing and no direct call waits."""
        now = self.health()
        return now["active_jobs"] == 0 and not now.get("direct_queue")


@dataclass
class StartedRun:
    """A call whose run has started and waits at the gate."""

    served: ServerUnderTest
    held: HeldRun
    job: str
    answer: "Future[requests.Response]"

    def finish(self, how: str = "return") -> dict[str, Any]:
        """Release the run at the gate, and return its outcome.  `how`: return | error | invalid."""
        self.held.release(how)
        return self.outcome()

    def outcome(self) -> dict[str, Any]:
        """Wait for the end of the run and return its body; see `ServerUnderTest.outcome`."""
        return self.served.outcome(self.answer.result(DEADLINE_S))


@dataclass
class CheckContext:
    """The server and the gate of one check."""

    served: ServerUnderTest
    gate: Gate

    def payload(self, name: str = "") -> dict[str, Any]:
        """Return a payload whose run waits at the gate under this name."""
        return {"gate": self.gate.address, "name": name}

    def begin(self, job: str = "", attempt: int = 1, key: str = "", **headers: str) -> StartedRun:
        """Send a call like the dispatcher, and wait until its run has started."""
        job = job or a_job_id()
        answer = self.later(lambda: self.served.dispatch(self.payload(job), job, attempt, key, **headers))
        return StartedRun(self.served, self._wait_for_run(answer), job, answer)

    def begin_direct(self, **headers: str) -> StartedRun:
        """Send a direct call, and wait until its run has started."""
        answer = self.later(lambda: self.served.generate(self.payload(), **headers))
        return StartedRun(self.served, self._wait_for_run(answer), "", answer)

    def later(self, call: Callable[[], requests.Response]) -> "Future[requests.Response]":
        """Send a request in a background thread."""
        return self.served.threads.submit(call)

    def fill(self) -> list[StartedRun]:
        """Start a run in each slot."""
        return [self.begin() for _ in range(self.served.slots)]

    def queue(self, name: str = "", **headers: str) -> str:
        """Send a direct call that has to wait, and return its id."""
        body = self.served.generate(self.payload(name), **headers).json()
        require_equal(body["status"], "queued", "the answer to a direct call when all slots run")
        return str(body["job_id"])

    def _wait_for_run(self, answer: "Future[requests.Response]") -> HeldRun:
        """Wait until the run reaches the gate.  Raises ProtocolViolation with the server's response if it does not."""
        try:
            return self.gate.arrival()
        except TimeoutError:
            response = f"; the server said {answer.result().text[:200]!r}" if answer.done() else ""
            raise ProtocolViolation(f"a call was made, and no run began{response}") from None
