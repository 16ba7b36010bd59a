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


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _catalog(slots: int, **config: object) -> CatalogSnapshot:
    server = Server("gpu", "bench", slots, "online", {"bench": ""}, 0)
    return CatalogSnapshot(1, {"bench": Model("bench", "bench", config, ModelConfig(**config))}, {"gpu": server})  # type: ignore[arg-type]


def _simulate(arrivals: Sequence[Arrival], catalog: CatalogSnapshot) -> tuple[Outcome, float]:
    """Simulate, and return the outcome and the number of jobs simulated per second."""
    begin = time.monotonic()
    outcome = run(Scenario(arrivals, catalog, T0, arrivals[-1].at_ms + 1))
    return outcome, len(arrivals) / (time.monotonic() - begin)


def shares(tenants: int = 1000, slots: int = 64, mean_s: float = 10.0) -> None:
    """Print Jain's index of weighted slot-seconds.

    Demand follows Zipf's law, 1000 to 1; weights are 1, 2 and 4; all tenants have a backlog.
    """
    rng = random.Random(1)
    weights = {f"t{n}": (1.0, 2.0, 4.0)[n % 3] for n in range(1, tenants + 1)}
    tenant_of_job = [f"t{n}" for n in range(1, tenants + 1) for _ in range(max(120 * tenants // n, 120))]
    rng.shuffle(tenant_of_job)
    arrivals = [
        Arrival(
            T0 + 60_000 * n // len(tenant_of_job),
            "bench",
            max(int(rng.lognormvariate(-0.5, 1) * mean_s * 1000), 1),
            tenant,
        )
        for n, tenant in enumerate(tenant_of_job)
    ]
    outcome, speed = _simulate(arrivals, _catalog(slots, policy="fair", weights=weights))
    last: dict[str, int] = {}
    for job in outcome.jobs:
        last[job.tenant] = max(last.get(job.tenant, 0), job.start_ms or 0)
    until = min(last.values())  # From then on the first tenant has no backlog.
    used = slot_seconds(outcome.jobs, T0, until)
    index = jain(used[tenant] / weights[tenant] for tenant in used)
    _print(
        f"shares      {tenants} tenants, demand 1000 to 1, weights 1 2 4, {slots} slots, all backlogged for "
        f"{(until - T0) / 3_600_000:.1f} h: Jain {index:.4f} of weighted slot-seconds   ({speed:,.0f} jobs/s)"
    )


def quiet(slots: int = 16, mean_s: float = 2.0, quiet_jobs: int = 1000) -> None:
    """Print the p99 wait of a tenant that needs 2 % of the slots, beside one with 1,000 and 100,000 waiting jobs."""
    p99s = []
    for backlog in (1_000, 100_000):
        outcome, speed = _simulate(_quiet_and_noisy(backlog, quiet_jobs, slots, mean_s), _catalog(slots, policy="fair"))
        waits = sorted((job.wait_ms or 0) / 1000 for job in outcome.jobs if job.tenant == "quiet")
        p99s.append(percentile(waits, 0.99))
        _print(
            f"quiet       beside a backlog of {backlog:,}: p50 {percentile(waits, 0.5):.3f} s, "
            f"p99 {p99s[-1]:.3f} s of {len(waits)} jobs   ({speed:,.0f} jobs/s)"
        )
    _print(f"quiet       p99 changes by {p99s[1] / p99s[0] - 1:+.1%}")


def _quiet_and_noisy(backlog: int, quiet_jobs: int, slots: int, mean_s: float) -> list[Arrival]:
    """Return the arrivals of a quiet tenant, and of a noisy one with a backlog that also fills all slots by itself."""
    rng, rate = random.Random(2), slots / mean_s
    arrivals, now = [], 0.0
    for _ in range(quiet_jobs):
        now += rng.expovariate(rate / 50)
        arrivals.append(Arrival(T0 + int(now * 1000), "bench", _exponential_ms(rng, mean_s), "quiet"))
    for n in range(backlog + int(now * rate)):
        at_s = max(n - backlog, 0) / rate
        arrivals.append(Arrival(T0 + int(at_s * 1000), "bench", _exponential_ms(rng, mean_s), "noisy"))
    return sorted(arrivals, key=lambda arrival: arrival.at_ms)


def aging(jobs: int = 50_000, slots: int = 8, step_s: float = 30.0) -> None:
    """Print by how much a job of each priority was overtaken at most under `aging`, and its bound."""
    rng, now, arrivals = random.Random(3), 0.0, []
    for _ in range(jobs):
        now += rng.expovariate(slots / 10 * 1.05)
        arrivals.append(Arrival(T0 + int(now * 1000), "bench", _exponential_ms(rng, 10), priority=rng.randint(1, 9)))
    outcome, speed = _simulate(arrivals, _catalog(slots, policy="aging", tier_head_start=step_s))
    worst = _overtaken_s(outcome.jobs)
    by_priority = ", ".join(f"priority {n}: {worst[n]:.1f} of {(n - 1) * step_s:.0f}" for n in sorted(worst))
    _print(f"aging       overtaken at most, s of its bound: {by_priority}   ({speed:,.0f} jobs/s)")


def _overtaken_s(jobs: Sequence[Job]) -> dict[int, float]:
    """Return priority -> how much later, in s, a job had arrived at most that started before one of this priority."""
    newest, worst = 0, dict.fromkeys(range(1, 10), 0.0)
    for job in sorted(jobs, key=lambda job: job.turn):
        worst[job.priority] = max(worst[job.priority], (newest - job.arrival_ms) / 1000)
        newest = max(newest, job.arrival_ms)
    return worst


def _exponential_ms(rng: random.Random, mean_s: float) -> int:
    return max(int(rng.expovariate(1 / mean_s) * 1000), 1)


_ALL = {"shares": shares, "quiet": quiet, "aging": aging}

if __name__ == "__main__":
    for name in sys.argv[1:] or _ALL:
        _ALL[name]()
