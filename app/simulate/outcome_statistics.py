"""What an outcome comes to: waits, use of slots, fairness, overtaking.  Waits are seconds, shares are 0 to 1."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from app.simulate.scenario import Job, Outcome

SLICES = 96  # of the window, for what is shown over time: a quarter of an hour each in a day
_ENTITLED_JOBS = 10  # below so many jobs' worth, chance says more about a tenant's share than the policy does


@dataclass(frozen=True, slots=True)
class Waits:
    """How long jobs waited, in seconds.  `never`: how many of them no slot could run; they count in nothing else."""

    jobs: int
    never: int
    mean: float
    p50: float
    p90: float
    p99: float
    longest: float
    overtaken: float
    """The longest time that a job was overtaken by: one accepted so much later started before it."""


@dataclass(frozen=True, slots=True)
class Series:
    """What happened over time: one value for each slice of the window."""

    hours: Sequence[float]
    """Where each slice ends, from the beginning."""
    wait_p50: Sequence[float | None]
    """Of the jobs that arrived in the slice; None: none did."""
    wait_p90: Sequence[float | None]
    use: Sequence[float]
    waiting: Sequence[int]
    """Jobs that wait at the slice's end."""


@dataclass(frozen=True, slots=True)
class Summary:
    """All that is reported about an outcome."""

    name: str
    hours: float
    slots: int
    waits: Waits
    use: float
    """Of the slots' time in the window, outages left out."""
    per_hour: float
    """Jobs that ended in the window."""
    jain: float | None
    """Jain's index of what tenants got over what their weights entitled them to, while they had a backlog; see
    `entitlement`.  None: no two tenants had one at the same time."""
    broken: int
    """Jobs whose run an outage broke off."""
    swaps: int
    """How often a server went on with another model."""
    late: int
    """Jobs that started after their deadline, or never."""
    models: Mapping[str, Waits]
    priorities: Mapping[int, Waits]
    tenants: Mapping[str, Waits]
    """By class: heavy tenants make up half of the demand, light ones its last tenth, medium those between."""
    series: Series

    def data(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)


def summarize(outcome: Outcome) -> Summary:
    """Reckon everything."""
    scenario, jobs = outcome.scenario, outcome.jobs
    window_s = max(scenario.end_ms - scenario.begin_ms, 1) / 1000
    servers = [server for server in scenario.catalog.servers.values() if server.state == "online"]
    slots = sum(server.slots for server in servers)
    overtakings = overtaken(jobs)
    ended = sum(job.end_ms is not None and job.end_ms <= scenario.end_ms for job in jobs)
    served = slot_seconds(jobs, scenario.begin_ms, scenario.end_ms, by=lambda job: "")
    away = sum(
        (min(it.until_ms, scenario.end_ms) - max(it.from_ms, scenario.begin_ms)) / 1000 * server.slots
        for it in scenario.outages
        for server in servers
        if it.server == server.name and it.from_ms < scenario.end_ms and it.until_ms > scenario.begin_ms
    )
    classes = tenant_classes(jobs)
    return Summary(
        scenario.name,
        window_s / 3600,
        slots,
        _waits(jobs, overtakings),
        sum(served.values()) / max(slots * window_s - away, 0.001),
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
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything; None of fewer than two."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if len(found) > 1 and squares else None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in order, with interpolation; 0 of none."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def overtaken(jobs: Sequence[Job]) -> dict[int, float]:
    """Number of a job -> by how many seconds it was overtaken by a later job of its model; only those that were."""
    found: dict[int, float] = {}
    newest: dict[str, int] = {}
    for job in sorted((job for job in jobs if job.start_ms is not None and not job.lost_ms), key=lambda job: job.turn):
        before = newest.get(job.model, job.arrival_ms)
        if before > job.arrival_ms:
            found[job.number] = (before - job.arrival_ms) / 1000
        newest[job.model] = max(before, job.arrival_ms)
    return found


def slot_seconds(
    jobs: Iterable[Job], from_ms: int, until_ms: int, *, by: Callable[[Job], str] = lambda job: job.tenant
) -> dict[str, float]:
    """Seconds of slots' time that runs took between two moments, by tenant or by what `by` says."""
    found: dict[str, float] = defaultdict(float)
    for job in jobs:
        if job.start_ms is not None and job.end_ms is not None:
            found[by(job)] += max(min(job.end_ms, until_ms) - max(job.start_ms, from_ms), 0) / 1000
    return dict(found)


def swaps(jobs: Iterable[Job]) -> int:
    """How often a server started a job of another model than before."""
    loaded: dict[str, str] = {}
    count = 0
    for job in sorted((job for job in jobs if job.start_ms is not None), key=lambda job: (job.start_ms, job.turn)):
        server = job.slot.rsplit("-slot", 1)[0]
        count += loaded.get(server, job.model) != job.model
        loaded[server] = job.model
    return count


def tenant_classes(jobs: Iterable[Job]) -> dict[str, str]:
    """Tenant -> heavy, medium or light, by the slot time that its jobs ask for."""
    demand: dict[str, float] = defaultdict(float)
    for job in jobs:
        demand[job.tenant] += job.end_ms - job.start_ms if job.end_ms and job.start_ms else 1
    total, before, classes = sum(demand.values()), 0.0, {}
    for tenant in sorted(demand, key=lambda tenant: (-demand[tenant], tenant)):
        classes[tenant] = "heavy" if before < total * 0.5 else "medium" if before < total * 0.9 else "light"
        before += demand[tenant]
    return classes


def entitlement(outcome: Outcome) -> dict[tuple[str, str], tuple[float, float]]:
    """(model, tenant) -> slot-seconds that it got, and those that its weight entitled it to, while it had a backlog.

    The window is cut into slices.  In each, those tenants of a model count that had a job waiting all the time;
    what they got together is what they would share by their weights.  Left out are tenants that were entitled to
    less than ten jobs' worth.
    """
    scenario = outcome.scenario
    step = max((scenario.end_ms - scenario.begin_ms) / SLICES, 1)
    by_model: dict[str, list[Job]] = defaultdict(list)
    for job in outcome.jobs:
        by_model[job.model].append(job)
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for model, jobs in by_model.items():
        weights = scenario.catalog.models[model].config.weights
        ran = [job.end_ms - job.start_ms for job in jobs if job.end_ms is not None and job.start_ms is not None]
        least = _ENTITLED_JOBS * sum(ran) / max(len(ran), 1) / 1000
        for tenant, (got, due) in _shared(jobs, scenario.begin_ms, step, weights).items():
            if due > least:
                found[model, tenant] = (got, due)
    return found


def _shared(
    jobs: Sequence[Job], begin_ms: int, step: float, weights: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Tenant -> (got, entitled), of one model's jobs."""
    got_in = _got(jobs, begin_ms, step)
    got: dict[str, float] = defaultdict(float)
    due: dict[str, float] = defaultdict(float)
    backlogged: dict[int, list[str]] = defaultdict(list)
    for tenant, its in _by_tenant(jobs).items():
        for index in _slices_of_backlog(its, begin_ms, step):
            backlogged[index].append(tenant)
    for index, tenants in backlogged.items():
        if len(tenants) < 2:
            continue
        together = sum(got_in[tenant, index] for tenant in tenants)
        share = together / sum(weights.get(tenant, 1.0) for tenant in tenants)
        for tenant in tenants:
            got[tenant] += got_in[tenant, index]
            due[tenant] += share * weights.get(tenant, 1.0)
    return {tenant: (got[tenant], due[tenant]) for tenant in due}


def _got(jobs: Iterable[Job], begin_ms: int, step: float) -> dict[tuple[str, int], float]:
    """(tenant, slice) -> slot-seconds."""
    got: dict[tuple[str, int], float] = defaultdict(float)
    for job in jobs:
        if job.start_ms is None or job.end_ms is None:
            continue
        at = float(job.start_ms - begin_ms)
        end = job.end_ms - begin_ms
        while at < end:
            index = int(at // step)
            until = min((index + 1) * step, end)
            if until <= at:  # The slice's end is the same number: step on.
                index, until = index + 1, min((index + 2) * step, end)
            got[job.tenant, index] += (until - at) / 1000
            at = until
    return got


def _by_tenant(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    found: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        found[job.tenant].append(job)
    return found


def _slices_of_backlog(jobs: Sequence[Job], begin_ms: int, step: float) -> list[int]:
    """The slices in which at least one of these jobs was waiting at every moment."""
    moves = [(job.arrival_ms, 1) for job in jobs] + [(job.start_ms, -1) for job in jobs if job.start_ms is not None]
    # An arrival before a start at the same moment: the backlog does not end there.
    moves.sort(key=lambda move: (move[0], -move[1]))
    found: list[int] = []
    depth, since = 0, 0
    for at, change in moves:
        if depth == 0:
            since = at
        depth += change
        if depth == 0:
            found += range(max(_ceil((since - begin_ms) / step), 0), min(int((at - begin_ms) // step), SLICES))
    if depth:
        found += range(max(_ceil((since - begin_ms) / step), 0), SLICES)
    return found


def _ceil(value: float) -> int:
    return -int(-value // 1)


def _waits(jobs: Sequence[Job], late: Mapping[int, float]) -> Waits:
    waits = sorted(job.wait_ms / 1000 for job in jobs if job.wait_ms is not None)
    return Waits(
        len(jobs),
        len(jobs) - len(waits),
        sum(waits) / max(len(waits), 1),
        percentile(waits, 0.5),
        percentile(waits, 0.9),
        percentile(waits, 0.99),
        waits[-1] if waits else 0.0,
        max((late[job.number] for job in jobs if job.number in late), default=0.0),
    )


def _grouped(jobs: Sequence[Job], late: Mapping[int, float], key: Callable[[Job], Any]) -> dict[Any, Waits]:
    groups: dict[Any, list[Job]] = defaultdict(list)
    for job in jobs:
        groups[key(job)].append(job)
    return {name: _waits(groups[name], late) for name in sorted(groups)}


def _series(outcome: Outcome, slots: int) -> Series:
    scenario = outcome.scenario
    step = max((scenario.end_ms - scenario.begin_ms) / SLICES, 1)
    arrived: dict[int, list[float]] = defaultdict(list)
    for job in outcome.jobs:
        if job.wait_ms is not None:
            arrived[min(int((job.arrival_ms - scenario.begin_ms) // step), SLICES - 1)].append(job.wait_ms / 1000)
    busy: dict[int, float] = defaultdict(float)
    for (_, index), got in _got(outcome.jobs, scenario.begin_ms, step).items():
        busy[index] += got
    ordered = [sorted(arrived[n]) for n in range(SLICES)]
    ends = [scenario.begin_ms + (n + 1) * step for n in range(SLICES)]
    came = sorted(job.arrival_ms for job in outcome.jobs)
    began = sorted(job.start_ms for job in outcome.jobs if job.start_ms is not None)
    return Series(
        [(end - scenario.begin_ms) / 3_600_000 for end in ends],
        [percentile(waits, 0.5) if waits else None for waits in ordered],
        [percentile(waits, 0.9) if waits else None for waits in ordered],
        [busy[n] / max(slots * step / 1000, 0.001) for n in range(SLICES)],
        [bisect_right(came, end) - bisect_right(began, end) for end in ends],
    )


def distribution(jobs: Iterable[Job], at_s: Sequence[float]) -> list[float]:
    """The share of jobs that waited no longer than each of these."""
    waits = sorted(job.wait_ms / 1000 for job in jobs if job.wait_ms is not None)
    return [bisect_right(waits, limit) / max(len(waits), 1) for limit in at_s]


def doubling(upto_s: float) -> list[float]:
    """Waits at which a distribution is looked at: 0, then from 0.1 s on, eight to each doubling."""
    steps = [0.0, *accumulate([0.1] + [2 ** (1 / 8)] * 400, lambda a, b: a * b)]
    return [step for step in steps if step < upto_s] + [max(upto_s, 0.1)]
