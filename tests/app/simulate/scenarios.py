"""Scenarios for tests: each builder takes what matters to the test and fills in the rest.  Times count from T0."""

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
    """One fleet: so many servers of so many slots, each of which serves all models."""
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
    """Its window reaches from T0 to the last arrival."""
    end_ms = max([T0 + SECOND, *(arrival.at_ms for arrival in arrivals)])
    return Scenario(arrivals, catalog or a_catalog(), **{"begin_ms": T0, "end_ms": end_ms} | more)


def at(s: float, run_s: float = 10, **more: Any) -> Arrival:
    """An arrival so many seconds after T0."""
    return Arrival(T0 + int(s * SECOND), more.pop("model", "zimg"), int(run_s * SECOND), **more)


def poisson(seed: int, jobs: int, per_s: float, mean_s: float, tenants: int = 1, priorities: int = 1) -> list[Arrival]:
    """Exponential gaps and run times; tenants and priorities at random."""
    chance = random.Random(seed)
    found, now = [], 0.0
    for _ in range(jobs):
        now += chance.expovariate(per_s)
        tenant, priority = f"t{chance.randrange(tenants)}", chance.randint(1, priorities)
        found.append(at(now, max(chance.expovariate(1 / mean_s), 0.001), tenant=tenant, priority=priority))
    return found


def starts(jobs: Sequence[Job]) -> list[float | None]:
    """Seconds after T0 at which they started."""
    return [None if job.start_ms is None else (job.start_ms - T0) / SECOND for job in jobs]
