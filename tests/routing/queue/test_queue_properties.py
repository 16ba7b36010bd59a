"""The queue in Redis against a plain model of it, over generated sequences of acts.

Acts come from holders and from other workers, in time and too late, and Redis is lost in between.  The queue must
answer as the model answers, and hold what the model holds.  SLOTKEEPER_TEST_EXAMPLES makes the search longer.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import Redis

from routing.queue.slots import model_rules
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.snapshot import Model as CatalogModel
from tests.routing.queue.search import search
from tests.support.fleet_queue import (
    EPOCH,
    FRAGMENTS,
    LEASE_MS,
    OFFER_MS,
    START_MS,
    FleetQueue,
    Job,
    Offered,
    Server,
    fragments_with_limits,
)

MODELS = {"gpu-a": ("zimg",), "gpu-slot3": ("flux", "zimg")}
SLOTS = {"gpu-a": 2, "gpu-slot3": 1}

owners = st.sampled_from(("", "w1", "w2"))
workers = st.sampled_from(("w1", "w2"))
limits = st.integers(0, 3)
capacities = st.sampled_from((0, 1, 2, 9))  # runs that the workers can take


@dataclass
class Lease:
    """A lease as the model knows it."""

    job: Job
    name: str
    owner: str
    slot: str
    expires: int
    number: int  # of its offer; 0: it was offered again
    cancel: bool = False
    again: bool = False  # enqueued while it was held: it goes to its place when the lease is dropped


@dataclass
class Model:
    """The expected state of the queue: plain sets, and the rules in their shortest form."""

    now: int = START_MS
    is_open: bool = False
    version: int = 0
    online: set[str] = field(default_factory=lambda: set(SLOTS))
    waiting: dict[str, Job] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    free: dict[str, int] = field(default_factory=dict)
    cooling: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, str] = field(default_factory=dict)  # server -> the model that it ran last

    def server(self, slot: str) -> str:
        return slot.rsplit("-slot", 1)[0]

    def slots(self) -> list[str]:
        return [f"{server}-slot{n}" for server in sorted(self.online) for n in range(SLOTS[server])]

    def held(self, offer: Offered, owner: str) -> Lease | None:
        lease = self.leases.get(offer.job)
        return lease if lease and (lease.name, lease.owner) == (offer.lease, owner) else None

    def sync(self) -> None:
        """Every slot of an online server is leased, in cooldown or free; others are leased at most."""
        wanted, leased = set(self.slots()), {lease.slot for lease in self.leases.values()}
        self.free = {slot: since for slot, since in self.free.items() if slot in wanted}
        self.cooling = {slot: until for slot, until in self.cooling.items() if slot in wanted}
        for slot in wanted - leased - set(self.free) - set(self.cooling):
            self.free[slot] = self.now

    def drop(self, lease: Lease, cooldown_ms: int, *, return_to_lane: bool, ended_well: bool = False) -> None:
        del self.leases[lease.job.id]
        server = self.server(lease.slot)
        if not ended_well and len(MODELS[server]) > 1 and self.loaded.get(server) == lease.job.model:
            del self.loaded[server]
        if return_to_lane or lease.again:
            self.waiting[lease.job.id] = lease.job
        else:
            self.gone.add(lease.job.id)
        if server in self.online:
            place, when = (self.cooling, self.now + cooldown_ms) if cooldown_ms else (self.free, self.now)
            place[lease.slot] = when

    def open_offers(self) -> list[Lease]:
        """Return the leases that no worker has claimed, the oldest first."""
        found = [lease for lease in self.leases.values() if not lease.owner]
        return sorted(found, key=lambda lease: (lease.number, lease.job.id))

    def expected_offers(self, limit: int, claimant: str = "", capacity: int = 9) -> list[tuple[Job, str, str]]:
        """(job, slot, owner) of each offer that is due: the first job that a free slot can run, there, and so on."""
        if not self.is_open:
            return []
        for slot in [slot for slot, until in self.cooling.items() if until <= self.now]:
            del self.cooling[slot]
            self.free[slot] = self.now
        limit = min(limit, max(capacity - len(self.open_offers()), 0) + bool(claimant))
        due: list[tuple[Job, str, str]] = []
        free = sorted(self.free, key=lambda slot: (self.free[slot], slot))
        taken = Counter(self.server(lease.slot) for lease in self.leases.values())
        loaded = dict(self.loaded)
        for job in sorted(self.waiting.values(), key=lambda job: (job.priority, job.seq)):
            able = [slot for slot in free if job.model in MODELS[self.server(slot)]]
            if len(due) < limit and able:
                slot = min(able, key=lambda slot: self._score(self.server(slot), job.model, taken, loaded))
                free.remove(slot)
                taken[self.server(slot)] += 1
                loaded[self.server(slot)] = job.model
                due.append((job, slot, "" if due else claimant))
        return due

    @staticmethod
    def _score(server: str, model: str, taken: Mapping[str, int], loaded: Mapping[str, str]) -> float:
        """The less of it is taken, the better, and best with the model loaded."""
        return taken[server] / SLOTS[server] + (loaded.get(server, model) != model)

    def take(self, offer: Offered) -> None:
        job = self.waiting.pop(offer.job)
        del self.free[offer.slot]
        self.loaded[offer.server] = job.model
        ttl = LEASE_MS if offer.owner else OFFER_MS
        self.leases[job.id] = Lease(job, offer.lease, offer.owner, offer.slot, self.now + ttl, offer.number)


class RoomMachine(RuleBasedStateMachine):
    """Apply each act to the queue and to the model, and compare them."""

    known = Bundle("known")  # every offer that was made, however old

    def __init__(self, client: Redis, fragments: Mapping[str, str] = FRAGMENTS) -> None:
        super().__init__()
        client.flushall()
        self.queue, self.model = FleetQueue(client, fragments=fragments), Model()
        for name in (
            "zimg",
            "flux",
        ):  # Affinity would let jobs be overtaken; tests/routing/queue/test_policies.py tests it.
            self.queue.rules |= model_rules(CatalogModel(name, "zimg", {}, ModelConfig(affinity=0)))
        self.jobs: list[Job] = []
        self.names: set[str] = set()

    # -- the acts ----------------------------------------------------------------------------------------------

    @initialize(target=known)
    def begin(self):
        self._sync()
        self._open()
        return multiple()

    @rule(target=known, priority=st.integers(1, 9), model=st.sampled_from(("zimg", "zimg", "flux")), limit=limits)
    def enqueue(self, priority, model, limit):
        job = Job(f"j{len(self.jobs)}", len(self.jobs) + 1, priority, model)
        self.jobs.append(job)
        return self._enqueue([job], limit)

    @precondition(lambda self: self.jobs)
    @rule(target=known, data=st.data(), limit=limits)
    def enqueue_again(self, data, limit):
        """Enqueue as reconcile does: waiting jobs stay in place, running jobs get their place after the release."""
        there = [job for job in self.jobs if job.id not in self.model.gone]
        if not there:
            return multiple()
        chosen = data.draw(st.lists(st.sampled_from(there), min_size=1, max_size=4, unique_by=lambda job: job.id))
        return self._enqueue(chosen, limit)

    @rule(target=known, limit=limits, capacity=capacities)
    def sweep(self, limit, capacity):
        return self._taken(self.queue.offer(limit, capacity), self.model.expected_offers(limit, capacity=capacity))

    @rule(target=known, limit=limits, capacity=capacities, claimant=workers)
    def look_for_work(self, limit, capacity, claimant):
        """The oldest open offer comes before any new one."""
        offers, oldest = self.queue.offer(limit, capacity, claimant), self.model.open_offers()[:limit][:1]
        for lease in oldest:
            first = offers.pop(0)
            assert (first.job, first.lease, first.slot, first.number) == (
                lease.job.id,
                lease.name,
                lease.slot,
                lease.number,
            )
            lease.owner, lease.expires = claimant, self.model.now + LEASE_MS
        expected = self.model.expected_offers(limit - len(oldest), "" if oldest else claimant, capacity)
        return self._taken(offers, expected)

    @rule(offer=known, owner=workers)
    def claim(self, offer, owner):
        lease = self.model.held(offer, "")
        assert self.queue.claim(offer, owner) == ("claimed" if lease else "lost")
        if lease:
            lease.owner, lease.expires = owner, self.model.now + LEASE_MS

    @rule(offer=known, resumes=st.booleans())
    def keep(self, offer, resumes):
        lease = self.model.held(offer, "")
        closed = lease and not resumes and self.model.server(lease.slot) not in self.model.online
        assert self.queue.keep(offer, resumes=resumes) == ("closed" if closed else "kept" if lease else "lost")
        if lease and not closed:
            lease.expires = self.model.now + OFFER_MS

    @rule(offer=known, owner=owners)
    def renew(self, offer, owner):
        lease = self.model.held(offer, owner)
        answer = "cancel" if lease and lease.cancel else "renewed" if lease else "lost"
        assert self.queue.renew(owner, offer) == [answer]
        if lease:
            lease.expires = self.model.now + LEASE_MS

    @rule(
        target=known,
        offer=known,
        owner=owners,
        return_to_lane=st.booleans(),
        ended_well=st.booleans(),
        cooldown_ms=st.sampled_from((0, 0, 500)),
        limit=limits,
        capacity=capacities,
        claimant=st.sampled_from(("", "w1")),
    )
    def release(self, offer, owner, return_to_lane, ended_well, cooldown_ms, limit, capacity, claimant):
        lease = self.model.held(offer, owner)
        if lease:
            self.model.drop(lease, cooldown_ms, return_to_lane=return_to_lane, ended_well=ended_well)
        how = {
            "signal": "ok" if ended_well else "",
            "return_to_lane": return_to_lane,
            "cooldown_ms": cooldown_ms,
            "limit": limit,
            "capacity": capacity,
            "claimant": claimant,
        }
        answer, offers = self.queue.release(offer, owner, **how)
        assert answer == ("released" if lease else "lost")
        return self._taken(offers, self.model.expected_offers(limit, claimant, capacity))

    @rule(target=known, offer=known, owner=owners, new_lease_owner=owners, only_expired=st.booleans())
    def seize(self, offer, owner, new_lease_owner, only_expired):
        lease = self.model.held(offer, owner)
        if lease and only_expired and lease.expires > self.model.now:
            lease = None
        name = f"s{len(self.names)}"
        answer = self.queue.seize(offer, owner, new_lease_owner, new_lease=name, only_expired=only_expired)
        assert answer == ("seized" if lease else "lost")
        if not lease:
            return multiple()
        name = f"{EPOCH}.{name}"
        self.names.add(name)
        lease.name, lease.owner, lease.expires = name, new_lease_owner, self.model.now + LEASE_MS
        lease.number = lease.number if new_lease_owner else 0
        return offer._replace(lease=name, owner=new_lease_owner)

    @rule(ms=st.sampled_from((1, 500, LEASE_MS - 1, LEASE_MS, OFFER_MS)))
    def time_goes_by(self, ms):
        self.queue.later(ms)
        self.model.now += ms

    @rule(target=known, crashed=st.booleans())
    def reap(self, crashed):
        """What the reaper does with every expired lease; a crashed job goes back to its place."""
        expired = sorted(
            (lease for lease in self.model.leases.values() if lease.expires <= self.model.now),
            key=lambda lease: (lease.expires, lease.job.id),
        )
        found = self.queue.expired()
        assert found == [[lease.job.id, lease.name, lease.owner, lease.slot] for lease in expired]
        made: list[Offered] = []
        for lease in expired:
            offer = Offered(lease.job.id, lease.name, lease.slot, "", lease.job.model, 0, lease.owner)
            if lease.owner:
                assert (
                    self.queue.seize(offer, lease.owner, "reaper", new_lease=f"r{lease.name}", only_expired=True)
                    == "seized"
                )
                offer, lease.owner = offer._replace(lease=f"{EPOCH}.r{lease.name}"), "reaper"
            return_to_lane = crashed or not lease.owner
            self.model.drop(lease, 0, return_to_lane=return_to_lane)
            answer, offers = self.queue.release(offer, lease.owner, return_to_lane=return_to_lane)
            assert answer == "released"
            self._taken(offers, self.model.expected_offers(8))
            made += offers
        return multiple(*made)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def withdraw(self, data):
        job = data.draw(st.sampled_from(self.jobs))
        lease = self.model.leases.get(job.id)
        untaken = lease and not lease.owner and lease.number
        answer = "withdrawn" if job.id in self.model.waiting else "freed" if untaken else "asked" if lease else "absent"
        assert self.queue.withdraw(job) == answer
        if self.model.waiting.pop(job.id, None):
            self.model.gone.add(job.id)
        if untaken:
            self.model.drop(lease, 0, return_to_lane=False)
        elif lease:
            lease.cancel, lease.again = True, False

    @rule(server=st.sampled_from(sorted(SLOTS)))
    def pause_or_resume(self, server):
        self.model.online ^= {server}
        self._sync()

    @rule(target=known, late=st.booleans())
    def redis_is_lost(self, late):
        """Empty Redis and rebuild the queue from the database: running jobs with their leases, the rest in order."""
        self.queue.client.flushall()
        self.queue.set_clock(self.model.now)
        before, self.model.leases = self.model.leases, {}
        running = [lease for lease in before.values() if lease.owner]
        self.model.waiting |= {lease.job.id: lease.job for lease in before.values() if not lease.owner}
        self.model.free, self.model.cooling, self.model.loaded, self.model.is_open = {}, {}, {}, False
        if late:  # a submit in between
            self._enqueue_new_job()
        assert self.queue.restore(*[(lease.job, lease.name, lease.owner, lease.slot) for lease in running]) == len(
            running
        )
        for lease in running:
            lease.expires, lease.number = self.model.now + LEASE_MS, 0
            lease.cancel = lease.again = False
            self.model.leases[lease.job.id] = lease
        self._sync()
        queued = sorted(self.model.waiting.values(), key=lambda job: job.seq)
        assert self.queue.enqueue(*queued) == []
        self._open()
        return self._taken(self.queue.offer(), self.model.expected_offers(256))

    # -- what must hold after every act --------------------------------------------------------------------------

    @invariant()
    def the_queue_equals_the_model(self):
        state = _QueueState(self.queue)
        model = self.model
        by_lane: dict[str, list[Job]] = {}
        for job in model.waiting.values():
            by_lane.setdefault(job.lane, []).append(job)
        # ORDER-1: inside a lane by acceptance, lanes by priority and acceptance
        lanes = {lane: [job.id for job in sorted(jobs, key=lambda job: job.seq)] for lane, jobs in by_lane.items()}
        assert state.lanes == lanes
        assert state.order == [
            lane
            for _, lane in sorted(
                (min((job.priority, job.seq) for job in jobs), lane) for lane, jobs in by_lane.items()
            )
        ]
        assert state.free == model.free and state.cooling == model.cooling
        assert state.slots == {lease.slot: job for job, lease in model.leases.items()}
        assert state.expiries == {job: lease.expires for job, lease in model.leases.items()}
        assert state.open == [lease.job.id for lease in model.open_offers()]

    @invariant()
    def lease_1_one_lease_for_each_job_and_each_slot(self):
        slots = [lease.slot for lease in self.model.leases.values()]
        assert len(set(slots)) == len(slots)
        names = [lease.name for lease in self.model.leases.values()]
        assert len(set(names)) == len(names)

    @invariant()
    def slot_1_no_server_has_more_leases_than_slots(self):
        for server, slots in SLOTS.items():
            assert sum(self.model.server(lease.slot) == server for lease in self.model.leases.values()) <= slots

    @invariant()
    def no_job_is_lost_or_doubled(self):
        places = [self.model.waiting.keys(), self.model.leases.keys(), self.model.gone]
        assert sum(map(len, places)) == len(self.jobs)
        assert set().union(*places) == {job.id for job in self.jobs}

    # -- helpers -------------------------------------------------------------------------------------------------

    def _enqueue(self, jobs: list[Job], limit: int):
        new = [job for job in jobs if job.id not in self.model.waiting and job.id not in self.model.leases]
        self.model.waiting |= {job.id: job for job in new}
        for lease in [self.model.leases[job.id] for job in jobs if job.id in self.model.leases]:
            lease.again = lease.again or bool(lease.owner)
        added, offers = self.queue.enqueued(*jobs, limit=limit)
        assert added == len(new)
        return self._taken(offers, self.model.expected_offers(limit))

    def _enqueue_new_job(self) -> None:
        job = Job(f"j{len(self.jobs)}", len(self.jobs) + 1, 1)
        self.jobs.append(job)
        self._enqueue([job], 8)

    def _taken(self, offers: list[Offered], expected: list[tuple[Job, str, str]]):
        assert [(offer.job, offer.slot, offer.owner) for offer in offers] == [
            (job.id, slot, owner) for job, slot, owner in expected
        ]
        for offer in offers:
            assert offer.lease not in self.names, "a lease's name is used once"
            self.names.add(offer.lease)
            self.model.take(offer)
        return multiple(*offers)

    def _sync(self) -> None:
        self.model.version += 1
        self.model.sync()
        servers = [
            Server(name, slots, "online" if name in self.model.online else "paused", MODELS[name])
            for name, slots in SLOTS.items()
        ]
        assert self.queue.sync(*servers, version=self.model.version) == "synced"

    def _open(self) -> None:
        assert self.queue.open() == "opened"
        self.model.is_open = True


class _QueueState:
    """What stands in Redis, read in two trips."""

    def __init__(self, queue: FleetQueue) -> None:
        pipe = queue.client.pipeline(transaction=False)
        for name in ("classes:|zimg", "classes:|flux", "free", "cooling", "leases"):
            pipe.zrange(queue.key(name), 0, -1, withscores=True)
        pipe.hgetall(queue.key("slots"))
        pipe.zrange(queue.key("meta:open"), 0, -1)
        zimg, flux, free, cooling, leases, slots, still_open = pipe.execute()
        self.open = [job.decode() for job in still_open]
        self.order = [lane.decode() for lane, _ in sorted([*zimg, *flux], key=lambda row: row[1])]
        self.free, self.cooling, self.expiries = (
            {member.decode(): int(score) for member, score in rows} for rows in (free, cooling, leases)
        )
        self.slots = {slot.decode(): job.decode() for slot, job in slots.items()}
        for lane in self.order:
            pipe.zrange(queue.key(f"lanes:{lane}"), 0, -1)
        self.lanes = {
            lane: [job.decode().split("@")[0] for job in jobs]
            for lane, jobs in zip(self.order, pipe.execute(), strict=True)
        }


@pytest.mark.timeout(600)  # A failure is made as small as can be first.
def test_the_queue_equals_its_model_after_each_act(client: Redis):
    run_state_machine_as_test(lambda: RoomMachine(client), settings=search(20, stateful_step_count=40))


@pytest.mark.timeout(600)
def test_the_queue_makes_the_same_offers_if_very_many_groups_wait(client: Redis):
    fragments = fragments_with_limits(many_groups=0, kinds_at_once=16)
    run_state_machine_as_test(lambda: RoomMachine(client, fragments), settings=search(20, stateful_step_count=40))
