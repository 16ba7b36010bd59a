"""A simulation runs every job once and one job at a time in each slot; the same seed gives the same outcome."""

import heapq
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from app.simulate import Arrival, Outage, SimulationError, run
from app.simulate.scenario import Job
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import Server
from tests.app.simulate.scenarios import POLICIES, SECOND, T0, a_catalog, a_scenario, at, poisson, starts


def overlaps(jobs: list[Job]) -> list[tuple[Job, Job]]:
    by_slot = defaultdict(list)
    for job in jobs:
        by_slot[job.slot].append(job)
    return [
        (before, after)
        for its in by_slot.values()
        for before, after in pairwise(sorted(its, key=lambda job: job.start_ms))
        if after.start_ms < before.end_ms
    ]


def first_come_first_served(arrivals: list[Arrival], slots: int) -> list[int]:
    """Starts in ms, by the shortest program there is."""
    free = [0] * slots
    found = []
    for arrival in arrivals:
        start = max(arrival.at_ms, heapq.heappop(free))
        heapq.heappush(free, start + arrival.run_ms)
        found.append(start)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_every_job_runs_once_and_as_long_as_it_should_on_a_slot_that_runs_nothing_else(play, policy):
    arrivals = poisson(1, 3000, per_s=1.1, mean_s=8, tenants=7, priorities=9)
    jobs = play(a_scenario(arrivals, a_catalog(4, servers=2, policy=policy))).jobs
    assert [(job.number, job.arrival_ms, job.end_ms - job.start_ms) for job in jobs] == [
        (number, arrival.at_ms, arrival.run_ms) for number, arrival in enumerate(arrivals, 1)
    ]
    assert all(job.start_ms >= job.arrival_ms for job in jobs)
    assert len({job.turn for job in jobs}) == len(jobs)
    assert overlaps(jobs) == []
    assert {job.slot for job in jobs} == {f"gpu{n}-slot{m}" for n in (1, 2) for m in range(4)}


@pytest.mark.parametrize(("slots", "per_s"), [(1, 0.09), (5, 0.4), (5, 0.9)])
def test_fifo_is_first_come_first_served_to_the_millisecond(play, slots, per_s):
    arrivals = poisson(2, 4000, per_s, mean_s=10, priorities=9)
    jobs = play(a_scenario(arrivals, a_catalog(slots, policy="fifo"))).jobs
    assert [job.start_ms for job in jobs] == first_come_first_served(arrivals, slots)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_scenario_has_the_same_outcome(play, policy):
    scenario = a_scenario(
        poisson(3, 2500, per_s=1, mean_s=9, tenants=50, priorities=3),
        a_catalog(4, servers=2, policy=policy),
        outages=[Outage("gpu1", T0 + 300 * SECOND, T0 + 400 * SECOND)],
    )
    assert play(scenario) == play(scenario)


def test_with_the_priority_policy_the_most_urgent_job_starts_first(play):
    arrivals = [at(0), at(1, priority=9), at(2, priority=5), at(3, priority=1)]
    assert starts(play(a_scenario(arrivals, a_catalog(policy="priority"))).jobs) == [0, 30, 20, 10]


def test_a_job_that_arrives_exactly_when_a_run_ends_starts_at_once(play):
    assert starts(play(a_scenario([at(0, 10), at(10, 10)])).jobs) == [0, 10]


def test_the_latency_of_a_start_counts_as_wait_and_keeps_the_slot(play):
    jobs = play(a_scenario([at(0, 10), at(0, 10)], start_latency_ms=500)).jobs
    assert starts(jobs) == [0.5, 11]
    assert [job.wait_ms for job in jobs] == [500, 11_000]


def test_a_model_swap_takes_time_and_the_first_model_is_loaded_from_the_start(play):
    arrivals = [at(0, 10), at(0, 10, model="flux"), at(0, 10, model="flux")]
    catalog = a_catalog(models=("zimg", "flux"), policy="fifo", affinity=0.0)
    assert starts(play(a_scenario(arrivals, catalog, swap_ms=3000)).jobs) == [0, 10, 23]


def test_a_job_interrupted_by_an_outage_keeps_its_position_and_runs_again(play):
    outage = Outage("gpu1", T0 + 4 * SECOND, T0 + 60 * SECOND)
    jobs = play(a_scenario([at(0, 10), at(1, 10), at(2, 10)], a_catalog(policy="fifo"), outages=[outage])).jobs
    assert starts(jobs) == [60, 70, 80]
    assert [job.lost_ms for job in jobs] == [4000, 0, 0]


def test_during_an_outage_the_jobs_run_on_the_other_servers(play):
    outage = Outage("gpu1", T0 + 4 * SECOND, T0 + 1000 * SECOND)
    arrivals = [at(0, 10), at(0, 10), at(0, 10)]
    jobs = play(a_scenario(arrivals, a_catalog(servers=2, policy="fifo"), outages=[outage])).jobs
    assert {job.slot for job in jobs} == {"gpu2-slot0"}
    assert sorted(starts(jobs)) == [0, 10, 20]


def test_outages_of_one_server_that_touch_are_one(play):
    outages = [Outage("gpu1", T0 + a * SECOND, T0 + b * SECOND) for a, b in ((5, 20), (10, 30), (30, 40))]
    assert starts(play(a_scenario([at(0, 10)], outages=outages)).jobs) == [40]


def test_a_job_that_no_server_serves_never_starts_and_delays_no_other_job(play):
    lonely = {"flux": Model("flux", "zimg", {}, ModelConfig())}
    catalog = replace(a_catalog(), models={**a_catalog().models, **lonely})
    jobs = play(a_scenario([at(0, model="flux"), at(1), at(2)], catalog)).jobs
    assert starts(jobs) == [None, 1, 11]
    assert (jobs[0].end_ms, jobs[0].wait_ms, jobs[0].slot) == (None, None, "")


def test_fleets_are_simulated_each_for_itself(play):
    two = a_catalog(), a_catalog(models=("flux",))
    servers = {**two[0].servers, "other": replace(two[1].servers["gpu1"], name="other")}
    catalog = CatalogSnapshot(1, {**two[0].models, **two[1].models}, servers)
    arrivals = [at(0), at(0, model="flux"), at(1), at(1, model="flux")]
    jobs = play(a_scenario(arrivals, catalog)).jobs
    assert starts(jobs) == [0, 0, 10, 10]
    assert [job.slot for job in jobs] == ["gpu1-slot0", "other-slot0"] * 2


def test_a_server_with_many_slots_fills_up(play):
    jobs = play(a_scenario([at(0, 5) for _ in range(2500)], a_catalog(1000))).jobs
    assert sorted(starts(jobs)) == [0] * 1000 + [5] * 1000 + [10] * 500


def test_a_simulation_without_arrivals_has_no_jobs(play):
    assert play(a_scenario([])).jobs == ()


def test_progress_counts_the_jobs_that_have_ended(simulator):
    simulator.flushall()
    seen = []
    run(a_scenario(poisson(4, 2200, 1, 0.5)), redis=simulator, progress=seen.append)
    assert len(seen) > 1 and sum(seen) == 2200


def test_a_server_that_is_paused_gets_nothing(play):
    catalog = a_catalog(servers=2)
    paused = {"gpu1": replace(catalog.servers["gpu1"], state="paused")}
    jobs = play(a_scenario([at(0), at(0)], replace(catalog, servers={**catalog.servers, **paused}))).jobs
    assert starts(jobs) == [0, 10]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arrivals": [at(0, model="gone")]}, "Job 1 asks for model 'gone'; the fleet has zimg"),
        ({"arrivals": [at(0, 0)]}, "Job 1 runs for 0 ms"),
        ({"arrivals": [at(0, priority=10)]}, "Job 1 has priority 10"),
        ({"arrivals": [at(1), at(0)]}, "Job 2 arrives before"),
        ({"outages": [Outage("gone", 0, 1)]}, "no server 'gone'"),
        ({"outages": [Outage("gpu1", 5, 5)]}, "ends before it begins"),
    ],
)
def test_an_invalid_scenario_is_refused_with_one_sentence(change, says):
    with pytest.raises(SimulationError, match=says) as refused:
        run(replace(a_scenario([at(0)]), **change))
    assert "\n" not in str(refused.value)


def test_server_names_may_be_anything(play):
    catalog = a_catalog()
    odd = Server("gpu-slot1", "zimg", 2, "online", {"zimg": ""}, 0)
    jobs = play(a_scenario([at(0), at(0)], replace(catalog, servers={"gpu-slot1": odd}))).jobs
    assert {job.slot for job in jobs} == {"gpu-slot1-slot0", "gpu-slot1-slot1"}
