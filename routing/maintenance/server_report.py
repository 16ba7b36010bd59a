"""What a server says it runs, held against the leases that we hold on it.

match         both know the job
stale lease   we hold a lease, the server does not know the job: free it, unless it is too young to be known
unknown run   the server runs what no lease of ours covers: a job of ours whose lease is gone, whose slot stays counted
              as taken; or what is not ours (direct traffic): so many fewer slots can be offered
silence       the server did not say: nothing is freed
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

# A lease younger than this may precede the server's own count of the job.
MIN_AGE_MS = 5_000


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What a server says of itself.  None: it did not say.  `asked_ms`: when it was asked; None: just now.

    `endpoints`: its address for each model when it was asked; None: as it is registered now.
    """

    up: bool
    active_jobs: int | None = None  # running ones
    job_ids: frozenset[str] | None = None
    asked_ms: int | None = None
    endpoints: Mapping[str, str] | None = None
    connection_refused: bool = False  # nothing listens at its address: the process that ran there has ended
    process_started: str | None = None  # another value than before: another process
    is_idle: bool = False  # a place is free there; of a server with one slot: nothing runs there

    @property
    def shows_runs(self) -> bool:
        return self.up and (self.active_jobs is not None or self.job_ids is not None)


@dataclass(frozen=True, slots=True)
class ExpectedRun:
    """A lease as the comparison needs it.  `names`: what the server may call the job."""

    job_id: str
    names: frozenset[str]
    age_ms: int


def report_time_ms(report: ServerReport, now_ms: int) -> int:
    """When the server was asked; as good as now, if nobody says."""
    return now_ms if report.asked_ms is None else report.asked_ms


def run_names(job_id: str, attempt: int, remote_id: str | None) -> frozenset[str]:
    """What a server may call a run."""
    return frozenset({job_id, f"{job_id}-{attempt}", f"{job_id}.{attempt}", remote_id or job_id})


@dataclass(frozen=True, slots=True)
class Comparison:
    """`unknown_runs`: ids that the server runs and no lease of ours covers; `uncounted`: how many runs are so."""

    stale: tuple[str, ...] = ()
    unknown_runs: tuple[str, ...] = ()
    unaccounted: int = 0


def compare_runs(leases: Collection[ExpectedRun], report: ServerReport) -> Comparison:
    """The five cases.  On silence everything is empty: nothing is freed, nothing is withheld."""
    if not report.up:
        return Comparison()
    if report.job_ids is not None:
        return _by_ids(leases, report.job_ids)
    if report.active_jobs is None:
        return Comparison()
    return _by_count(leases, report.active_jobs)


def _by_ids(leases: Collection[ExpectedRun], running: frozenset[str]) -> Comparison:
    ours = frozenset[str]().union(*(lease.names for lease in leases))
    stale = tuple(lease.job_id for lease in leases if not lease.names & running and lease.age_ms >= MIN_AGE_MS)
    unknown_runs = tuple(sorted(running - ours))
    return Comparison(stale, unknown_runs, len(unknown_runs))


def _by_count(leases: Collection[ExpectedRun], active: int) -> Comparison:
    """A count tells who runs only when it is zero."""
    stale = tuple(lease.job_id for lease in leases if active == 0 and lease.age_ms >= MIN_AGE_MS)
    return Comparison(stale, (), max(0, active - len(leases)))
