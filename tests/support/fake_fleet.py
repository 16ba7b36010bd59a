"""Inference servers inside the test's own process that do as they are told, also what no server should.

    with FakeServer(slots=2) as server:
        server.script("job-1", Hang())               # what becomes of this job, at each of its calls
        server.next(Refuse(500), Refuse(500))        # what becomes of the next calls, whosever they are
        ...
        server.release("job-1")
        assert [run.outcome for run in server.runs_of("job-1")] == ["completed"]

Without a script it keeps docs/slot-protocol.md, sync or async: it does the work at once, never runs more than it has
slots, and joins a call whose Idempotency-Key it knows.  `runs` is the oracle: what ran, in which slot, from when to
when on the monotonic clock.  Acts that never reach a slot leave no run.

To add an act: a frozen dataclass here, and its case in `_answer`.
"""

import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

_SHORTEST_NS = 1


# -- acts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Run for a while and end well, or with an error (500), or refuse the request (422)."""

    seconds: float = 0.0
    result: Any = None  # None: {"job": <its id>}
    ends: Literal["completed", "error", "invalid"] = "completed"


@dataclass(frozen=True)
class Hang:
    """Run until `release(job)`, then end as `then` says."""

    then: Work = Work()


@dataclass(frozen=True)
class CutAfter:
    """Do the work, and hang up without an answer: the effect happened, the answer was lost."""

    work: Work = Work()


@dataclass(frozen=True)
class CutBefore:
    """Hang up without having done anything."""


@dataclass(frozen=True)
class Trickle:
    """Do the work and answer one byte at a time."""

    every_s: float = 0.05
    work: Work = Work()


@dataclass(frozen=True)
class Late:
    """Do the work at once, free the slot, and answer only after `release(job)`."""

    work: Work = Work()


@dataclass(frozen=True)
class Refuse:
    """Answer with this status and do nothing: 503, 409, 429 are busy, other 5xx a fault."""

    status: int = 503
    retry_after: str | None = None
    body: Any = None  # None: a body that fits the protocol


@dataclass(frozen=True)
class Say:
    """Answer this very body, whatever it means, and do nothing."""

    body: bytes
    status: int = 200


Act = Work | Hang | CutAfter | CutBefore | Trickle | Late | Refuse | Say


# -- what is seen ------------------------------------------------------------------------------------------


@dataclass
class FakeRun:
    """One run.  `ended_ns` None: it is under way, or was when the server lost its memory."""

    job_id: str
    attempt: int
    slot: int
    started_ns: int
    ended_ns: int | None = None
    outcome: str | None = None
    result: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def id(self) -> str:
        return f"{self.job_id}.{self.attempt}"


@dataclass(frozen=True)
class FakeCall:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]  # lower-case names
    body: Any


class FakeServer:
    """One server; use it as a context manager.  `strict` False: it runs more than it has slots, for tests of tests."""

    def __init__(
        self, slots: int = 1, mode: Literal["sync", "async"] = "sync", name: str = "fake", strict: bool = True
    ) -> None:
        self.name, self.slots, self.mode, self.strict = name, slots, mode, strict
        self.runs: list[FakeRun] = []
        self.calls: list[FakeCall] = []
        self.health: Callable[[], tuple[int, Any]] = self._true_health
        """What /health answers; a test may replace it.  See `report`."""
        self._scripts: dict[str, Act] = {}
        self._next: deque[Act] = deque()
        self._storm: Refuse | None = None
        self._storm_until = 0.0
        self._known: dict[str, FakeRun] = {}  # by job, by run id
        self._released: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"fake": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for released in list(self._released.values()):
            released.set()
        self._http.shutdown()
        self._http.server_close()

    @property
    def endpoint(self) -> str:
        return f"{self.url}/generate"

    # -- what a test tells it ------------------------------------------------------------------------------

    def script(self, job_id: str, act: Act) -> None:
        """Whenever this job comes."""
        self._scripts[job_id] = act

    def next(self, *acts: Act) -> None:
        """For the next calls, before any script."""
        self._next.extend(acts)

    def storm(self, seconds: float, status: int = 500) -> None:
        """Refuse everything for a while, health and status too."""
        self._storm, self._storm_until = Refuse(status), time.monotonic() + seconds

    def release(self, job_id: str) -> None:
        """Let go what hangs, now and later."""
        self._release_of(job_id).set()

    def forget(self) -> None:
        """Restart: nothing is known any more, nothing runs, and who waits for an answer gets none."""
        with self._lock:
            for run in self.runs:
                if run.ended_ns is None:
                    self._end(run, "forgotten")
            self._known.clear()

    def report(self, *, job_ids: list[str] | None = None, active_jobs: int | None = None, status: int = 200) -> None:
        """Lie on /health from now on; what is None is left out.  `tell_the_truth` ends it."""
        said = {"job_ids": job_ids, "active_jobs": active_jobs}
        body = {name: value for name, value in said.items() if value is not None}
        self.health = lambda: (status, body)

    def freeze_report(self) -> None:
        """Go on saying what is true now: a stale health."""
        frozen = self._true_health()
        self.health = lambda: frozen

    def tell_the_truth(self) -> None:
        self.health = self._true_health

    def push(self, job_id: str, body: Any = None, *, token: str | None = None, times: int = 1) -> list[int]:
        """POST to the X-Callback-Url of the job's newest call, with its token or a forged one; answers the statuses."""
        headers = next(
            call.headers
            for call in reversed(self.calls)
            if call.headers.get("x-job-id") == job_id and call.method == "POST"
        )
        run = self._known.get(job_id)
        said = body if body is not None else _status_body(run) if run else {"status": "completed", "result": {}}
        shown = token if token is not None else headers["x-callback-token"]
        return [_post(headers["x-callback-url"], said, {"Authorization": f"Bearer {shown}"}) for _ in range(times)]

    # -- what a test asks ----------------------------------------------------------------------------------

    def runs_of(self, job_id: str) -> list[FakeRun]:
        return [run for run in self.runs if run.job_id == job_id]

    @property
    def active(self) -> list[FakeRun]:
        return [run for run in self.runs if run.ended_ns is None]

    def wait_for(self, job_id: str, timeout_s: float = 5.0) -> FakeRun:
        """Its newest run, once there is one.  Raises TimeoutError."""
        until = time.monotonic() + timeout_s
        while not (found := self.runs_of(job_id)):
            if time.monotonic() > until:
                raise TimeoutError(f"{job_id} did not come within {timeout_s} s")
            time.sleep(0.005)
        return found[-1]

    # -- how it does it ------------------------------------------------------------------------------------

    def _generate(self, call: FakeCall, reply: "_Handler") -> None:
        job_id = call.headers.get("x-job-id", "direct")
        with self._lock:
            act = self._next.popleft() if self._next else self._scripts.get(job_id, Work())
        match act:
            case Refuse():
                reply.refuse(act)
            case Say(body, status):
                reply.raw(status, body)
            case CutBefore():
                reply.cut()
            case _:
                self._run(call, job_id, act, reply)

    def _run(self, call: FakeCall, job_id: str, act: Act, reply: "_Handler") -> None:
        run, is_new = self._take(call, job_id)
        if run is None:
            reply.refuse(Refuse(503, retry_after="1"))
        elif self.mode == "async":
            if is_new:
                threading.Thread(target=self._carry_out, args=(run, act), daemon=True).start()
            reply.json(200, {"status": "processing", "job_id": run.id} if run.ended_ns is None else _status_body(run))
        else:
            if is_new:
                self._carry_out(run, act)
            run.done.wait()
            self._answer(run, act, reply)

    def _take(self, call: FakeCall, job_id: str) -> tuple[FakeRun | None, bool]:
        """(the run, whether it is new); None: every slot is taken."""
        attempt = int(call.headers.get("x-attempt", 0))
        with self._lock:
            known = self._known.get(job_id)
            if known is not None and known.outcome in (None, "completed") and "idempotency-key" in call.headers:
                return known, False
            taken = {run.slot for run in self.active}
            free = [slot for slot in range(self.slots) if slot not in taken]
            if not free and self.strict:
                return None, False
            run = FakeRun(job_id, attempt, free[0] if free else 0, time.monotonic_ns(), headers=call.headers)
            self.runs.append(run)
            self._known[job_id] = self._known[run.id] = run
            return run, True

    def _carry_out(self, run: FakeRun, act: Act) -> None:
        work = act if isinstance(act, Work) else act.then if isinstance(act, Hang) else getattr(act, "work", Work())
        if isinstance(act, Hang):
            released = self._release_of(run.job_id)
            while not (released.is_set() or run.done.is_set() or self._ended.is_set()):
                released.wait(0.02)
        if work.seconds:
            run.done.wait(work.seconds)  # a cancel or a restart ends it early
        with self._lock:
            if run.ended_ns is None:
                run.result = work.result if work.result is not None else {"job": run.job_id}
                self._end(run, work.ends)

    def _end(self, run: FakeRun, outcome: str) -> None:
        """With the lock held."""
        run.outcome, run.ended_ns = outcome, max(time.monotonic_ns(), run.started_ns + _SHORTEST_NS)
        run.done.set()

    def _answer(self, run: FakeRun, act: Act, reply: "_Handler") -> None:
        if run.outcome == "forgotten" or isinstance(act, CutAfter):
            reply.cut()
            return
        if isinstance(act, Late):
            self._release_of(run.job_id).wait()
        reply.json(*_sync_body(run), every_s=act.every_s if isinstance(act, Trickle) else 0.0)

    def _status(self, name: str, reply: "_Handler") -> None:
        run = self._known.get(name)
        if run is None:
            reply.json(404, {"status": "unknown", "job_id": name})
        else:
            reply.json(200, _status_body(run))

    def _cancel(self, name: str, reply: "_Handler") -> None:
        with self._lock:
            run = self._known.get(name)
            if run is not None and run.ended_ns is None:
                self._end(run, "canceled")
        if run is None:
            reply.json(404, {"status": "unknown", "job_id": name})
        else:
            reply.json(200, {"status": run.outcome, "job_id": run.id})

    def _true_health(self) -> tuple[int, Any]:
        with self._lock:
            ids = [run.job_id for run in self.active]
        return 200, {"status": "ok", "active_jobs": len(ids), "job_ids": ids, "slots": self.slots, "direct_queue": 0}

    def _release_of(self, job_id: str) -> threading.Event:
        return self._released.setdefault(job_id, threading.Event())

    def _weather(self) -> Refuse | None:
        return self._storm if time.monotonic() < self._storm_until else None


class _Handler(BaseHTTPRequestHandler):
    """The door of one server."""

    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        call = FakeCall(self.command, self.path, headers, json.loads(raw) if raw else None)
        self.fake.calls.append(call)
        storm = self.fake._weather()
        _, _, rest = self.path.partition("/")
        place, _, name = rest.partition("/")
        if storm is not None:
            self.refuse(storm)
        elif place == "generate":
            self.fake._generate(call, self)
        elif place == "status":
            self.fake._status(name, self)
        elif place == "cancel":
            self.fake._cancel(name, self)
        elif place == "health":
            self.json(*self.fake.health())
        else:
            self.json(404, {"status": "failed", "error": f"there is no {self.path}", "retryable": False})

    def json(self, status: int, body: Any, every_s: float = 0.0, after: str | None = None) -> None:
        self.raw(status, json.dumps(body).encode(), every_s, after)

    def raw(self, status: int, body: bytes, every_s: float = 0.0, after: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if after is not None:
            self.send_header("Retry-After", after)
        self.end_headers()
        try:
            for piece in [body[i : i + 1] for i in range(len(body))] if every_s else [body]:
                self.wfile.write(piece)
                if self.fake._ended.wait(every_s):
                    return
        except OSError:  # whoever asked has gone
            self.close_connection = True

    def refuse(self, act: Refuse) -> None:
        busy = act.status in (409, 429, 503)
        body = act.body or {"status": "busy" if busy else "error", "error": "told to refuse"}
        self.json(act.status, body, after=act.retry_after)

    def cut(self) -> None:
        """The peer gets a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def finish(self) -> None:
        with suppress(OSError, ValueError):  # it was cut
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""


def _sync_body(run: FakeRun) -> tuple[int, Any]:
    match run.outcome:
        case "completed":
            return 200, {"status": "success", "result": run.result}
        case "canceled":
            return 200, {"status": "canceled", "job_id": run.id}
        case "invalid":
            return 422, {"status": "failed", "error": "told to refuse", "retryable": False}
        case _:
            return 500, {"status": "error", "error": "told to fail", "retryable": True}


def _status_body(run: FakeRun) -> Any:
    match run.outcome:
        case None:
            return {"status": "processing", "job_id": run.id}
        case "completed":
            return {"status": "completed", "job_id": run.id, "result": run.result}
        case "canceled":
            return {"status": "canceled", "job_id": run.id, "error": "canceled"}
        case outcome:
            return {"status": "failed", "job_id": run.id, "error": "told to", "retryable": outcome == "error"}


def _post(url: str, body: Any, headers: dict[str, str]) -> int:
    sent = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), sent, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
