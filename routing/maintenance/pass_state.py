"""What a process's sweeps have seen, so that the next reads only what is new."""

import time
from collections import deque
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from routing.dispatch.dispatcher import Dispatcher
from routing.queue.leases import Lease


@dataclass(slots=True)
class Seen:
    """Empty in a new process: it looks at everything once."""

    looks: deque[tuple[float, int]] = field(default_factory=deque)
    """When (monotonic s) the outbox was looked at, and its last event then."""
    events: set[int] = field(default_factory=set)
    """Events after the oldest of these looks whose jobs were brought to the room."""
    scanned: int | None = 0
    """Up to which `seq` all queued jobs were looked at; None: up to the end."""
    rebuilding: set[str] = field(default_factory=set)
    """Fleets whose room is new, and not open yet."""
    filling: dict[str, int] = field(default_factory=dict)
    """Fleets whose room is being filled, up to which `seq`."""
    synced: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Fleet -> version of the catalog that its room got last, and when (monotonic s)."""
    missed: dict[Lease, int] = field(default_factory=dict)
    """Leases of running jobs that Redis did not have at the last look, and since when (ms)."""
    unlisted: dict[str, dict[tuple[str, int], int]] = field(default_factory=dict)
    """Server -> runs (job, attempt) that have an id at it and are not in its reports, and since when (ms)."""
    started: dict[str, tuple[str, int, int | None]] = field(default_factory=dict)
    """Server -> what tells its process from others, when (ms) it was seen last, and when the one before it was."""
    confirmed_running: dict[tuple[str, int], int] = field(default_factory=dict)
    """Runs (job, attempt) whose slots are withheld, and when (ms) their server last told that they go on."""
    doubts: dict[str, "Shortfall"] = field(default_factory=dict)
    """Fleets whose room holds fewer jobs than the record has queued."""
    unstarted: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Jobs whose offer the reaper met: attempts that were begun, and how often it has met one since."""
    counted_at: float = 0.0
    """When (monotonic s) rooms and record may be compared again."""

    def note_unstarted(self, job_id: str, attempt: int) -> int:
        """An offer of this job was not begun in its time; answers how often that was so since its last start."""
        known, times = self.unstarted.get(job_id, (attempt, 0))
        times = times + 1 if known == attempt else 1
        self.unstarted[job_id] = attempt, times
        return times

    def after(self, last_event: int) -> int:
        """After which event to read, if `last_event` is the last there is."""
        if self.looks and last_event < self.looks[-1][1]:  # Another record, or one that was restored.
            self.looks.clear()
            self.events.clear()
            self.scanned = 0
        return self.looks[0][1] if self.looks else last_event

    def note_look(self, last_event: int, late_s: float) -> None:
        """All events so far are dealt with, but for those that become visible late, by `late_s` at most."""
        now = time.monotonic()
        self.looks.append((now, last_event))
        while len(self.looks) > 1 and self.looks[1][0] <= now - late_s:
            self.looks.popleft()
        self.events = {event for event in self.events if event > self.looks[0][1]}


@dataclass(slots=True)
class Shortfall:
    """`looks`: how many in a row found the room short.  `until`: when (monotonic s) it may be filled again for that."""

    looks: int = 0
    until: float = 0.0
    pause_s: float = 0.0


_OF: WeakKeyDictionary[Dispatcher, Seen] = WeakKeyDictionary()


def seen_by(dispatcher: Dispatcher) -> Seen:
    """What the sweeps with this dispatcher have seen."""
    return _OF.setdefault(dispatcher, Seen())
