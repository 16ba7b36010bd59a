"""Generates a load from a seed: Poisson arrivals of unequal tenants, run times, bursts and outages.

Each random quantity has a separate generator, so that a change of one, such as more outages, does not change others.
"""

import math
import random
from bisect import bisect
from collections.abc import Iterator, Mapping
from heapq import merge
from itertools import accumulate
from typing import Generic, TypeVar

from app.simulate.load_plan import ModelPlan, Plan
from app.simulate.scenario import Arrival, Outage

T = TypeVar("T")

BEGIN_MS = 1_767_571_200_000  # Monday 2026-01-05, midnight UTC
_DAY_S = 86_400.0


class _Mix(Generic[T]):
    """Draws random values in proportion to their shares."""

    def __init__(self, shares: Mapping[T, float]) -> None:
        self._values, self._sums = list(shares), list(accumulate(shares.values()))

    def draw(self, rng: random.Random) -> T:
        return self._values[bisect(self._sums, rng.random() * self._sums[-1], hi=len(self._sums) - 1)]


def generate_arrivals(plan: Plan, slots: int | None = None) -> list[Arrival]:
    """Return the jobs of a plan, by arrival time.  `slots`: number that `busy` refers to; None: all of the plan."""
    rate = jobs_per_s(plan, sum(server.slots for server in plan.fleet()) if slots is None else slots)
    models = {model.name: model for model in plan.models}
    mix = _Mix({model.name: model.share for model in plan.models})
    tenants, priorities = _Mix(tenant_shares(plan)), _Mix(plan.priorities)
    rng, run_time_rng = random.Random(f"{plan.seed} kinds"), random.Random(f"{plan.seed} lengths")
    arrivals = []
    for at_s, tenant, model in merge(_steady(plan, rate), _bursts(plan), key=lambda arrival: arrival[0]):
        name, tenant_name, priority = model or mix.draw(rng), tenant or tenants.draw(rng), priorities.draw(rng)
        at_ms, within_ms = BEGIN_MS + int(at_s * 1000), round(models[name].deadline * 1000)
        deadline_ms = at_ms + within_ms if within_ms else 0
        duration_ms = run_ms(models[name], run_time_rng)
        arrivals.append(Arrival(at_ms, name, duration_ms, tenant_name, priority, deadline_ms=deadline_ms))
    return arrivals


def generate_outages(plan: Plan) -> list[Outage]:
    """Return the outages of servers: those that the plan names, and random ones."""
    rng = random.Random(f"{plan.seed} outages")
    outages = [_outage(down.server, down.at, down.lasts) for down in plan.outages]
    for server in plan.fleet() if plan.outages_per_day else ():
        at_s = rng.expovariate(plan.outages_per_day / _DAY_S)
        while at_s < plan.duration:
            lasts_s = rng.expovariate(1 / plan.outage_lasts)
            outages.append(_outage(server.name, at_s, max(lasts_s, 0.001)))
            at_s += lasts_s + rng.expovariate(plan.outages_per_day / _DAY_S)
    return sorted(outages, key=lambda outage: (outage.from_ms, outage.server))


def tenant_shares(plan: Plan) -> Mapping[str, float]:
    """Return tenant -> its share of the arrivals."""
    if plan.shares:
        return plan.shares
    digits = len(str(plan.tenants))
    return {f"tenant{n:0{digits}}": n**-plan.zipf for n in range(1, plan.tenants + 1)}


def jobs_per_s(plan: Plan, slots: int) -> float:
    """Return the mean rate of arrivals, without bursts.  `slots`: number that `busy` refers to."""
    if plan.rate is not None:
        return plan.rate / 3600
    shares = sum(model.share for model in plan.models)
    mean_s = sum(model.mean * model.share for model in plan.models) / shares
    return plan.busy * slots / mean_s


def run_ms(model: ModelPlan, rng: random.Random) -> int:
    """Return a random run time of a job of the model, in ms, at least 1."""
    if model.shape == "exponential":
        drawn = rng.expovariate(1 / model.mean)
    else:
        variance = math.log1p(model.spread**2)
        drawn = rng.lognormvariate(math.log(model.mean) - variance / 2, math.sqrt(variance))
    return max(round(drawn * 1000), 1)


def _steady(plan: Plan, rate: float) -> Iterator[tuple[float, str, str]]:
    """Yield (seconds, "", "") of each arrival, at a rate that depends on the hour of the day; uses thinning."""
    rng = random.Random(f"{plan.seed} arrivals")
    max_rate = rate * (1 + plan.swing)
    at_s = rng.expovariate(max_rate)
    while at_s < plan.duration:
        relative_rate = 1 + plan.swing * math.cos(2 * math.pi * (at_s - plan.peak) / _DAY_S)
        if plan.swing == 0 or rng.random() * (1 + plan.swing) < relative_rate:
            yield at_s, "", ""
        at_s += rng.expovariate(max_rate)


def _bursts(plan: Plan) -> list[tuple[float, str, str]]:
    """Return (seconds, tenant, model) of the arrivals in bursts; model "": a random one."""
    rng = random.Random(f"{plan.seed} bursts")
    tenants = _Mix(tenant_shares(plan))
    arrivals = []
    for burst in plan.bursts:
        tenant = burst.tenant or tenants.draw(rng)
        times = (burst.at + rng.random() * burst.lasts for _ in range(burst.jobs))
        arrivals += [(at, tenant, burst.model or "") for at in times]
    at = rng.expovariate(plan.bursts_per_day / _DAY_S) if plan.bursts_per_day else math.inf
    while at < plan.duration:
        tenant = tenants.draw(rng)
        arrivals += [(at + rng.random() * 300, tenant, "") for _ in range(plan.burst_jobs)]
        at += rng.expovariate(plan.bursts_per_day / _DAY_S)
    return sorted(arrivals)


def _outage(server: str, at_s: float, lasts_s: float) -> Outage:
    begin = BEGIN_MS + int(at_s * 1000)
    return Outage(server, begin, begin + max(int(lasts_s * 1000), 1))
