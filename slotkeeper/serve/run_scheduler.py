"""Who may run now: slots, the direct queue, runs, and recent results.  No HTTP, no calling of functions.

Every decision is one step under one lock, so these hold at every moment:

SLOT-1   the runs that are processing never exceed the slots, and no two of them have the same slot number
DIRECT-1 dispatcher traffic gets a slot only when no direct call waits
DIRECT-2 the direct queue never exceeds its bound
IDEM-1   of two calls with one Idempotency-Key at most one runs, and a completed one is not run again
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
    """Where a run is; the words that `/status` uses."""

    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"


@dataclass(frozen=True, slots=True)
class Callback:
    """Where the end of a run is pushed to, and the bearer token that the receiver wants."""

    url: str
    token: str


@dataclass(frozen=True, slots=True)
class Call:
    """One request to run, as it came in."""

    payload: Any
    dispatcher: bool = False
    job_id: str | None = None  # the dispatcher's own id of the job; of a direct call it is not believed
    attempt: int | None = None
    key: str | None = None  # Idempotency-Key
    callback: Callback | None = None


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended.  `result` is JSON text, so that nobody can change what is remembered."""

    state: State
    result: bytes = b""
    error: str = ""
    retryable: bool = False


@dataclass(slots=True, eq=False)
class Run:
    """One run of the function: waiting, under way, or ended.  Only the engine writes to it."""

    id: str
    job_id: str  # the dispatcher's id when it gave one, else the same as `id`
    payload: Any  # dropped at the end
    dispatcher: bool
    attempt: int | None  # the dispatcher's count of starts
    key: tuple[bool, str] | None
    state: State = State.QUEUED
    slot: int = -1  # 0 … slots - 1 from the start on; -1: never started
    ending: RunEnd | None = None
    ended_s: float = 0.0  # the engine's clock
    callback: Callback | None = None
    pieces: RunProgress = field(default_factory=RunProgress)
    cancel: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Started:
    """The run has a slot; whoever asked must now have it run, and call `finish`."""

    run: Run


@dataclass(frozen=True, slots=True)
class AlreadyKnown:
    """The same Idempotency-Key is waiting, processing or completed: this is that run."""

    run: Run


@dataclass(frozen=True, slots=True)
class Queued:
    """A direct call waits; `position` 1 is next."""

    run: Run
    position: int


@dataclass(frozen=True, slots=True)
class Busy:
    """No slot for dispatcher traffic now: route it elsewhere, nothing has failed."""


@dataclass(frozen=True, slots=True)
class QueueFull:
    """No room for another direct call."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The server is shutting down and starts nothing."""


Decision = Started | AlreadyKnown | Queued | Busy | QueueFull | Stopping


@dataclass(frozen=True, slots=True)
class Health:
    """What runs at one moment.  `job_ids` has exactly the runs that `active` counts."""

    active: int
    job_ids: list[str]
    slots: int
    direct_queue: int
    max_active: int
    stopping: bool


@dataclass(frozen=True, slots=True)
class ResultRetention:
    """How much of what has ended is kept; whichever bound is met first counts."""

    runs: int = 1000
    age_s: float = 3600.0
    result_bytes: int = 256 << 20  # results may be images: a count alone bounds no memory

    def __post_init__(self) -> None:
        if self.runs < 1 or self.age_s <= 0 or self.result_bytes < 0:
            raise ValueError("at least one run must be remembered, for more than no time")


class RunScheduler:
    """Slots and what competes for them.  Every method may be called from any thread and never waits for a run."""

    def __init__(
        self,
        slots: int,
        max_direct_queue: int = 10,
        memory: ResultRetention | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = slots
        self._max_direct_queue = max_direct_queue
        self._memory = memory or ResultRetention()
        self._clock = clock
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._free = list(range(slots))
        heapify(self._free)
        self._active: dict[Run, None] = {}  # in the order of their starts
        self._direct: deque[Run] = deque()
        self._names: dict[str, Run] = {}  # by own id and by the dispatcher's; live and remembered
        self._keys: dict[tuple[bool, str], Run] = {}  # live and completed
        self._ended: deque[Run] = deque()  # oldest first
        self._ended_bytes = 0
        self._max_active = 0
        self._stopping = False

    def submit(self, call: Call) -> Decision:
        """Decide about a call, in one step."""
        key = _key_of(call)
        with self._lock:
            self._forget_old()
            known = self._keys.get(key) if key else None
            if known is not None:  # IDEM-1: before any look at slots, a repeated call must not be told "busy"
                known.callback = call.callback or known.callback  # the newest caller is the one who still listens
                return AlreadyKnown(known)
            if self._stopping:
                return Stopping()
            if call.dispatcher and (self._direct or not self._free):  # DIRECT-1, SLOT-1
                return Busy()
            if not call.dispatcher and (self._direct or not self._free):
                if len(self._direct) >= self._max_direct_queue:  # DIRECT-2
                    return QueueFull()
                run = self._admit(call, key)
                self._direct.append(run)
                return Queued(run, len(self._direct))
            run = self._admit(call, key)
            self._start(run, heappop(self._free))
            return Started(run)

    def finish(self, run: Run, ending: RunEnd) -> Run | None:
        """Note the end, free the slot; returns the direct call that has taken it over, to be run now.

        What is to be remembered is stored before anybody can see the end.
        """
        with self._lock:
            del self._active[run]
            self._end(run, ending)
            run.pieces.end()
            next_run = self._direct.popleft() if self._direct else None
            if next_run:  # DIRECT-1: in the same step, or dispatcher traffic could slip in between
                self._start(next_run, run.slot)
            else:
                heappush(self._free, run.slot)
            self._forget_old()
            if not self._active:
                self._idle.notify_all()
        run.done.set()
        return next_run

    def find(self, name: str) -> Run | None:
        """The run of that id, or the newest run of the dispatcher's job of that id; None: not known (any more)."""
        with self._lock:
            self._forget_old()
            return self._names.get(name)

    def position(self, run: Run) -> int:
        """Place in the direct queue, 1 is next; 0: not in it."""
        with self._lock:
            return self._direct.index(run) + 1 if run in self._direct else 0

    def cancel(self, name: str) -> Run | None:
        """Ask for the end of a run: one that waits is dropped at once, one under way only learns of it."""
        with self._lock:
            run = self._names.get(name)
            if run is None:
                return None
            run.cancel.set()
            if run.state is State.QUEUED:
                self._drop(run, "canceled while it waited")
        return run

    def health(self) -> Health:
        with self._lock:
            return Health(
                active=len(self._active),
                job_ids=[run.job_id for run in self._active],
                slots=self.slots,
                direct_queue=len(self._direct),
                max_active=self._max_active,
                stopping=self._stopping,
            )

    def close(self) -> None:
        """Start nothing more; what waits is dropped, what is under way goes on."""
        with self._lock:
            self._stopping = True
            for run in list(self._direct):
                self._drop(run, "the server is stopping")

    def cancel_all(self) -> None:
        """Ask every run under way to end."""
        with self._lock:
            for run in self._active:
                run.cancel.set()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs; False when it still does after `timeout_s`."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._active, max(0.0, timeout_s))

    # What follows is called with the lock held.

    def _admit(self, call: Call, key: tuple[bool, str] | None) -> Run:
        run_id = self._new_id(call)
        named, attempt = (call.job_id, call.attempt) if call.dispatcher else (None, None)
        run = Run(run_id, named or run_id, call.payload, call.dispatcher, attempt, key, callback=call.callback)
        self._names[run.job_id] = self._names[run_id] = run
        if key:
            self._keys[key] = run
        return run

    def _new_id(self, call: Call) -> str:
        """The attempt's id, so that a dispatcher that died before it saved our answer can still find the run."""
        wanted = _attempt_id(call)
        holder = self._names.get(wanted) if wanted else None
        if wanted and (holder is None or holder.ending is not None):
            return wanted
        return secrets.token_hex(16)

    def _start(self, run: Run, slot: int) -> None:
        run.slot, run.state = slot, State.PROCESSING
        self._active[run] = None
        self._max_active = max(self._max_active, len(self._active))

    def _drop(self, run: Run, error: str) -> None:
        self._direct.remove(run)
        self._end(run, RunEnd(State.CANCELED, error=error))
        run.done.set()

    def _end(self, run: Run, ending: RunEnd) -> None:
        run.ending, run.state, run.ended_s, run.payload = ending, ending.state, self._clock(), None
        if ending.state is not State.COMPLETED:  # a failed run is not remembered by its key: a retry runs again
            self._unkey(run)
        self._ended.append(run)
        self._ended_bytes += len(ending.result)

    def _forget_old(self) -> None:
        kept, now = self._memory, self._clock()
        while self._ended and (
            len(self._ended) > kept.runs
            or (
                self._ended_bytes > kept.result_bytes and len(self._ended) > 1
            )  # the newest must be there to be fetched
            or now - self._ended[0].ended_s > kept.age_s
        ):
            self._forget(self._ended.popleft())

    def _forget(self, run: Run) -> None:
        assert run.ending is not None
        self._ended_bytes -= len(run.ending.result)
        self._unkey(run)
        for name in (run.id, run.job_id):
            if self._names.get(name) is run:  # a newer attempt may bear the name by now
                del self._names[name]

    def _unkey(self, run: Run) -> None:
        if run.key and self._keys.get(run.key) is run:
            del self._keys[run.key]


def _key_of(call: Call) -> tuple[bool, str] | None:
    """Dispatcher and direct callers cannot meet under one key; an attempt's id is a key where none was sent."""
    key = call.key or _attempt_id(call)
    return (call.dispatcher, key) if key else None


def _attempt_id(call: Call) -> str | None:
    if call.dispatcher and call.job_id and call.attempt is not None:
        return f"{call.job_id}.{call.attempt}"
    return None
