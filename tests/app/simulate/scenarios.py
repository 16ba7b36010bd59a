"""Builders of scenarios for tests, with defaults for values that a test does not set.  Times are relative to T0."""

import random
from collections.abc import Sequence
from typing import Any

from app.simulate import Arrival, Job, Scenario
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import Server

T0 = 1_800_000_000_000
SECOND = 1000
POLICIES = ("fifo", "priority", "aging", "fair")


def a_catalog(slots: int = 1, servers: int = 1, models: Sequence[str] = ("zimg",), **config: Any) -> CatalogSnapshot:
    """Return a catalog with one fleet.  `slots`: of each server.  Each server serves all models."""
    fleet = models[0]
    return CatalogSnapshot(
        1,
        {name: Model(name, fleet, config, ModelConfig(**config)) for name in models},
        {
            f"gpu{n}": Server(f"gpu{n}", fleet, slots, "online", dict.fromkeys(models, ""), 0)
            for n in range(1, servers + 1)
        },
    )


def a_scenario(arrivals: Sequence[Arrival], catalog: CatalogSnapshot | None = None, **more: Any) -> Scenario:
    """Return a scenario whose window is from T0 to the last arrival."""
    end_ms = max([T0 + SECOND, *(arrival.at_ms for arrival in arrivals)])
    return Scenario(arrivals, catalog or a_catalog(), **{"begin_ms": T0, "end_ms": end_ms} | more)


def at(s: float, run_s: float = 10, **more: Any) -> Arrival:
    """Return an arrival `s` seconds after T0."""
    return Arrival(T0 + int(s * SECOND), more.pop("model", "zimg"), int(run_s * SECOND), **more)


def poisson(seed: int, jobs: int, per_s: float, mean_s: float, tenants: int = 1, priorities: int = 1) -> list[Arrival]:
    """Return arrivals with exponential intervals and run times, and random tenants and priorities."""
    rng = random.Random(seed)
    arrivals, now_s = [], 0.0
    for _ in range(jobs):
        now_s += rng.expovariate(per_s)
        tenant, priority = f"t{rng.randrange(tenants)}", rng.randint(1, priorities)
        arrivals.append(at(now_s, max(rng.expovariate(1 / mean_s), 0.001), tenant=tenant, priority=priority))
    return arrivals


def starts(jobs: Sequence[Job]) -> list[float | None]:
    """Return when each job started, in seconds after T0."""
    return [None if job.start_ms is None else (job.start_ms - T0) / SECOND for job in jobs]
