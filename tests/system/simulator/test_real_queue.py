"""The simulator against routing's own classes, called one by one: the same jobs start, at the same time and place."""

import heapq
from dataclasses import dataclass, field

import pytest
from redis import Redis

from app.simulate import Scenario, run
from routing.config import RoutingSettings
from routing.queue.fleets import Fleets
from routing.queue.leases import Lease, Leases
from routing.queue.queues import Offer, Queues
from routing.queue.slots import Slots
from routing.scripts import make_scripts
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.redis.keys import Keys
from tests.app.simulate.scenarios import POLICIES, T0, a_catalog, a_scenario, poisson
from tests.support.ends import release
from tests.support.fleet_queue import FRAGMENTS
from tools.cluster.direct_starts import claim_offer

FLEET = "zimg"


@dataclass
class Plain:
    """One fleet's scenario without any haste: each act is a round trip, as a worker would make it."""

    redis: Redis
    scenario: Scenario
    ends: list[tuple[int, str, Offer]] = field(default_factory=list)
    runs: dict[int, tuple[int, int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scripts = make_scripts(self.redis, Keys("plain"), FRAGMENTS)
        settings = RoutingSettings(lease_ms=10**12)  # Nothing here renews a lease.
        self.queues, self.leases = Queues(scripts, settings), Leases(scripts, settings)
        self.slots, self.fleets = Slots(scripts, settings), Fleets(scripts, settings)

    def play(self) -> dict[int, tuple[int, int, str]]:
        """Number of a job -> start, end, slot."""
        self.clock(T0)
        self.fleets.begin_rebuild([FLEET], "")
        self.fleets.open({FLEET: 1})
        self.slots.sync_all([FLEET], self.scenario.catalog)
        for number, arrival in enumerate(self.scenario.arrivals, 1):
            self.go_on(arrival.at_ms)
            self.clock(arrival.at_ms)
            job = QueuedJob(
                str(number), number, arrival.model, arrival.priority, arrival.tenant, arrival.at_ms, arrival.constraints
            )
            for offer in self.enqueue(job):
                claimed = claim_offer(self.leases, offer, "w1")
                assert claimed is not None
                self.start(claimed, arrival.at_ms)
        self.go_on(None)
        return self.runs

    def go_on(self, till_ms: int | None) -> None:
        """Until the next arrival, or until nothing runs."""
        while self.ends and (till_ms is None or self.ends[0][0] <= till_ms):
            now, _, ended = heapq.heappop(self.ends)
            self.clock(now)
            held = Lease(FLEET, ended.job_id, ended.lease, ended.owner, ended.slot)
            released, offers = release(self.leases, held, return_to_lane=False, claimant="w1", signal="ok")
            assert released
            for offer in offers:
                assert offer.owner == "w1"
                self.start(offer, now)

    def start(self, offer: Offer, now_ms: int) -> None:
        number = int(offer.job_id)
        end = now_ms + self.scenario.arrivals[number - 1].run_ms
        assert number not in self.runs
        self.runs[number] = (now_ms, end, offer.slot)
        heapq.heappush(self.ends, (end, offer.job_id, offer))

    def enqueue(self, job: QueuedJob) -> list[Offer]:
        return self.queues.enqueue(FLEET, [job])

    def clock(self, now_ms: int) -> None:
        self.redis.set(f"clock:{{{FLEET}}}", now_ms)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("per_s", [0.3, 0.7])
def test_a_simulation_does_what_single_calls_do(client, policy, per_s):
    arrivals = poisson(21, 600, per_s, mean_s=10, tenants=6, priorities=9)
    scenario = a_scenario(arrivals, a_catalog(3, servers=2, policy=policy))
    simulated = run(scenario, redis=client)
    client.flushall()
    assert {job.number: (job.start_ms, job.end_ms, job.slot) for job in simulated.jobs} == Plain(
        client, scenario
    ).play()
