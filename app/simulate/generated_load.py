"""A load by a seed: Poisson arrivals of unequal tenants, run times, bursts and outages.

Each kind of chance has a generator of its own, so that more outages, say, leave the arrivals as they were.
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
    """Draws values by their shares."""

    def __init__(self, shares: Mapping[T, float]) -> None:
        self._values, self._sums = list(shares), list(accumulate(shares.values()))

    def draw(self, chance: random.Random) -> T:
        return self._values[bisect(self._sums, chance.random() * self._sums[-1], hi=len(self._sums) - 1)]


def generate_arrivals(plan: Plan, slots: int | None = None) -> list[Arrival]:
    """The jobs of a plan, in order of time.  `slots`: those that `busy` means; None: those of the plan's servers."""
    rate = jobs_per_s(plan, sum(server.slots for server in plan.fleet()) if slots is None else slots)
    models = {model.name: model for model in plan.models}
    mix = _Mix({model.name: model.share for model in plan.models})
    tenants, priorities = _Mix(tenant_shares(plan)), _Mix(plan.priorities)
    chance, lengths = random.Random(f"{plan.seed} kinds"), random.Random(f"{plan.seed} lengths")
    found = []
    for at, tenant, model in merge(_steady(plan, rate), _bursts(plan), key=lambda it: it[0]):
        name, who, priority = model or mix.draw(chance), tenant or tenants.draw(chance), priorities.draw(chance)
        at_ms, within_ms = BEGIN_MS + int(at * 1000), round(models[name].deadline * 1000)
        deadline_ms = at_ms + within_ms if within_ms else 0
        ran_ms = run_ms(models[name], lengths)
        found.append(Arrival(at_ms, name, ran_ms, who, priority, deadline_ms=deadline_ms))
    return found


def generate_outages(plan: Plan) -> list[Outage]:
    """When servers are gone: those that the plan names, and those by chance."""
    chance = random.Random(f"{plan.seed} outages")
    found = [_outage(down.server, down.at, down.lasts) for down in plan.outages]
    for server in plan.fleet() if plan.outages_per_day else ():
        at = chance.expovariate(plan.outages_per_day / _DAY_S)
        while at < plan.duration:
            lasts = chance.expovariate(1 / plan.outage_lasts)
            found.append(_outage(server.name, at, max(lasts, 0.001)))
            at += lasts + chance.expovariate(plan.outages_per_day / _DAY_S)
    return sorted(found, key=lambda it: (it.from_ms, it.server))


def tenant_shares(plan: Plan) -> Mapping[str, float]:
    """Tenant -> its share of the arrivals."""
    if plan.shares:
        return plan.shares
    digits = len(str(plan.tenants))
    return {f"tenant{n:0{digits}}": n**-plan.zipf for n in range(1, plan.tenants + 1)}


def jobs_per_s(plan: Plan, slots: int) -> float:
    """The mean rate of arrivals, bursts not counted, where `busy` means so many slots."""
    if plan.rate is not None:
        return plan.rate / 3600
    shares = sum(model.share for model in plan.models)
    mean_s = sum(model.mean * model.share for model in plan.models) / shares
    return plan.busy * slots / mean_s


def run_ms(model: ModelPlan, chance: random.Random) -> int:
    """How long a job of the model runs."""
    if model.shape == "exponential":
        drawn = chance.expovariate(1 / model.mean)
    else:
        variance = math.log1p(model.spread**2)
        drawn = chance.lognormvariate(math.log(model.mean) - variance / 2, math.sqrt(variance))
    return max(round(drawn * 1000), 1)


def _steady(plan: Plan, rate: float) -> Iterator[tuple[float, str, str]]:
    """Seconds of the arrivals that follow the hour of the day, by thinning; tenant and model are left open."""
    chance = random.Random(f"{plan.seed} arrivals")
    most = rate * (1 + plan.swing)
    at = chance.expovariate(most)
    while at < plan.duration:
        now = 1 + plan.swing * math.cos(2 * math.pi * (at - plan.peak) / _DAY_S)
        if plan.swing == 0 or chance.random() * (1 + plan.swing) < now:
            yield at, "", ""
        at += chance.expovariate(most)


def _bursts(plan: Plan) -> list[tuple[float, str, str]]:
    chance = random.Random(f"{plan.seed} bursts")
    tenants = _Mix(tenant_shares(plan))
    found = []
    for burst in plan.bursts:
        tenant = burst.tenant or tenants.draw(chance)
        times = (burst.at + chance.random() * burst.lasts for _ in range(burst.jobs))
        found += [(at, tenant, burst.model or "") for at in times]
    at = chance.expovariate(plan.bursts_per_day / _DAY_S) if plan.bursts_per_day else math.inf
    while at < plan.duration:
        tenant = tenants.draw(chance)
        found += [(at + chance.random() * 300, tenant, "") for _ in range(plan.burst_jobs)]
        at += chance.expovariate(plan.bursts_per_day / _DAY_S)
    return sorted(found)


def _outage(server: str, at_s: float, lasts_s: float) -> Outage:
    begin = BEGIN_MS + int(at_s * 1000)
    return Outage(server, begin, begin + max(int(lasts_s * 1000), 1))
