"""The policies over generated acts: after each act, derived data equal the values computed from the plain data.

Plain data are the jobs in their lanes, the leases and the clock; derived data are indexes, keys, counters and offers.
Two models share three servers, policies and limits change while jobs wait and run, and Redis is lost now and then.
SLOTKEEPER_TEST_EXAMPLES makes the search longer.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import Redis

from routing.admission.constraints import meets
from slotkeeper.redis.keys import FLEET_KEYS
from slotkeeper.registry.values import Server as CatalogServer
from tests.routing.queue.search import search
from tests.support.fleet_queue import EPOCH, FRAGMENTS, FleetQueue, Job, Offered, Server, fragments_with_limits

MODELS = ("flux", "zimg")
TENANTS = ("t1", "t2", "a b%|é")
SERVERS = {
    "both": Server("both", 2, models=MODELS, attributes={"gpu": "A100"}),
    "gpu-slot3": Server("gpu-slot3", 1, models=("zimg",)),
    "x.y": Server("x.y", 2, models=("flux",), attributes={"gpu": "T4", "flux:gpu": "A100"}),
}
CONSTRAINTS = ("", "gpu=A100")
SHARE = 1 << 49
EPOCH_OF_DEADLINES_MS = 1_577_836_800_000  # 2020

chosen = st.sampled_from


@dataclass
class Config:
    """A model's, as it was set last."""

    policy: str = "priority"
    tier_head_start: float = 1.0
    tenant_slots: int | None = None
    affinity: float = 0.0
    breaker_failures: int = 2
    weights: dict[str, float] = field(default_factory=dict)
    state: str = "online"


class QueueState:
    """The state of a queue in Redis, read in two round trips."""

    def __init__(self, queue: FleetQueue) -> None:
        names = [key.decode() for key in queue.client.keys(f"{queue.key('')}*")]
        pipe, prefix = queue.client.pipeline(transaction=False), queue.key("")
        reads = {"hash": pipe.hgetall, "list": lambda key: pipe.lrange(key, 0, -1), "set": pipe.smembers}
        named = {queue.key(name): name for name in FLEET_KEYS}
        own = {name: named.get(name, name.removeprefix(prefix)) for name in names}
        kinds = {name: self._kind(own[name]) for name in names}
        for name, kind in kinds.items():
            if kind == "zset":
                pipe.zrange(name, 0, -1, withscores=True)
            else:
                reads[kind](name)
        self._all = {own[name]: row for name, row in zip(kinds, pipe.execute(), strict=True)}

    @staticmethod
    def _kind(name: str) -> str:
        if name in ("meta:unsorted", "meta:ungrouped"):
            return "list"
        if name.startswith("kinds:") or (name.startswith("groups:") and "|" not in name):
            return "set"
        if name == "groups" or (name.startswith("lanes:") and name.count("|") == 1):
            return "hash"
        zsets = (
            "classes:",
            "groups:",
            "lanes:",
            "tags:",
            "free",
            "cooling",
            "meta:open",
            "meta:ready",
            "stats:failed:",
        )
        return "zset" if name == "leases" or name.startswith(zsets) else "hash"

    def hash(self, name: str) -> dict[str, str]:
        return {key.decode(): value.decode() for key, value in self._all.get(name, {}).items()}

    def scores(self, name: str) -> dict[str, float]:
        return {member.decode(): score for member, score in self._all.get(name, [])}

    def members(self, name: str) -> set[str]:
        return {member.decode() for member in self._all.get(name, ())}

    def below(self, prefix: str) -> list[str]:
        """What follows the prefix in the names of keys."""
        return [name.removeprefix(prefix) for name in self._all if name.startswith(prefix)]


class PoliciesMachine(RuleBasedStateMachine):
    """Acts, and what must hold after each."""

    def __init__(self, client: Redis, fragments: Mapping[str, str] = FRAGMENTS) -> None:
        super().__init__()
        client.flushall()
        self.queue = FleetQueue(client, fragments=fragments)
        self.jobs: dict[str, Job] = {}
        self.held: dict[str, Offered] = {}
        self.configs = {model: Config() for model in MODELS}
        self.servers = dict.fromkeys(SERVERS, "online")
        self.filled = False  # whether the last act offered all that it could
        self.virtual: dict[str, float] = {}
        self.turns: dict[str, tuple[float, float]] = {}  # lane -> key and tag, under fair
        self.names = 0

    @initialize()
    def begin(self):
        for model in MODELS:
            self._configure(model)
        self._sync()
        self.queue.open()

    # -- jobs come and go ----------------------------------------------------------------------------------------

    @rule(
        model=chosen(MODELS),
        tenant=chosen(TENANTS),
        priority=chosen((1, 5, 9)),
        constraints=chosen(CONSTRAINTS),
        ttls=st.lists(chosen((0, 0, 1000, 5000, 60_000)), min_size=1, max_size=3),
        limit=chosen((0, 8, 8)),
    )
    def enqueue(self, model, tenant, priority, constraints, ttls, limit):
        jobs = [self._job(model, tenant, priority, constraints, ttl_ms) for ttl_ms in ttls]
        self._took(self.queue.enqueue(*jobs, limit=limit))
        self.filled = limit > 0

    @rule()
    def sweep(self):
        self._took(self.queue.offer())
        self.filled = True

    @precondition(lambda self: self.held)
    @rule(data=st.data(), signal=chosen(("ok", "ok", "refused", "failed", "busy", "")), return_to_lane=st.booleans())
    def release(self, data, signal, return_to_lane):
        offer = self.held.pop(data.draw(chosen(sorted(self.held))))
        return_to_lane = return_to_lane or signal == "busy"
        if not return_to_lane:
            del self.jobs[offer.job]
        answer, offers = self.queue.release(
            offer, offer.owner, return_to_lane=return_to_lane, cooldown_ms=500 if signal == "busy" else 0, signal=signal
        )
        assert answer == "released"
        self._took(offers)
        self.filled = True

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def withdraw(self, data):
        job = self.jobs[data.draw(chosen(sorted(self.jobs)))]
        held = self.held.get(job.id)
        answer = "withdrawn" if held is None else "asked" if held.owner else "freed"
        assert self.queue.withdraw(job) == answer
        if answer != "asked":
            del self.jobs[job.id]
            self.held.pop(job.id, None)
        self.filled = False

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=chosen(("claim", "renew", "seize")))
    def hold(self, data, how):
        offer = self.held[data.draw(chosen(sorted(self.held)))]
        if how == "claim":
            assert self.queue.claim(offer) == ("lost" if offer.owner else "claimed")
            offer = offer._replace(owner=offer.owner or "w1")
        elif how == "renew":
            assert self.queue.renew(offer.owner, offer)[0] in ("renewed", "cancel")
        else:
            self.names += 1
            name = f"s{self.names}"
            assert self.queue.seize(offer, offer.owner, "reaper", new_lease=name, only_expired=False) == "seized"
            offer = offer._replace(lease=f"{EPOCH}.{name}", owner="reaper")
        self.held[offer.job] = offer
        self.filled = False

    # -- what is configured, and what happens ------------------------------------------------------------------

    @rule(
        model=chosen(MODELS),
        policy=chosen(("fifo", "priority", "aging", "edf", "edf", "fair", "fair", "fair")),
        tenant_slots=chosen((None, None, 1, 2)),
        weights=chosen(({}, {"t1": 4.0}, {"t1": 0.01, TENANTS[2]: 2.0})),
        affinity=chosen((0.0, 1.0, 30.0)),
    )
    def change_rules(self, model, policy, tenant_slots, weights, affinity):
        state = self.configs[model].state
        self.configs[model] = Config(policy, 1.0, tenant_slots, affinity, 2, weights, state)
        self._configure(model)
        self._sync()

    @rule(model=chosen(MODELS), state=chosen(("online", "online", "paused", "frozen", "draining")))
    def change_a_model(self, model, state):
        self.configs[model].state = state
        self._configure(model)
        self._sync()

    @rule(tenant=chosen(TENANTS), state=chosen(("", "", "paused", "frozen", "draining")))
    def change_a_tenant(self, tenant, state):
        self.queue.rules.pop(f"tenant {_safe(tenant)}", None)
        if state:
            self.queue.rules[f"tenant {_safe(tenant)}"] = state
        self._sync()

    @rule(tenant=chosen((*TENANTS, "")), most=chosen((None, 1, 2, 3)))
    def limit_a_tenant(self, tenant, most):
        """`tenant` "": each tenant without a separate limit."""
        self.queue.rules.pop(f"slots {_safe(tenant)}", None)
        if most is not None:
            self.queue.rules[f"slots {_safe(tenant)}"] = str(most)
        self._sync()

    @rule(server=chosen(sorted(SERVERS)), state=chosen(("online", "online", "paused", "gone")))
    def change_a_server(self, server, state):
        self.servers[server] = state
        self._sync()

    @rule(ms=chosen((0, 1, 250, 500, 1500, 5000, 60_000)))
    def time_goes_by(self, ms):
        self.queue.later(ms)
        self.filled = False

    @rule(server=chosen(sorted(SERVERS)), how=chosen(("cool_down", "wake", "occupy")))
    def a_server_is_away_or_used(self, server, how):
        if how == "occupy":
            self.queue.run("occupy_slots", server, 1, 700)
        else:
            self.queue.cool_down(server, 1000 if how == "cool_down" else 0)
        self.filled = False

    @rule(late=st.booleans())
    def redis_is_lost(self, late):
        now = self.queue.now
        self.queue.client.flushall()
        self.queue.set_clock(now)
        if late:
            self.queue.enqueue(self._job("zimg", "t1", 7, "", 1000))  # the only one of its lane
        self._rebuild()

    def _rebuild(self) -> None:
        """Fill the queue from what the database knows: leases that were claimed, the other jobs in order."""
        keeps_leases = self.queue.begin() == "emptied"
        self._bring_catalog()
        running = {job: offer for job, offer in self.held.items() if offer.owner or keeps_leases}
        leases = [
            (self.jobs[job], offer.lease, offer.owner, offer.slot) for job, offer in running.items() if offer.owner
        ]
        assert self.queue.restore(*leases) == (0 if keeps_leases else len(leases))
        self.held, self.turns = running, {}
        self.virtual = self.virtual if keeps_leases else {}
        claimed = {job for job, offer in running.items() if offer.owner}
        queued = sorted((job for job in self.jobs.values() if job.id not in claimed), key=lambda job: job.seq)
        assert self.queue.enqueue(*queued) == []
        self.queue.open()
        self.sweep()

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def all_that_is_derived_is_what_the_plain_data_give(self):
        at = QueueState(self.queue)
        leases = {job: at.hash(f"leases:{job}") for job in at.below("leases:")}
        lanes = {lane: at.scores(f"lanes:{lane}") for lane in at.below("lanes:") if lane.count("|") == 3}
        self._check_jobs(leases, lanes)
        self._check_slots(at, leases)
        self._check_counters(at, leases, lanes)
        self._check_indexes(at, lanes)
        held = Counter(_account(lease["lane"]) for lease in leases.values())
        self.turns = {lane: turn for lane, turn in self.turns.items() if lane in lanes}
        for lane, members in lanes.items():
            self._check_key(at, lane, members, held)
        self._check_virtual_time(at)
        if self.filled:
            self._check_nothing_more_can_be_offered(at, lanes, leases)

    def _check_jobs(self, leases: dict[str, Any], lanes: dict[str, Any]) -> None:
        """Each job is in its lane or under lease, and nowhere twice."""
        assert leases.keys() == self.held.keys()
        waiting = {job.id: job for job in self.jobs.values() if job.id not in leases}
        inside = {(lane, member): int(score) for lane, members in lanes.items() for member, score in members.items()}
        assert inside == {(job.lane, f"{job.id}@{job.created}"): self._score(job) for job in waiting.values()}
        for job, lease in leases.items():
            known = self.held[job]
            assert int(lease["seq"]) == self._score(self.jobs[job])
            assert (lease["lease"], lease["owner"], lease["slot"]) == (known.lease, known.owner, known.slot)

    def _check_slots(self, at: QueueState, leases: dict[str, Any]) -> None:
        """A slot of an online server is leased, free or in cooldown; others are leased at most (LEASE-1)."""
        assert at.hash("slots") == {lease["slot"]: job for job, lease in leases.items()}
        assert at.scores("leases").keys() == leases.keys()
        free, cooling, taken = set(at.scores("free")), set(at.scores("cooling")), set(at.hash("slots"))
        assert not free & cooling and not (free | cooling) & taken
        online = [SERVERS[name] for name, state in self.servers.items() if state == "online"]
        assert free | cooling == {f"{server.name}-slot{n}" for server in online for n in range(server.slots)} - taken

    def _check_counters(self, at: QueueState, leases: dict[str, Any], lanes: dict[str, Any]) -> None:
        held = Counter(_account(lease["lane"]) for lease in leases.values())
        of_tenants: Counter[str] = Counter()
        for account, count in held.items():
            tenant = account.partition("|")[0]
            of_tenants[tenant] += count if self._most_slots(tenant) < inf else 0
        counts = {name: str(count) for name, count in (held | of_tenants).items() if count}
        assert at.hash("held") == counts
        waiting: Counter[str] = Counter()
        for lane, members in lanes.items():
            waiting[lane.rsplit("|", 1)[1]] += len(members)
        found = {name: int(text) for name, text in at.hash("meta").items() if name.startswith("waiting:")}
        assert found == {f"waiting:{model}": count for model, count in waiting.items()}
        jobs = Counter(_account(lane) for lane, members in lanes.items() for _ in members)
        assert at.hash("lanes") == {account: str(count) for account, count in jobs.items()}
        taken = Counter(lease["slot"].rsplit("-slot", 1)[0] for lease in leases.values())
        for name in at.hash("servers"):  # The counters of other servers are deleted until they return.
            assert int(at.hash(f"stats:server:{name}").get("taken", 0)) == taken[name]

    def _most_slots(self, tenant: str) -> float:
        return float(self.queue.rules.get(f"slots {tenant}") or self.queue.rules.get("slots ") or inf)

    def _check_indexes(self, at: QueueState, lanes: dict[str, Any]) -> None:
        by_class, marks = defaultdict(set), defaultdict(set)
        for lane in lanes:
            priority, digest, tenant, model = lane.split("|")
            by_class[f"{digest}|{model}"].add(lane)
            marks[f"{tenant}|{model}"].add(f"{priority}|{digest}")
        assert {name: set(at.scores(f"classes:{name}")) for name in at.below("classes:")} == by_class
        assert {name: text.split("\n")[1] for name, text in at.hash("classes").items()} == {
            name: CONSTRAINTS[name[0] != "|"] for name in by_class
        }
        found = {name: at.members(f"lanes:{name}") for name in at.below("lanes:") if name.count("|") == 1}
        assert found == marks
        assert not at.below("meta:un")
        self._check_groups(at, set(by_class))
        self._check_kinds(at)

    def _check_groups(self, at: QueueState, classes: set[str]) -> None:
        """Each class that a server can run is in the group of the classes with the same servers, by its first lane."""
        ranked = {group: at.scores(f"groups:{group}") for group in at.below("groups:") if "|" in group}
        assert at.members("groups") == ranked.keys() | {name for name in classes if name[0] == "|"}
        there = [SERVERS[name] for name, state in self.servers.items() if state != "gone"]
        members = {}
        for name in classes:
            constraints, model = CONSTRAINTS[name[0] != "|"], name.split("|")[1]
            if constraints and any(
                model in server.models and meets(constraints, _declared(server), model) for server in there
            ):
                lanes = at.scores(f"classes:{name}")
                first = min(lanes, key=lambda lane: (lanes[lane], lane))
                members[f"{first[0]}|{name}"] = lanes[first]
        assert {member: key for group in ranked.values() for member, key in group.items()} == members
        assert all(group.endswith(f"|{member.split('|')[2]}") for group, them in ranked.items() for member in them)

    def _check_kinds(self, at: QueueState) -> None:
        """Free slots and groups stand in the index of their kind and model; `ready` has each kind with both."""
        models = {
            kind: {line for line in text.split("\n") if line and line[0] != "@"}
            for kind, text in at.hash("kinds").items()
        }
        by_model, free, groups = defaultdict(set), defaultdict(dict), defaultdict(set)
        for kind, served in models.items():
            for model in served:
                by_model[model].add(kind)
        assert {model: at.members(f"kinds:{model}") for model in at.below("kinds:")} == by_model
        kind_of = {name: self._kind_of(at, entry) for name, entry in at.hash("servers").items()}
        for slot, since in at.scores("free").items():
            free[kind_of[slot.rsplit("-slot", 1)[0]]][slot] = since
        assert {kind: at.scores(f"free:{kind}") for kind in at.below("free:")} == free
        for group in at.members("groups"):
            groups[group.rsplit("|", 1)[1]].add(group)
        assert {name: at.members(f"groups:{name}") for name in at.below("groups:") if "|" not in name} == groups
        assert {kind for kind in free if models[kind] & groups.keys()} <= at.scores("meta:ready").keys()

    @staticmethod
    def _kind_of(at: QueueState, entry: str) -> str:
        (found,) = (kind for kind, text in at.hash("kinds").items() if entry[entry.index("\n") :] == text)
        return found

    def _check_key(self, at: QueueState, lane: str, members: dict[str, float], held: Counter[str]) -> None:
        _, digest, tenant, model = lane.split("|")
        config, key = self.configs[model], at.scores(f"classes:{digest}|{model}")[lane]
        head = self.jobs[min(members, key=lambda member: members[member]).rsplit("@", 1)[0]]
        stopped = self.queue.rules.get(f"tenant {tenant}") in ("paused", "frozen")
        of_all_models = sum(held[f"{tenant}|{each}"] for each in MODELS)
        is_full = self._most_slots(tenant) <= of_all_models
        blocked = stopped or (config.tenant_slots or inf) <= held[f"{tenant}|{model}"] or is_full
        assert (key == inf) == blocked
        if blocked or config.policy != "fair":
            self.turns.pop(lane, None)
        if blocked:
            return
        match config.policy:
            case "fifo":
                assert key == head.seq
            case "priority":
                assert key == head.priority * SHARE + head.seq
            case "edf":
                assert key == self._score(head)
            case "aging":
                assert key == head.created + head.priority * 1000
            case _:
                virtual = float(at.hash(f"stats:model:{model}").get("virtual", 0))
                tag = at.scores(f"tags:{model}").get(tenant, 0)
                assert key == tag or tag < key <= virtual, "its turn is not put off, and it has saved nothing"
                was = self.turns.get(lane, (inf, inf))
                assert key <= was[0] or tag > was[1], "a tenant that is charged nothing keeps its turn"
                self.turns[lane] = key, tag
                siblings = [at.scores(f"classes:{digest}|{model}").get(f"{n}{lane[1:]}", key) for n in range(1, 10)]
                assert set(siblings) == {key}, "priorities count inside a tenant"

    def _check_virtual_time(self, at: QueueState) -> None:
        """It never goes back while jobs wait under fair."""
        now = {}
        for model, config in self.configs.items():
            if config.policy == "fair" and f"waiting:{model}" in at.hash("meta"):
                now[model] = float(at.hash(f"stats:model:{model}").get("virtual", 0))
                assert now[model] >= self.virtual.get(model, 0)
        self.virtual = now

    def _check_nothing_more_can_be_offered(self, at: QueueState, lanes: dict[str, Any], leases: dict[str, Any]) -> None:
        """SLOT-2: affinity chooses among jobs, but leaves no slot free that one of them could use."""
        free = {slot.rsplit("-slot", 1)[0] for slot in at.scores("free")}
        for lane in lanes:
            _, digest, _, model = lane.split("|")
            key = at.scores(f"classes:{digest}|{model}")[lane]
            probing = {job for job, lease in leases.items() if lease["lane"].endswith(f"|{model}")}
            runs = self.configs[model].state in ("online", "draining") and self._lets(at, f"model:{model}", probing)
            for name in free if runs and key != inf else ():
                server = SERVERS[name]
                fits = model in server.models and meets(CONSTRAINTS[digest != ""], _declared(server), model)
                probing = {job for job, lease in leases.items() if lease["slot"].startswith(f"{name}-slot")}
                assert not (fits and self._lets(at, f"server:{name}", probing)), (lane, name)

    def _lets(self, at: QueueState, whose: str, running: set[str]) -> bool:
        """Whether a breaker lets a job through: it is closed, or its time is over and its probe does not run there."""
        stats = at.hash(f"stats:{whose}")
        if "open_until" not in stats:
            return True
        return self.queue.now >= int(stats["open_until"]) and stats.get("probe") not in running

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _job(self, model: str, tenant: str, priority: int, constraints: str, ttl_ms: int) -> Job:
        self.names += 1
        now = self.queue.now
        job = Job(f"j{self.names}", self.names, priority, model, tenant, now, constraints, ttl_ms and now + ttl_ms)
        self.jobs[job.id] = job
        return job

    def _score(self, job: Job) -> int:
        """Where a job stands in its lane."""
        if self.configs[job.model].policy != "edf":
            return job.seq
        return (
            (job.deadline - EPOCH_OF_DEADLINES_MS) // 100 * (1 << 18) + job.seq if job.deadline else (1 << 52) + job.seq
        )

    def _took(self, offers: list[Offered]) -> None:
        for offer in offers:
            assert offer.job not in self.held
            self.held[offer.job] = offer

    def _configure(self, model: str) -> None:
        self.queue.rules = {k: v for k, v in self.queue.rules.items() if not k.endswith(f"|{model}")}
        config = dict(vars(self.configs[model]))
        self.queue.configure(model, config.pop("state"), **config)
        if self.configs[model].policy != "fair":
            self.virtual.pop(model, None)

    def _sync(self) -> None:
        self._bring_catalog()
        if not self.queue.run("queue_counts")[0]:  # A policy that orders lanes differently needs a filled queue.
            self._rebuild()

    def _bring_catalog(self) -> None:
        there = [name for name, state in self.servers.items() if state != "gone"]
        self.queue.sync(*[Server(**vars(SERVERS[name]) | {"state": self.servers[name]}) for name in there])
        self.filled = False


def _safe(tenant: str) -> str:
    return Job("", 0, tenant=tenant).lane.split("|")[2]


def _account(lane: str) -> str:
    return lane.split("|", 2)[2]


def _declared(server: Server) -> CatalogServer:
    return CatalogServer(server.name, "zimg", server.slots, "online", {}, 0, server.attributes)


@pytest.mark.timeout(600)  # A failure is made as small as can be first.
def test_derived_data_always_equal_the_values_computed_from_the_plain_data(client: Redis):
    run_state_machine_as_test(lambda: PoliciesMachine(client), settings=search(20, stateful_step_count=40))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kinds_at_once", [1, 16])
def test_the_same_holds_if_very_many_groups_wait(client: Redis, kinds_at_once: int):
    fragments = fragments_with_limits(many_groups=0, kinds_at_once=kinds_at_once)
    run_state_machine_as_test(lambda: PoliciesMachine(client, fragments), settings=search(20, stateful_step_count=40))
