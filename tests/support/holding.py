"""A server in the test's own process that holds runs until the test releases them.

    with HoldingServer() as server:
        server.hold("job-1")
        ...
        server.release("job-1")

All other runs end at once.  It implements the slot protocol with two exceptions: it ignores cancel requests, and an
`asynchronous` one runs more jobs at once than it has slots, so that the test can count them.
`runs` lists which runs there were, with their start and end on the monotonic clock.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tests.support.scripted import Scripted, Seen, answer

_LOOK_EVERY_S = 0.005


@dataclass
class HeldRun:
    """One run.  `ended_ns` None: it is in progress."""

    job_id: str
    id: str
    started_ns: int
    ended_ns: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def status(self) -> dict[str, Any]:
        if self.ended_ns is None:
            return {"status": "processing", "job_id": self.id}
        return {"status": "completed", "job_id": self.id, "result": {"job": self.job_id}}


class HoldingServer(Scripted):
    """One server with one slot; use it as a context manager."""

    def __init__(self, *, asynchronous: bool = False) -> None:
        super().__init__(self._says)
        self.asynchronous = asynchronous
        self.runs: list[HeldRun] = []
        self._held: dict[str, threading.Event] = {}
        self._known: dict[str, HeldRun] = {}  # by job, by run id
        self._lock = threading.Lock()

    def __exit__(self, *_: object) -> None:
        for released in self._held.values():
            released.set()
        super().__exit__()

    @property
    def endpoint(self) -> str:
        return f"{self.url}/generate"

    # -- for tests ---------------------------------------------------------------------------------------------

    def hold(self, job_id: str) -> None:
        """Hold the run of this job.  Call it before the job is submitted."""
        self._held[job_id] = threading.Event()

    def release(self, job_id: str) -> None:
        self._held[job_id].set()

    @property
    def active(self) -> list[HeldRun]:
        return [run for run in self.runs if run.ended_ns is None]

    @property
    def at_once(self) -> int:
        """The highest number of runs at one time."""

        def under_way(at_ns: int, run: HeldRun) -> bool:
            return run.started_ns <= at_ns and (run.ended_ns is None or at_ns < run.ended_ns)

        return max(sum(under_way(one.started_ns, run) for run in self.runs) for one in self.runs)

    def wait_for(self, job_id: str, timeout_s: float) -> None:
        """Wait until the job runs.  Raises TimeoutError."""
        until = time.monotonic() + timeout_s
        while job_id not in self._known:
            if time.monotonic() > until:
                raise TimeoutError(f"{job_id} did not start within {timeout_s} s")
            time.sleep(_LOOK_EVERY_S)

    # -- requests ----------------------------------------------------------------------------------------------

    def _says(self, seen: Seen) -> bytes:
        _, place, *name = seen.path.split("/", 2)
        match place:
            case "generate":
                return self._generate(seen.headers["x-job-id"], seen.headers["x-attempt"])
            case "health":
                return self._health()
            case _:  # A cancel gets the response of a status request, and the run continues.
                return self._status("".join(name))

    def _generate(self, job_id: str, attempt: str) -> bytes:
        run, is_new = self._take(job_id, attempt)
        if run is None:
            return answer({"status": "busy", "error": "its slot is taken"}, 503)
        if self.asynchronous:
            if is_new:
                threading.Thread(target=self._carry_out, args=(run,), daemon=True).start()
            return answer(run.status())
        if is_new:
            self._carry_out(run)
        run.ended.wait()
        return answer({"status": "success", "result": {"job": job_id}})

    def _status(self, name: str) -> bytes:
        run = self._known.get(name)
        return answer(run.status()) if run else answer({"status": "unknown", "job_id": name}, 404)

    def _health(self) -> bytes:
        with self._lock:
            ids = [run.job_id for run in self.active]
        return answer(
            {"status": "ok", "active_jobs": len(ids), "job_ids": ids, "idempotent": True, "slots": 1, "direct_queue": 0}
        )

    def _take(self, job_id: str, attempt: str) -> tuple[HeldRun | None, bool]:
        """Return the run, and whether it is new; None: the slot is taken."""
        with self._lock:
            if job_id in self._known:
                return self._known[job_id], False
            if self.active and not self.asynchronous:
                return None, False
            run = HeldRun(job_id, f"{job_id}.{attempt}", time.monotonic_ns())
            self.runs.append(run)
            self._known[job_id] = self._known[run.id] = run
            return run, True

    def _carry_out(self, run: HeldRun) -> None:
        if run.job_id in self._held:
            self._held[run.job_id].wait()
        with self._lock:
            run.ended_ns = max(time.monotonic_ns(), run.started_ns + 1)
        run.ended.set()
