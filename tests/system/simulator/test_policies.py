"""The bounds that the policies promise, over simulated schedules."""

import random
from collections.abc import Callable, Sequence

import pytest

from app.simulate import Arrival, Job, Scenario, jain, summarize
from app.simulate.outcome_statistics import percentile, slot_seconds
from tests.app.simulate.scenarios import SECOND, T0, a_catalog, a_scenario, at, poisson


def bursty(seed: int, jobs: int, span_s: float, priorities: int = 9) -> list[Arrival]:
    """Arrivals in bursts, quiet times between them, run times from moments to minutes."""
    chance = random.Random(seed)
    bursts = [chance.uniform(0, span_s) for _ in range(max(jobs // 50, 1))]
    times = sorted(chance.choice(bursts) + chance.expovariate(1 / 20) for _ in range(jobs))
    return [at(time, chance.lognormvariate(1, 1.2) + 0.001, priority=chance.randint(1, priorities)) for time in times]


# -- aging -----------------------------------------------------------------------------------------------------


def worst_overtaking_ms(jobs: Sequence[Job], step_ms: int) -> float:
    """By how much the bound of `aging` is missed at worst, ms; below 0: it is kept.

    The bound: a job of priority t is not overtaken by one of priority u that was accepted more than (t - u)
    steps later.
    """
    worst = float("-inf")
    before: list[Job] = []
    for job in sorted(jobs, key=lambda job: job.turn):
        for other in before:
            if other.start_ms >= job.arrival_ms:
                worst = max(worst, other.arrival_ms - job.arrival_ms - (job.priority - other.priority) * step_ms)
        before.append(job)
    return worst


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("step_s", [0.5, 20, 600])
def test_aging_lets_no_job_overtake_a_job_that_was_accepted_more_than_the_head_start_earlier(play, seed, step_s):
    slots = random.Random(seed).randint(1, 4)
    catalog = a_catalog(slots, policy="aging", tier_head_start=float(step_s))
    jobs = play(a_scenario(bursty(seed, 1000, 2000 / slots), catalog)).jobs
    assert worst_overtaking_ms(jobs, round(step_s * 1000)) <= 0


def test_aging_uses_nearly_the_whole_head_start(play):
    """The bound is tight: some job is overtaken by nearly as much."""
    catalog = a_catalog(2, policy="aging", tier_head_start=30.0)
    jobs = play(a_scenario(bursty(5, 1500, 1000), catalog)).jobs
    assert -5000 < worst_overtaking_ms(jobs, 30_000) <= 0
    assert any(
        other.turn < job.turn and other.priority < job.priority and other.arrival_ms > job.arrival_ms + 100 * SECOND
        for job in jobs
        for other in jobs[job.number : job.number + 400]
    )


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_other_policies_do_not_keep_the_bound_of_aging(play, policy):
    """So the check would see it."""
    jobs = play(a_scenario(bursty(1, 1000, 1000), a_catalog(policy=policy))).jobs
    assert worst_overtaking_ms(jobs, 1000) > 0


# -- fair ------------------------------------------------------------------------------------------------------


def unequal(seed: int, tenants: int, least: int) -> list[Arrival]:
    """Tenants of very unequal demand, all there in the first minute; the n-th asks for least * tenants / n jobs."""
    chance = random.Random(seed)
    who = [f"t{n}" for n in range(1, tenants + 1) for _ in range(least * tenants // n)]
    times = sorted(chance.uniform(0, 60) for _ in who)
    chance.shuffle(who)
    return [
        at(time, chance.lognormvariate(2.3, 0.6) + 0.001, tenant=tenant, priority=chance.randint(1, 9))
        for time, tenant in zip(times, who, strict=True)
    ]


def shares(jobs: Sequence[Job], until_ms: int, weight: Callable[[str], float]) -> list[float]:
    return [got / weight(tenant) for tenant, got in slot_seconds(jobs, T0, until_ms).items()]


@pytest.mark.parametrize("weighted", [False, True])
def test_fair_shares_are_equal_per_weight_although_the_demand_is_unequal(play, weighted):
    tenants = 30
    weights = {f"t{n}": float(1 + n % 4) for n in range(1, tenants + 1)} if weighted else {}
    arrivals = unequal(3, tenants, least=90 if weighted else 40)
    catalog = a_catalog(10, servers=2, policy="fair", weights=weights)
    jobs = play(a_scenario(arrivals, catalog)).jobs
    # Until the first tenant has nothing waiting any more.
    until = min(max(job.start_ms for job in jobs if job.tenant == tenant) for tenant in {job.tenant for job in jobs})
    index = jain(shares(jobs, until, lambda tenant: weights.get(tenant, 1.0)))
    assert index is not None and index >= 0.99
    assert len(slot_seconds(jobs, T0, until)) == tenants


def test_fifo_shares_follow_the_demand(play):
    jobs = play(a_scenario(unequal(3, 100, least=10), a_catalog(20, policy="fifo"))).jobs
    index = jain(shares(jobs, max(job.start_ms for job in jobs), lambda tenant: 1.0))
    assert index is not None and index < 0.3


def beside_a_backlog(backlog: int, quiet_jobs: int, slots: int = 16, mean_s: float = 2) -> Scenario:
    """A quiet tenant that asks for a fiftieth of the slots, and a noisy one that always has `backlog` jobs waiting."""
    chance = random.Random(11)
    rate = slots / mean_s
    quiet = poisson(12, quiet_jobs, rate / 50, mean_s)
    span_s = (quiet[-1].at_ms - T0) / SECOND
    runs = [max(chance.expovariate(1 / mean_s), 0.001) for _ in range(backlog + int(span_s * rate))]
    noisy = [at(max(n - backlog, 0) / rate, run, tenant="noisy") for n, run in enumerate(runs)]
    arrivals = sorted(noisy + quiet, key=lambda arrival: arrival.at_ms)
    return a_scenario(arrivals, a_catalog(slots, policy="fair"))


def quiet_p99_s(jobs: Sequence[Job]) -> float:
    return percentile(sorted(job.wait_ms for job in jobs if job.tenant == "t0"), 0.99) / 1000


def test_under_fair_a_quiet_tenants_wait_does_not_depend_on_another_tenants_backlog(play):
    small, large = (quiet_p99_s(play(beside_a_backlog(backlog, 200)).jobs) for backlog in (200, 5_000))
    assert large == pytest.approx(small, rel=0.1)
    assert large < 2


@pytest.mark.parametrize(("policy", "late"), [("fifo", 1), ("edf", 0)])
def test_edf_starts_jobs_by_deadlines_of_which_fifo_misses_one(play, policy, late):
    arrivals = [at(0), *(at(1, deadline_ms=T0 + within_s * SECOND) for within_s in (32, 22, 12))]
    outcome = play(a_scenario(arrivals, a_catalog(policy=policy)))
    assert summarize(outcome).late == late
