"""The scheduler of runs: slots, the direct queue and recent results.  It has no HTTP code and calls no function.

Each decision is one step under one lock, so these invariants hold at every moment:

SLOT-1   the number of processing runs never exceeds the number of slots, and no two of them have the same slot number
DIRECT-1 dispatcher traffic gets a slot only when no direct call waits
DIRECT-2 the direct queue is never longer than `max_direct_queue`
IDEM-1   of two calls with the same Idempotency-Key at most one runs at a time, and a completed one is not run again
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import Any

from slotkeeper.serve.run_progress import RunProgress


class State(StrEnum):
    """The state of a run, with the values that `/status` shows."""

    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"


@dataclass(frozen=True, slots=True)
class Callback:
    """The URL to which the end of a run is pushed, and the bearer token that the receiver expects."""

    url: str
    token: str


@dataclass(frozen=True, slots=True)
class Call:
    """One request for a run."""

    payload: Any
    dispatcher: bool = False
    job_id: str | None = None  # the dispatcher's id of the job; ignored in a direct call
    attempt: int | None = None
    key: str | None = None  # Idempotency-Key
    callback: Callback | None = None
    model: str = ""  # of several that one server runs


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended.  `result` is JSON text and not an object, so that no caller can modify a remembered result."""

    state: State
    result: bytes = b""
    error: str = ""
    retryable: bool = False
    was_started: bool = True  # False: the function could not begin, and nothing has run


@dataclass(slots=True, eq=False)
class Run:
    """One run of the function: queued, processing or ended.  Only the scheduler changes it."""

    id: str
    job_id: str  # the dispatcher's id of the job; without one the same as `id`
    payload: Any  # None after the end, to free memory
    dispatcher: bool
    attempt: int | None  # the dispatcher's number of this start of the job
    key: tuple[bool, str] | None  # see `_run_key`
    state: State = State.QUEUED
    slot: int = -1  # 0 … slots - 1 after the start; -1: not started
    ending: RunEnd | None = None
    ended_s: float = 0.0  # time of the scheduler's clock
    callback: Callback | None = None
    pieces: RunProgress = field(default_factory=RunProgress)
    cancel: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    model: str = ""
    names: list[str] = field(default_factory=list)  # further ids under which it is found


@dataclass(frozen=True, slots=True)
class Started:
    """The run has a slot.  The caller of `submit` must execute it and then call `finish`."""

    run: Run


@dataclass(frozen=True, slots=True)
class AlreadyKnown:
    """An earlier run with the same Idempotency-Key is queued, processing or completed; `run` is that run."""

    run: Run


@dataclass(frozen=True, slots=True)
class Queued:
    """The direct call waits in the direct queue.  `position` 1 is next."""

    run: Run
    position: int


@dataclass(frozen=True, slots=True)
class Busy:
    """No slot is free for dispatcher traffic; the dispatcher should use another server.  Nothing has failed."""


@dataclass(frozen=True, slots=True)
class QueueFull:
    """The direct queue is full."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The server is shutting down and starts no run."""


Decision = Started | AlreadyKnown | Queued | Busy | QueueFull | Stopping


@dataclass(frozen=True, slots=True)
class Health:
    """A snapshot of the scheduler.  `job_ids` contains exactly the runs that `active` counts."""

    active: int
    job_ids: list[str]
    slots: int
    direct_queue: int
    max_active: int
    stopping: bool


@dataclass(frozen=True, slots=True)
class ResultRetention:
    """Limits for the ended runs that the scheduler keeps.  The oldest are deleted as soon as one limit is exceeded."""

    runs: int = 1000
    age_s: float = 3600.0
    result_bytes: int = 256 << 20  # results may be images, so a limit of `runs` alone does not bound the memory

    def __post_init__(self) -> None:
        if self.runs < 1 or self.age_s <= 0 or self.result_bytes < 0:
            raise ValueError("at least one run must be remembered, for more than no time")


class RunScheduler:
    """A scheduler that assigns slots to runs.  All methods are thread-safe; only `wait_idle` waits for runs."""

    def __init__(
        self,
        slots: int,
        max_direct_queue: int = 10,
        memory: ResultRetention | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = slots
        self._max_direct_queue = max_direct_queue
        self._retention = memory or ResultRetention()
        self._clock = clock
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._free = list(range(slots))
        heapify(self._free)
        self._active: dict[Run, None] = {}  # in order of their start
        self._direct_queue: deque[Run] = deque()
        self._runs_by_id: dict[str, Run] = {}  # by the server's id and by the dispatcher's; active, queued and ended
        self._runs_by_key: dict[tuple[bool, str], Run] = {}  # active, queued and completed
        self._ended: deque[Run] = deque()  # oldest first
        self._ended_bytes = 0
        self._max_active = 0
        self._stopping = False

    def submit(self, call: Call) -> Decision:
        """Decide about a call in one step, and return the decision."""
        key = _run_key(call)
        with self._lock:
            self._evict_ended()
            existing = self._runs_by_key.get(key) if key else None
            if existing is not None:  # IDEM-1: checked before the slots, because a repeated call must not get "busy"
                existing.callback = call.callback or existing.callback  # an earlier caller may have died
                return AlreadyKnown(existing)
            if self._stopping:
                return Stopping()
            if call.dispatcher and (self._direct_queue or not self._free):  # DIRECT-1, SLOT-1
                return Busy()
            if not call.dispatcher and (self._direct_queue or not self._free):
                if len(self._direct_queue) >= self._max_direct_queue:  # DIRECT-2
                    return QueueFull()
                run = self._register(call, key)
                self._direct_queue.append(run)
                return Queued(run, len(self._direct_queue))
            run = self._register(call, key)
            self._start(run, heappop(self._free))
            return Started(run)

    def finish(self, run: Run, ending: RunEnd) -> Run | None:
        """Store the end of a run and free its slot.

        Returns the queued direct call that received the slot, or None; the caller must execute it now.
        """
        with self._lock:
            del self._active[run]
            self._end(run, ending)
            run.pieces.end()
            next_run = self._direct_queue.popleft() if self._direct_queue else None
            if next_run:  # DIRECT-1: in the same step, or dispatcher traffic could take the slot
                self._start(next_run, run.slot)
            else:
                heappush(self._free, run.slot)
            self._evict_ended()
            if not self._active:
                self._idle.notify_all()
        run.done.set()  # last: a thread that waits for it must find the end stored
        return next_run

    def find(self, name: str) -> Run | None:
        """Return the run with this id, or the newest run of the dispatcher's job with this id.

        Returns None if the id is unknown, also if the run was deleted from memory.
        """
        with self._lock:
            self._evict_ended()
            return self._runs_by_id.get(name)

    def add_name(self, run: Run, name: str) -> None:
        """Let a run be found under a further id, as that of a later attempt of its job."""
        with self._lock:
            if name != run.id and name not in run.names:
                run.names.append(name)
            self._runs_by_id[name] = run

    def restore(self, run: Run) -> None:
        """Add a run of an earlier process: one that has ended, or one that may still run and takes a slot."""
        with self._lock:
            for name in (run.id, run.job_id, *run.names):
                self._runs_by_id[name] = run
            if run.key and (run.ending is None or run.ending.state is State.COMPLETED):
                self._runs_by_key[run.key] = run
            if run.ending is None:
                self._start(run, heappop(self._free))
                return
            run.state, run.ended_s = run.ending.state, self._clock()
            self._ended.append(run)
            self._ended_bytes += len(run.ending.result)
        run.pieces.end()
        run.done.set()

    def position(self, run: Run) -> int:
        """Return the position in the direct queue, from 1; 0 if the run does not wait."""
        with self._lock:
            return self._direct_queue.index(run) + 1 if run in self._direct_queue else 0

    def cancel(self, name: str) -> Run | None:
        """Cancel a run and return it; None if the id is unknown.

        A queued run ends at once.  A processing run is only notified: it ends when its function checks for a cancel.
        """
        with self._lock:
            run = self._runs_by_id.get(name)
            if run is None:
                return None
            run.cancel.set()
            if run.state is State.QUEUED:
                self._cancel_queued(run, "canceled while it waited")
        return run

    def health(self) -> Health:
        """Return a consistent snapshot."""
        with self._lock:
            return Health(
                active=len(self._active),
                job_ids=[run.job_id for run in self._active],
                slots=self.slots,
                direct_queue=len(self._direct_queue),
                max_active=self._max_active,
                stopping=self._stopping,
            )

    def close(self) -> None:
        """Start no more runs, and cancel the queued ones.  Processing runs continue."""
        with self._lock:
            self._stopping = True
            for run in list(self._direct_queue):
                self._cancel_queued(run, "the server is stopping")

    def cancel_all(self) -> None:
        """Request a cancel of each processing run."""
        with self._lock:
            for run in self._active:
                run.cancel.set()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no run is processing.  Returns False if one still is after `timeout_s`."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._active, max(0.0, timeout_s))

    # The methods below require that the caller holds the lock.

    def _register(self, call: Call, key: tuple[bool, str] | None) -> Run:
        run_id = self._new_id(call)
        job_id, attempt = (call.job_id, call.attempt) if call.dispatcher else (None, None)
        run = Run(
            run_id,
            job_id or run_id,
            call.payload,
            call.dispatcher,
            attempt,
            key,
            callback=call.callback,
            model=call.model,
        )
        self._runs_by_id[run.job_id] = self._runs_by_id[run_id] = run
        if key:
            self._runs_by_key[key] = run
        return run

    def _new_id(self, call: Call) -> str:
        """Return `<job>.<attempt>`, so that a dispatcher that died before it saved the id can still find the run.

        Returns a random id if the call has no such id, or if an unfinished run already has it.
        """
        attempt_id = _attempt_id(call)
        existing = self._runs_by_id.get(attempt_id) if attempt_id else None
        if attempt_id and (existing is None or existing.ending is not None):
            return attempt_id
        return secrets.token_hex(16)

    def _start(self, run: Run, slot: int) -> None:
        run.slot, run.state = slot, State.PROCESSING
        self._active[run] = None
        self._max_active = max(self._max_active, len(self._active))

    def _cancel_queued(self, run: Run, error: str) -> None:
        """End a run that waits in the direct queue."""
        self._direct_queue.remove(run)
        self._end(run, RunEnd(State.CANCELED, error=error))
        run.done.set()

    def _end(self, run: Run, ending: RunEnd) -> None:
        run.ending, run.state, run.ended_s, run.payload = ending, ending.state, self._clock(), None
        if ending.state is not State.COMPLETED:  # a retry of a failed run must run again
            self._remove_key(run)
        self._ended.append(run)
        self._ended_bytes += len(ending.result)

    def _evict_ended(self) -> None:
        """Delete the oldest ended runs until all limits are met."""
        limits, now = self._retention, self._clock()
        while self._ended and (
            len(self._ended) > limits.runs
            # The newest result stays, however large it is: its caller has yet to request it.
            or (self._ended_bytes > limits.result_bytes and len(self._ended) > 1)
            or now - self._ended[0].ended_s > limits.age_s
        ):
            self._evict(self._ended.popleft())

    def _evict(self, run: Run) -> None:
        assert run.ending is not None
        self._ended_bytes -= len(run.ending.result)
        self._remove_key(run)
        for name in (run.id, run.job_id, *run.names):
            if self._runs_by_id.get(name) is run:  # a newer attempt may have replaced it
                del self._runs_by_id[name]

    def _remove_key(self, run: Run) -> None:
        if run.key and self._runs_by_key.get(run.key) is run:
            del self._runs_by_key[run.key]


def _run_key(call: Call) -> tuple[bool, str] | None:
    """Return the key that identifies the work of a call; None if it has none.

    Without an Idempotency-Key, job and attempt identify the work.  The first item keeps the keys of dispatcher traffic
    and of direct calls apart.
    """
    key = call.key or _attempt_id(call)
    return (call.dispatcher, key) if key else None


def _attempt_id(call: Call) -> str | None:
    """Return `<job>.<attempt>` of dispatcher traffic that has both; otherwise None."""
    if call.dispatcher and call.job_id and call.attempt is not None:
        return f"{call.job_id}.{call.attempt}"
    return None
