"""Releases that one call makes do what as many calls do, one after another, in any room.

Two rooms are brought to the same state by generated acts; then the same releases, among them such as must be refused,
are one call in the first and a call each in the second.  SLOTKEEPER_TEST_EXAMPLES makes the search longer.
"""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from slotkeeper.registry.policies import POLICIES
from tests.routing.queue.search import search
from tests.support.room import LEASE_MS, OFFER_MS, ROOM, Job, Offered, Room, Server

MODELS, TENANTS, CONSTRAINTS = ("zimg", "flux"), ("t1", "t2", "t3"), ("", "", "gpu=A100")
SERVERS = (
    Server("gpu", 3, models=MODELS, attributes={"gpu": "A100"}),
    Server("one", 1),
    Server("big", 4, models=("flux", "zimg"), weight=2.0),
)


class Twins:
    """Two rooms to which the same is done, and what is known of their offers."""

    def __init__(self, client: Redis, policy: str, random: Random) -> None:
        client.flushall()
        self.random, self.known, self.jobs = random, list[tuple[Offered, str]](), 0
        self.rooms = Room(client, prefix="one"), Room(client, prefix="two")
        for model in MODELS:
            limit, failures = random.choice((None, None, 1, 2)), random.choice((20, 1, 2))
            affinity = random.choice((0.0, 0.0, 5.0))
            for room in self.rooms:
                room.configure(model, policy=policy, tenant_slots=limit, breaker_failures=failures, affinity=affinity)
        for room in self.rooms:
            room.with_servers(*SERVERS)

    def both(self, act: str, *args: Any, **how: Any) -> Any:
        one, two = (getattr(room, act)(*args, **how) for room in self.rooms)
        assert one == two
        return one

    def live(self) -> None:
        """Jobs come, are offered and claimed, and runs end; time goes by, also so far that cooldowns are over."""
        random = self.random
        for _ in range(random.randint(3, 12)):
            match random.choice(("enqueue", "enqueue", "offer", "offer", "claim", "end", "end", "time", "come back")):
                case "enqueue":
                    jobs = [self._job() for _ in range(random.randint(1, 6))]
                    self._heard(self.both("enqueue", *jobs, limit=random.choice((0, 2, 8))))
                case "offer":
                    self._heard(self.both("offer", random.randint(0, 6), claimant=random.choice(("", "w1"))))
                case "claim" if self.known:
                    offer, _ = random.choice(self.known)
                    if self.both("claim", offer, "w2") == "claimed":
                        self.known.append((offer, "w2"))
                case "end" if self.known:
                    self._heard(self.both("release_all", [self._release(0, *random.choice(self.known))])[0][1])
                case "time":
                    self.both("later", random.choice((1, 400, 6_000)))
                case "come back" if self.known:  # to a slot that was given away
                    offer = random.choice(self.known)[0]
                    job = Job(f"back{self.jobs}", 1000 + self.jobs, model=offer.model)
                    self.jobs += 1
                    self.both("restore", (job, f"l{self.jobs}", "w1", offer.slot))
                    self.known.append((offer._replace(job=job.id, lease=f"l{self.jobs}"), "w1"))

    def end_together(self) -> None:
        """Some of the runs that are under way, in any order, and among them what must be refused."""
        held = [
            (Offered(job, lease, slot, "", "", 0, owner), owner) for job, lease, owner, slot in self.rooms[0].held()
        ]
        ending = self.random.sample(held, self.random.randint(0, len(held))) + self.known[: self.random.randint(0, 2)]
        self.random.shuffle(ending)
        rows = [self._release(n, *one) for n, one in enumerate(ending)]
        one, two = self.rooms
        joined, single = one.release_all(rows), [two.release_all([row])[0] for row in rows]
        assert joined == single
        for _, offers in joined:
            self._heard(offers)
        assert self._standing(one) == self._standing(two)

    def _job(self) -> Job:
        random, self.jobs = self.random, self.jobs + 1
        model, tenant, constraints = random.choice(MODELS), random.choice(TENANTS), random.choice(CONSTRAINTS)
        created = self.rooms[0].now - random.randint(0, 9_000)
        return Job(f"j{self.jobs}", self.jobs, random.choice((1, 5, 5, 9)), model, tenant, created, constraints)

    def _heard(self, offers: list[Offered]) -> None:
        self.known += [(offer, offer.owner) for offer in offers]

    def _release(self, n: int, offer: Offered, owner: str) -> list[Any]:
        """By its owner, or by somebody else."""
        random = self.random
        holder = owner if random.random() < 0.9 else "nobody"
        draining = [f"{offer.job}~{self.jobs}.{n}", "withheld", "d"] if random.random() < 0.1 else [""] * 3
        outcome, cooldown_ms = (
            random.choice(("ok", "ok", "refused", "failed", "busy", "")),
            random.choice((0, 0, 0, 500)),
        )
        offering = [f"p{self.jobs}.{n}", random.choice((0, 1, 8)), random.choice((0, 1, 3, ROOM)), OFFER_MS]
        claimant = random.choice(("", "w1", "w1"))
        row = [offer.job, offer.lease, holder, int(random.random() < 0.2), cooldown_ms, outcome]
        return [*row, *draining, *offering, claimant, LEASE_MS]

    @staticmethod
    def _standing(room: Room) -> dict[str, Any]:
        """All that Redis holds of it, by names that do not tell which of the two it is."""
        own = room.key("")
        return {name.removeprefix(own): text for name, text in room.dump().items() if name.startswith(own)}


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
