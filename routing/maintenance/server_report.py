"""A server's report of its runs, compared with the leases on it.  Pure.

match         both have the job
stale lease   we hold a lease, and the server does not have the job: free it, unless the lease is too young
unknown run   the server runs something without a lease: a job whose lease was lost and whose slot stays taken,
              or the work of others: so many fewer slots can be offered
silence       the server does not say: nothing is freed
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from slotkeeper.clock import clock

MIN_AGE_MS = 5_000
"""A lease that is younger may precede the server's own count of the job."""


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What a server reports.  None: it does not say.  `asked_ms`: when it was asked; None: just now.

    `up`: whether it is well; a server without a health check does not say, which ends no cooldown.
    `endpoints`: its address for each model when it was asked; None: as it is registered now.
    """

    up: bool | None
    active_jobs: int | None = None
    job_ids: frozenset[str] | None = None
    asked_ms: int | None = None
    endpoints: Mapping[str, str] | None = None
    connection_refused: bool = False  # no process listens at its address: the one that ran there has ended
    process_started: str | None = None  # another value than before means another process
    why_down: str = ""  # what it says is wrong; "": it did not answer
    is_silent: bool = False  # it accepted the connection, and did not answer its health check in time
    is_idle: bool = False  # it has a free place; a server with one slot runs nothing
    clock_offset_ms: int | None = field(default_factory=lambda: clock.offset_ms, compare=False)  # of `asked_ms`

    @property
    def shows_runs(self) -> bool:
        """Whether it says which runs it has, or how many."""
        return bool(self.up) and (self.active_jobs is not None or self.job_ids is not None)


@dataclass(frozen=True, slots=True)
class ExpectedRun:
    """A lease to be compared.  `names`: what the server may call the run."""

    job_id: str
    names: frozenset[str]
    age_ms: int


def report_time_ms(report: ServerReport, now_ms: int) -> int:
    """Return when the server was asked; now, if that is unknown."""
    return now_ms if report.asked_ms is None else report.asked_ms + clock.moved_since(report.clock_offset_ms)


def run_names(job_id: str, attempt: int, remote_id: str | None) -> frozenset[str]:
    """Return what a server may call a run."""
    return frozenset({job_id, f"{job_id}-{attempt}", f"{job_id}.{attempt}", remote_id or job_id})


@dataclass(frozen=True, slots=True)
class Comparison:
    """`unknown_runs`: ids that the server runs without a lease; `unaccounted`: how many such runs."""

    stale: tuple[str, ...] = ()
    unknown_runs: tuple[str, ...] = ()
    unaccounted: int = 0


def compare_runs(leases: Collection[ExpectedRun], report: ServerReport) -> Comparison:
    """Compare leases with a report.  If the server does not say what it runs, the result is empty."""
    if not report.up:
        return Comparison()
    if report.job_ids is not None:
        return _compare_ids(leases, report.job_ids)
    if report.active_jobs is None:
        return Comparison()
    return _compare_count(leases, report.active_jobs)


def _compare_ids(leases: Collection[ExpectedRun], running: frozenset[str]) -> Comparison:
    ours = frozenset[str]().union(*(lease.names for lease in leases))
    stale = tuple(lease.job_id for lease in leases if not lease.names & running and lease.age_ms >= MIN_AGE_MS)
    unknown_runs = tuple(sorted(running - ours))
    return Comparison(stale, unknown_runs, len(unknown_runs))


def _compare_count(leases: Collection[ExpectedRun], active: int) -> Comparison:
    """A count shows that a lease is stale only if it is zero."""
    stale = tuple(lease.job_id for lease in leases if active == 0 and lease.age_ms >= MIN_AGE_MS)
    return Comparison(stale, (), max(0, active - len(leases)))
