"""Releases in one call have the same effect as one call for each, one after another, in any state of the queue.

Generated acts bring two queues to the same state.  Then the same releases, and some that Redis must refuse, are
one call in the first queue and a call each in the second.  SLOTKEEPER_TEST_EXAMPLES makes the search longer.
"""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from slotkeeper.registry.policies import POLICIES
from tests.routing.queue.search import search
from tests.support.fleet_queue import CAPACITY, LEASE_MS, OFFER_MS, FleetQueue, Job, Offered, Server

MODELS, TENANTS, CONSTRAINTS = ("zimg", "flux"), ("t1", "t2", "t3"), ("", "", "gpu=A100")
SERVERS = (
    Server("gpu", 3, models=MODELS, attributes={"gpu": "A100"}),
    Server("one", 1),
    Server("big", 4, models=("flux", "zimg"), weight=2.0),
)


class Twins:
    """Two queues that receive the same acts, and the offers that both of them made."""

    def __init__(self, client: Redis, policy: str, random: Random) -> None:
        client.flushall()
        self.random, self.known, self.jobs = random, list[tuple[Offered, str]](), 0
        self.queues = FleetQueue(client, prefix="one"), FleetQueue(client, prefix="two")
        for model in MODELS:
            limit, failures = random.choice((None, None, 1, 2)), random.choice((20, 1, 2))
            affinity = random.choice((0.0, 0.0, 5.0))
            for queue in self.queues:
                queue.configure(model, policy=policy, tenant_slots=limit, breaker_failures=failures, affinity=affinity)
        for queue in self.queues:
            queue.with_servers(*SERVERS)

    def both(self, act: str, *args: Any, **how: Any) -> Any:
        one, two = (getattr(queue, act)(*args, **how) for queue in self.queues)
        assert one == two
        return one

    def live(self) -> None:
        """Enqueue, offer, claim and end jobs at random, and let time pass, also until cooldowns have ended."""
        random = self.random
        for _ in range(random.randint(3, 12)):
            match random.choice(("enqueue", "enqueue", "offer", "offer", "claim", "end", "end", "time", "come back")):
                case "enqueue":
                    jobs = [self._job() for _ in range(random.randint(1, 6))]
                    self._add_offers(self.both("enqueue", *jobs, limit=random.choice((0, 2, 8))))
                case "offer":
                    self._add_offers(self.both("offer", random.randint(0, 6), claimant=random.choice(("", "w1"))))
                case "claim" if self.known:
                    offer, _ = random.choice(self.known)
                    if self.both("claim", offer, "w2") == "claimed":
                        self.known.append((offer, "w2"))
                case "end" if self.known:
                    self._add_offers(self.both("release_all", [self._release(0, *random.choice(self.known))])[0][1])
                case "time":
                    self.both("later", random.choice((1, 400, 6_000)))
                case "come back" if self.known:  # to a slot that was given away
                    offer = random.choice(self.known)[0]
                    job = Job(f"back{self.jobs}", 1000 + self.jobs, model=offer.model)
                    self.jobs += 1
                    self.both("restore", (job, f"l{self.jobs}", "w1", offer.slot))
                    self.known.append((offer._replace(job=job.id, lease=f"l{self.jobs}"), "w1"))

    def end_together(self) -> None:
        """End some of the runs in any order, together with releases that must be refused."""
        held = [
            (Offered(job, lease, slot, "", "", 0, owner), owner) for job, lease, owner, slot in self.queues[0].held()
        ]
        ending = self.random.sample(held, self.random.randint(0, len(held))) + self.known[: self.random.randint(0, 2)]
        self.random.shuffle(ending)
        rows = [self._release(n, *one) for n, one in enumerate(ending)]
        one, two = self.queues
        joined, single = one.release_all(rows), [two.release_all([row])[0] for row in rows]
        assert joined == single
        for _, offers in joined:
            self._add_offers(offers)
        assert self._redis_state(one) == self._redis_state(two)

    def _job(self) -> Job:
        random, self.jobs = self.random, self.jobs + 1
        model, tenant, constraints = random.choice(MODELS), random.choice(TENANTS), random.choice(CONSTRAINTS)
        created = self.queues[0].now - random.randint(0, 9_000)
        return Job(f"j{self.jobs}", self.jobs, random.choice((1, 5, 5, 9)), model, tenant, created, constraints)

    def _add_offers(self, offers: list[Offered]) -> None:
        self.known += [(offer, offer.owner) for offer in offers]

    def _release(self, n: int, offer: Offered, owner: str) -> list[Any]:
        """Return a release by the owner of the lease, or by another worker."""
        random = self.random
        holder = owner if random.random() < 0.9 else "nobody"
        draining = [f"{offer.job}~{self.jobs}.{n}", "withheld", "d"] if random.random() < 0.1 else [""] * 3
        outcome, cooldown_ms = (
            random.choice(("ok", "ok", "refused", "failed", "busy", "")),
            random.choice((0, 0, 0, 500)),
        )
        offering = [f"p{self.jobs}.{n}", random.choice((0, 1, 8)), random.choice((0, 1, 3, CAPACITY)), OFFER_MS]
        claimant = random.choice(("", "w1", "w1"))
        row = [offer.job, offer.lease, holder, int(random.random() < 0.2), cooldown_ms, outcome]
        return [*row, *draining, *offering, claimant, LEASE_MS]

    @staticmethod
    def _redis_state(queue: FleetQueue) -> dict[str, Any]:
        """Return all that Redis holds of the queue, by names without the prefix of the queue."""
        own = queue.key("")
        return {name.removeprefix(own): text for name, text in queue.dump().items() if name.startswith(own)}


@pytest.mark.parametrize("policy", POLICIES)
def test_releases_of_one_call_do_what_as_many_calls_do(client: Redis, policy: str):
    @search(10)
    @given(st.randoms(use_true_random=True))
    def play(random: Random) -> None:
        twins = Twins(client, policy, random)
        for _ in range(4):
            twins.live()
            twins.end_together()

    play()
