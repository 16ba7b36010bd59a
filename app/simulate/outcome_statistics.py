"""Statistics of an outcome: waits, use of slots, fairness, overtaking.  Waits are in seconds, shares from 0 to 1."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.simulate.scenario import Job, Outcome

SLICES = 96  # of the window, for time series; 15 minutes each if the window is a day
_MIN_ENTITLED_JOBS = 10  # below so many jobs, a tenant's share is mostly random


@dataclass(frozen=True, slots=True)
class Waits:
    """How long jobs waited, in seconds.  `never`: jobs that no slot could run; the times leave them out."""

    jobs: int
    never: int
    mean: float
    p50: float
    p90: float
    p99: float
    longest: float
    overtaken: float
    """The largest difference of acceptance between a job and a later one that started before it."""


@dataclass(frozen=True, slots=True)
class Series:
    """Time series: one value for each slice of the window."""

    hours: Sequence[float]
    """End of each slice, in hours from the start."""
    wait_p50: Sequence[float | None]
    """Median wait of the jobs that arrived in the slice; None: no job arrived."""
    wait_p90: Sequence[float | None]
    use: Sequence[float]
    waiting: Sequence[int]
    """Waiting jobs at the end of the slice."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The statistics of an outcome."""

    name: str
    hours: float
    slots: int
    waits: Waits
    use: float
    """Share of the slot time in the window that runs used, without outages."""
    per_hour: float
    """Jobs that ended in the window, per hour."""
    jain: float | None
    """Jain's index of the ratio of slot time received to slot time entitled, of tenants with a backlog; see
    `entitlement`.  None: no two tenants had a backlog at the same time."""
    broken: int
    """Jobs with a run that an outage ended."""
    swaps: int
    """How many times a server changed its model."""
    late: int
    """Jobs that started after their deadline, or never."""
    models: Mapping[str, Waits]
    priorities: Mapping[int, Waits]
    tenants: Mapping[str, Waits]
    """By class: heavy tenants cause the first half of the demand, light ones the last tenth, medium ones the rest."""
    series: Series

    def data(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)


def summarize(outcome: Outcome) -> Summary:
    """Compute the statistics of an outcome."""
    scenario, jobs = outcome.scenario, outcome.jobs
    window_s = max(scenario.end_ms - scenario.begin_ms, 1) / 1000
    servers = [server for server in scenario.catalog.servers.values() if server.state == "online"]
    slots = sum(server.slots for server in servers)
    overtakings = overtaken(jobs)
    ended = sum(job.end_ms is not None and job.end_ms <= scenario.end_ms for job in jobs)
    served = slot_seconds(jobs, scenario.begin_ms, scenario.end_ms, by=lambda job: "")
    outage_s = sum(
        (min(outage.until_ms, scenario.end_ms) - max(outage.from_ms, scenario.begin_ms)) / 1000 * server.slots
        for outage in scenario.outages
        for server in servers
        if outage.server == server.name and outage.from_ms < scenario.end_ms and outage.until_ms > scenario.begin_ms
    )
    classes = tenant_classes(jobs)
    return Summary(
        scenario.name,
        window_s / 3600,
        slots,
        _waits(jobs, overtakings),
        sum(served.values()) / max(slots * window_s - outage_s, 0.001),
        ended / window_s * 3600,
        jain([got / due for got, due in entitlement(outcome).values()]),
        sum(job.lost_ms > 0 for job in jobs),
        swaps(jobs),
        sum(job.is_late for job in jobs),
        _grouped(jobs, overtakings, lambda job: job.model),
        _grouped(jobs, overtakings, lambda job: job.priority),
        _grouped(jobs, overtakings, lambda job: classes[job.tenant]),
        _series(outcome, slots),
    )


def jain(values: Iterable[float]) -> float | None:
    """Return Jain's index of fairness: 1 if all values are equal, 1/n if one has everything; None: fewer than two."""
    numbers = list(values)
    squares = sum(value * value for value in numbers)
    return sum(numbers) ** 2 / (len(numbers) * squares) if len(numbers) > 1 and squares else None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values, with linear interpolation; 0 if there are no values."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def overtaken(jobs: Sequence[Job]) -> dict[int, float]:
    """Return job number -> the largest number of seconds after which a job was accepted that overtook it.

    A job overtakes another of the same model if it is accepted later and starts earlier.  Only overtaken jobs are
    included.
    """
    seconds: dict[int, float] = {}
    newest: dict[str, int] = {}
    for job in sorted((job for job in jobs if job.start_ms is not None and not job.lost_ms), key=lambda job: job.turn):
        newest_ms = newest.get(job.model, job.arrival_ms)
        if newest_ms > job.arrival_ms:
            seconds[job.number] = (newest_ms - job.arrival_ms) / 1000
        newest[job.model] = max(newest_ms, job.arrival_ms)
    return seconds


def slot_seconds(
    jobs: Iterable[Job], from_ms: int, until_ms: int, *, by: Callable[[Job], str] = lambda job: job.tenant
) -> dict[str, float]:
    """Return the slot time, in seconds, that runs used between two times; by tenant, or by the result of `by`."""
    used_s: dict[str, float] = defaultdict(float)
    for job in jobs:
        if job.start_ms is not None and job.end_ms is not None:
            used_s[by(job)] += max(min(job.end_ms, until_ms) - max(job.start_ms, from_ms), 0) / 1000
    return dict(used_s)


def swaps(jobs: Iterable[Job]) -> int:
    """Return how many times a server started a job of a model other than that of its previous run."""
    loaded: dict[str, str] = {}
    count = 0
    for job in sorted((job for job in jobs if job.start_ms is not None), key=lambda job: (job.start_ms, job.turn)):
        server = job.slot.rsplit("-slot", 1)[0]
        count += loaded.get(server, job.model) != job.model
        loaded[server] = job.model
    return count


def tenant_classes(jobs: Iterable[Job]) -> dict[str, str]:
    """Return tenant -> "heavy", "medium" or "light", by the slot time of its jobs."""
    demand: dict[str, float] = defaultdict(float)
    for job in jobs:
        demand[job.tenant] += job.end_ms - job.start_ms if job.end_ms and job.start_ms else 1
    total, before, classes = sum(demand.values()), 0.0, {}
    for tenant in sorted(demand, key=lambda tenant: (-demand[tenant], tenant)):
        classes[tenant] = "heavy" if before < total * 0.5 else "medium" if before < total * 0.9 else "light"
        before += demand[tenant]
    return classes


def entitlement(outcome: Outcome) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (model, tenant) -> (received, entitled) slot-seconds, while the tenant had a backlog.

    The window is divided into slices.  In each slice, only tenants of a model with a waiting job at every moment count.
    The slot time that they received together is divided by their weights.  Tenants that were entitled to less than the
    time of ten jobs are left out.
    """
    scenario = outcome.scenario
    slice_ms = max((scenario.end_ms - scenario.begin_ms) / SLICES, 1)
    by_model: dict[str, list[Job]] = defaultdict(list)
    for job in outcome.jobs:
        by_model[job.model].append(job)
    entitlements: dict[tuple[str, str], tuple[float, float]] = {}
    for model, jobs in by_model.items():
        weights = scenario.catalog.models[model].config.weights
        run_times_ms = [
            job.end_ms - job.start_ms for job in jobs if job.end_ms is not None and job.start_ms is not None
        ]
        min_due_s = _MIN_ENTITLED_JOBS * sum(run_times_ms) / max(len(run_times_ms), 1) / 1000
        for tenant, (got, due) in _entitlement_of_model(jobs, scenario.begin_ms, slice_ms, weights).items():
            if due > min_due_s:
                entitlements[model, tenant] = (got, due)
    return entitlements


def _entitlement_of_model(
    jobs: Sequence[Job], begin_ms: int, slice_ms: float, weights: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Return tenant -> (received, entitled) slot-seconds, for the jobs of one model."""
    got_in = _received(jobs, begin_ms, slice_ms)
    got: dict[str, float] = defaultdict(float)
    due: dict[str, float] = defaultdict(float)
    backlogged: dict[int, list[str]] = defaultdict(list)
    for tenant, tenant_jobs in _by_tenant(jobs).items():
        for index in _slices_of_backlog(tenant_jobs, begin_ms, slice_ms):
            backlogged[index].append(tenant)
    for index, tenants in backlogged.items():
        if len(tenants) < 2:
            continue
        total = sum(got_in[tenant, index] for tenant in tenants)
        share = total / sum(weights.get(tenant, 1.0) for tenant in tenants)
        for tenant in tenants:
            got[tenant] += got_in[tenant, index]
            due[tenant] += share * weights.get(tenant, 1.0)
    return {tenant: (got[tenant], due[tenant]) for tenant in due}


def _received(jobs: Iterable[Job], begin_ms: int, slice_ms: float) -> dict[tuple[str, int], float]:
    """Return (tenant, index of slice) -> slot-seconds received.  `slice_ms`: length of a slice."""
    got: dict[tuple[str, int], float] = defaultdict(float)
    for job in jobs:
        if job.start_ms is None or job.end_ms is None:
            continue
        at_ms = float(job.start_ms - begin_ms)
        end_ms = job.end_ms - begin_ms
        while at_ms < end_ms:
            index = int(at_ms // slice_ms)
            until_ms = min((index + 1) * slice_ms, end_ms)
            if until_ms <= at_ms:  # Floating point: the end of the slice equals the current time.
                index, until_ms = index + 1, min((index + 2) * slice_ms, end_ms)
            got[job.tenant, index] += (until_ms - at_ms) / 1000
            at_ms = until_ms
    return got


def _by_tenant(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    jobs_by_tenant: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        jobs_by_tenant[job.tenant].append(job)
    return jobs_by_tenant


def _slices_of_backlog(jobs: Sequence[Job], begin_ms: int, slice_ms: float) -> list[int]:
    """Return the indexes of the slices in which at least one of these jobs was waiting at every moment."""
    moves = [(job.arrival_ms, 1) for job in jobs] + [(job.start_ms, -1) for job in jobs if job.start_ms is not None]
    # At the same time, arrivals come before starts, so that the backlog does not end.
    moves.sort(key=lambda move: (move[0], -move[1]))
    slices: list[int] = []
    depth, since = 0, 0
    for at, change in moves:
        if depth == 0:
            since = at
        depth += change
        if depth == 0:
            slices += range(max(_ceil((since - begin_ms) / slice_ms), 0), min(int((at - begin_ms) // slice_ms), SLICES))
    if depth:
        slices += range(max(_ceil((since - begin_ms) / slice_ms), 0), SLICES)
    return slices


def _ceil(value: float) -> int:
    return -int(-value // 1)


def _waits(jobs: Sequence[Job], overtakings: Mapping[int, float]) -> Waits:
    waits = sorted(job.wait_ms / 1000 for job in jobs if job.wait_ms is not None)
    return Waits(
        len(jobs),
        len(jobs) - len(waits),
        sum(waits) / max(len(waits), 1),
        percentile(waits, 0.5),
        percentile(waits, 0.9),
        percentile(waits, 0.99),
        waits[-1] if waits else 0.0,
        max((overtakings[job.number] for job in jobs if job.number in overtakings), default=0.0),
    )


def _grouped(jobs: Sequence[Job], overtakings: Mapping[int, float], key: Callable[[Job], Any]) -> dict[Any, Waits]:
    groups: dict[Any, list[Job]] = defaultdict(list)
    for job in jobs:
        groups[key(job)].append(job)
    return {name: _waits(groups[name], overtakings) for name in sorted(groups)}


def _series(outcome: Outcome, slots: int) -> Series:
    scenario = outcome.scenario
    slice_ms = max((scenario.end_ms - scenario.begin_ms) / SLICES, 1)
    arrived: dict[int, list[float]] = defaultdict(list)
    for job in outcome.jobs:
        if job.wait_ms is not None:
            arrived[min(int((job.arrival_ms - scenario.begin_ms) // slice_ms), SLICES - 1)].append(job.wait_ms / 1000)
    busy: dict[int, float] = defaultdict(float)
    for (_, index), got in _received(outcome.jobs, scenario.begin_ms, slice_ms).items():
        busy[index] += got
    ordered = [sorted(arrived[n]) for n in range(SLICES)]
    ends = [scenario.begin_ms + (n + 1) * slice_ms for n in range(SLICES)]
    arrivals = sorted(job.arrival_ms for job in outcome.jobs)
    starts = sorted(job.start_ms for job in outcome.jobs if job.start_ms is not None)
    return Series(
        [(end - scenario.begin_ms) / 3_600_000 for end in ends],
        [percentile(waits, 0.5) if waits else None for waits in ordered],
        [percentile(waits, 0.9) if waits else None for waits in ordered],
        [busy[n] / max(slots * slice_ms / 1000, 0.001) for n in range(SLICES)],
        [bisect_right(arrivals, end) - bisect_right(starts, end) for end in ends],
    )


def distribution(jobs: Iterable[Job], at_s: Sequence[float]) -> list[float]:
    """Return, for each of these times, the share of jobs that waited no longer."""
    waits = sorted(job.wait_ms / 1000 for job in jobs if job.wait_ms is not None)
    return [bisect_right(waits, limit) / max(len(waits), 1) for limit in at_s]
