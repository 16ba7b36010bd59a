"""What a maintenance process remembers from one pass to the next; empty in a new process."""

import time
from collections import deque
from dataclasses import dataclass, field

from routing.queue.leases import Lease


@dataclass(slots=True)
class Shortfall:
    """A fleet whose queue in Redis has fewer jobs than the database.

    `passes`: how many in a row found it so.  `until`: when (monotonic s) it may be filled again because of that.
    """

    passes: int = 0
    until: float = 0.0
    pause_s: float = 0.0


@dataclass(slots=True)
class SweepState:
    """State of a Sweeper."""

    has_begun: bool = False
    """Whether the fleets with queued jobs were put into `filling`, once in the life of a process."""
    reads: deque[tuple[float, int]] = field(default_factory=deque)
    """When (monotonic s) the outbox was read, and its last event then."""
    events: set[int] = field(default_factory=set)
    """Events after the oldest of these reads whose jobs were enqueued."""
    rebuilding: dict[str, int] = field(default_factory=dict)
    """Fleets whose rebuild has begun, and whose queue is not open yet; and the epoch of the filling."""
    stale: dict[str, int] = field(default_factory=dict)
    """Fleets whose queue had an older epoch than the database at the last sweep, and that epoch."""
    filling: dict[str, int] = field(default_factory=dict)
    """Fleets whose queue is being filled, and up to which `seq`."""
    synced: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    """Fleet -> version of the catalog that it got last, when (monotonic s), and when all its slots were looked at."""
    shortfalls: dict[str, Shortfall] = field(default_factory=dict)
    counted_at: float = 0.0
    """When (monotonic s) Redis and the database may be compared again."""

    def read_after(self, last_event: int) -> int:
        """Return the event after which to read, if `last_event` is the last one."""
        if self.reads and last_event < self.reads[-1][1]:  # Another database, or one that was restored.
            self.reads.clear()
            self.events.clear()
            self.has_begun = False
        return self.reads[0][1] if self.reads else last_event

    def note_read(self, last_event: int, late_s: float) -> None:
        """Note that all events so far were handled, except those that become visible up to `late_s` late."""
        now = time.monotonic()
        self.reads.append((now, last_event))
        while len(self.reads) > 1 and self.reads[1][0] <= now - late_s:
            self.reads.popleft()
        self.events = {event for event in self.events if event > self.reads[0][1]}


@dataclass(slots=True)
class ReaperState:
    """State of a Reaper and of MissingLeases."""

    unstarted: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Queued jobs whose offers were not started: their attempts so far, and how many offers since."""
    missing: dict[Lease, int] = field(default_factory=dict)
    """Leases of running jobs that Redis did not have at the last pass, and since when (ms)."""

    def note_unstarted(self, job_id: str, attempt: int) -> int:
        """Note that an offer of this job was not started in time; return how many since its last start."""
        known, times = self.unstarted.get(job_id, (attempt, 0))
        times = times + 1 if known == attempt else 1
        self.unstarted[job_id] = attempt, times
        return times


@dataclass(slots=True)
class ReportState:
    """State of ServerChecks."""

    unlisted: dict[str, dict[tuple[str, int], int]] = field(default_factory=dict)
    """Server -> runs (job, attempt) that have an id there and are not in its reports, and since when (ms)."""
    processes: dict[str, tuple[str, int, int | None]] = field(default_factory=dict)
    """Server -> what distinguishes its process, when (ms) that was seen last, and when the one before it was."""
    confirmed_running: dict[tuple[str, int], int] = field(default_factory=dict)
    """Runs (job, attempt) with a quarantined slot, and when (ms) their server last said that they continue."""
