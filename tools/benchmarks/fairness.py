"""Measure the policy `fair` in simulations: python -m tools.benchmarks.fairness [shares] [quiet] [aging]."""

import random
import sys
import time
from collections.abc import Sequence

from app.simulate import Arrival, Job, Outcome, Scenario, jain, run
from app.simulate.outcome_statistics import percentile, slot_seconds
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import Server

T0 = 1_800_000_000_000


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _catalog(slots: int, **config: object) -> CatalogSnapshot:
    server = Server("gpu", "bench", slots, "online", {"bench": ""}, 0)
    return CatalogSnapshot(1, {"bench": Model("bench", "bench", config, ModelConfig(**config))}, {"gpu": server})  # type: ignore[arg-type]


def _played(arrivals: Sequence[Arrival], catalog: CatalogSnapshot) -> tuple[Outcome, float]:
    """The outcome, and jobs simulated per second."""
    begin = time.monotonic()
    outcome = run(Scenario(arrivals, catalog, T0, arrivals[-1].at_ms + 1))
    return outcome, len(arrivals) / (time.monotonic() - begin)


def shares(tenants: int = 1000, slots: int = 64, mean_s: float = 10.0) -> None:
    """Jain's index of weighted slot-seconds: demand by Zipf's law, 1000 to 1; weights 1, 2 and 4; all backlogged."""
    chance = random.Random(1)
    weights = {f"t{n}": (1.0, 2.0, 4.0)[n % 3] for n in range(1, tenants + 1)}
    who = [f"t{n}" for n in range(1, tenants + 1) for _ in range(max(120 * tenants // n, 120))]
    chance.shuffle(who)
    arrivals = [
        Arrival(
            T0 + 60_000 * n // len(who), "bench", max(int(chance.lognormvariate(-0.5, 1) * mean_s * 1000), 1), tenant
        )
        for n, tenant in enumerate(who)
    ]
    outcome, speed = _played(arrivals, _catalog(slots, policy="fair", weights=weights))
    last: dict[str, int] = {}
    for job in outcome.jobs:
        last[job.tenant] = max(last.get(job.tenant, 0), job.start_ms or 0)
    until = min(last.values())  # here the first tenant runs dry
    got = slot_seconds(outcome.jobs, T0, until)
    index = jain(got[tenant] / weights[tenant] for tenant in got)
    _say(
        f"shares      {tenants} tenants, demand 1000 to 1, weights 1 2 4, {slots} slots, all backlogged for "
        f"{(until - T0) / 3_600_000:.1f} h: Jain {index:.4f} of weighted slot-seconds   ({speed:,.0f} jobs/s)"
    )


def quiet(slots: int = 16, mean_s: float = 2.0, quiet_jobs: int = 1000) -> None:
    """p99 wait of a tenant that asks for 2 % of the slots, beside one with a backlog of 1,000 and of 100,000 jobs."""
    found = []
    for backlog in (1_000, 100_000):
        outcome, speed = _played(_beside(backlog, quiet_jobs, slots, mean_s), _catalog(slots, policy="fair"))
        waits = sorted((job.wait_ms or 0) / 1000 for job in outcome.jobs if job.tenant == "quiet")
        found.append(percentile(waits, 0.99))
        _say(
            f"quiet       beside a backlog of {backlog:,}: p50 {percentile(waits, 0.5):.3f} s, "
            f"p99 {found[-1]:.3f} s of {len(waits)} jobs   ({speed:,.0f} jobs/s)"
        )
    _say(f"quiet       p99 changes by {found[1] / found[0] - 1:+.1%}")


def _beside(backlog: int, quiet_jobs: int, slots: int, mean_s: float) -> list[Arrival]:
    """A noisy tenant that brings as much as the slots can do, on top of its backlog, and a quiet one."""
    chance, rate = random.Random(2), slots / mean_s
    arrivals, now = [], 0.0
    for _ in range(quiet_jobs):
        now += chance.expovariate(rate / 50)
        arrivals.append(Arrival(T0 + int(now * 1000), "bench", _exponential_ms(chance, mean_s), "quiet"))
    for n in range(backlog + int(now * rate)):
        at_s = max(n - backlog, 0) / rate
        arrivals.append(Arrival(T0 + int(at_s * 1000), "bench", _exponential_ms(chance, mean_s), "noisy"))
    return sorted(arrivals, key=lambda arrival: arrival.at_ms)


def aging(jobs: int = 50_000, slots: int = 8, step_s: float = 30.0) -> None:
    """The longest overtaking of each priority under `aging`, beside its bound."""
    chance, now, arrivals = random.Random(3), 0.0, []
    for _ in range(jobs):
        now += chance.expovariate(slots / 10 * 1.05)
        arrivals.append(
            Arrival(T0 + int(now * 1000), "bench", _exponential_ms(chance, 10), priority=chance.randint(1, 9))
        )
    outcome, speed = _played(arrivals, _catalog(slots, policy="aging", tier_head_start=step_s))
    worst = _overtaken_s(outcome.jobs)
    told = ", ".join(f"priority {it}: {worst[it]:.1f} of {(it - 1) * step_s:.0f}" for it in sorted(worst))
    _say(f"aging       overtaken at most, s of its bound: {told}   ({speed:,.0f} jobs/s)")


def _overtaken_s(jobs: Sequence[Job]) -> dict[int, float]:
    newest, worst = 0, dict.fromkeys(range(1, 10), 0.0)
    for job in sorted(jobs, key=lambda job: job.turn):
        worst[job.priority] = max(worst[job.priority], (newest - job.arrival_ms) / 1000)
        newest = max(newest, job.arrival_ms)
    return worst


def _exponential_ms(chance: random.Random, mean_s: float) -> int:
    return max(int(chance.expovariate(1 / mean_s) * 1000), 1)


_ALL = {"shares": shares, "quiet": quiet, "aging": aging}

if __name__ == "__main__":
    for name in sys.argv[1:] or _ALL:
        _ALL[name]()
