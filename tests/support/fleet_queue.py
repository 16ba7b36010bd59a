"""A fleet's queue for tests: the product's scripts on a real Valkey, with a clock that the test sets.

    queue = FleetQueue(client).with_slots(2)
    queue.enqueue(a("first", 1), a("second", 2))

Each method runs one script, and returns texts and numbers.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Self

from redis import Redis

from routing.queue import lanes
from routing.queue.slots import model_rules, server_entry
from routing.scripts import LIBRARY, make_scripts
from slotkeeper.jobs.values import QueuedJob
from slotkeeper.redis.keys import FLEET_KEYS, Keys
from slotkeeper.redis.scripts import Command
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.policies import DEFAULT_POLICY
from slotkeeper.registry.snapshot import Model
from slotkeeper.registry.values import NodeIdentity
from slotkeeper.registry.values import Server as CatalogServer

START_MS = 1_800_000_000_000
OFFER_MS, LEASE_MS = 10_000, 8_000
BREAKER = (3, 0.8, 5_000, 40_000)  # failures in a row, rate, open_ms, open_max_ms
BUSY_MAX_MS = 30_000
CAPACITY = 1_000_000  # runs that the workers can take
RECORD = "record1"
EPOCH = 1
"""The epoch of a queue that was opened once: the names of its leases begin with it."""

# Replaces lib/now_ms.  The key is in the same hash slot as the keys of the script.
CLOCK = """
local function now_ms()
  local tag = string.match(KEYS[1], "{[^}]*}") or ("{" .. KEYS[1] .. "}")
  return tonumber(redis.call("GET", "clock:" .. tag))
end
"""
FRAGMENTS = {"lib/now_ms": CLOCK}


def fragments_with_limits(many_groups: int, kinds_at_once: int) -> dict[str, str]:
    """Return fragments with these limits on groups and on kinds of servers that one call reads."""
    text, changed = re.subn(
        r"MANY_GROUPS, KINDS_AT_ONCE = \d+, \d+",
        f"MANY_GROUPS, KINDS_AT_ONCE = {many_groups}, {kinds_at_once}",
        LIBRARY.read_source("lib/offers"),
    )
    assert changed == 1
    return {**FRAGMENTS, "lib/offers": text}


class Offered(NamedTuple):
    """One offer as the scripts return it."""

    job: str
    lease: str
    slot: str
    server: str
    model: str
    number: int
    owner: str
    changes_model: int = 1


@dataclass(frozen=True)
class Job:
    """A job to be enqueued."""

    id: str
    seq: int
    priority: int = 5
    model: str = "zimg"
    tenant: str = "default"
    created: int = START_MS
    constraints: str = ""
    deadline: int = 0

    @property
    def lane(self) -> str:
        return lanes.lane_name(
            QueuedJob(
                self.id, self.seq, self.model, self.priority, self.tenant, self.created, self.constraints, self.deadline
            )
        )

    @property
    def args(self) -> list[Any]:
        return [self.lane, self.constraints, self.seq, self.id, self.created, self.deadline]


a = Job


def a_config(policy: str = DEFAULT_POLICY, **config: Any) -> ModelConfig:
    """With a policy that the product need not know."""
    return ModelConfig(**config).model_copy(update={"policy": policy})


@dataclass(frozen=True)
class Server:
    """A server as the catalog describes it."""

    name: str
    slots: int = 1
    state: str = "online"
    models: tuple[str, ...] = ("zimg",)
    attributes: dict[str, str | float] = field(default_factory=dict)
    weight: float = 1.0
    is_node: bool = False

    @property
    def args(self) -> list[Any]:
        urls = dict.fromkeys(self.models, "http://gpu")
        node = NodeIdentity(f"n_{self.name}", {}, is_trusted=False) if self.is_node else None
        server = CatalogServer(
            self.name, "zimg", self.slots, self.state, urls, 0, self.attributes, self.weight, node=node
        )
        return [self.name, server_entry(server)]


class FleetQueue:
    """The queue of one fleet."""

    def __init__(
        self, client: Redis, fleet: str = "zimg", prefix: str = "test", fragments: Mapping[str, str] = FRAGMENTS
    ) -> None:
        self.client, self.fleet = client, fleet
        self.keys = Keys(prefix)
        self.scripts = make_scripts(client, self.keys, fragments)
        self.version = 0
        self.rules: dict[str, str] = {}
        self.servers: tuple[Server, ...] = ()
        self.rules_sent: dict[str, str] = {}
        self.now = START_MS
        self._prefixes = self._fillings = 0
        self.set_clock(START_MS)

    # -- the clock, and what stands in Redis -----------------------------------------------------------------

    def set_clock(self, now_ms: int) -> None:
        self.now = now_ms
        self.client.set(f"clock:{{{self.fleet}}}", now_ms)

    def later(self, ms: int) -> None:
        self.set_clock(self.now + ms)

    def dump(self) -> dict[str, Any]:
        """Everything in Redis but the clock."""
        return {key.decode(): self._content(key) for key in sorted(self.client.scan_iter()) if b"clock:" not in key}

    def _content(self, key: bytes) -> Any:
        match self.client.type(key):
            case b"hash":
                return self.client.hgetall(key)
            case b"zset":
                return self.client.zrange(key, 0, -1, withscores=True)
            case b"set":
                return self.client.smembers(key)
            case b"list":
                return self.client.lrange(key, 0, -1)
            case _:
                return self.client.get(key)

    def key(self, name: str) -> str:
        if name in FLEET_KEYS:
            return self.keys.fleet_key(self.fleet, name)
        return f"{self.keys.fleet_keys(self.fleet)[0].removesuffix(':classes')}:{name}"

    def set_free(self, slot: str, since_ms: int | None) -> None:
        """Write a slot into the indexes of free slots, of a fleet with one kind of server; None: remove it."""
        (kind,) = self.client.hkeys(self.key("kinds"))
        for index in ("free", f"free:{kind.decode()}"):
            if since_ms is None:
                self.client.zrem(self.key(index), slot)
            else:
                self.client.zadd(self.key(index), {slot: since_ms})

    def members(self, name: str) -> list[str]:
        """Of `free`, `cooling`, `leases`, or a class's lanes `classes:<class>`, in order."""
        return [member.decode() for member in self.client.zrange(self.key(name), 0, -1)]

    def taken(self) -> dict[str, str]:
        """slot -> job, of the slots that hold a lease."""
        return {slot.decode(): job.decode() for slot, job in self.client.hgetall(self.key("slots")).items()}

    def beside(self, slot: str) -> list[str]:
        """Jobs whose leases stand beside the slot's holder, in the order in which they get it."""
        return [job.decode() for job in self.client.lrange(self.key(f"slots:{slot}"), 0, -1)]

    def lane_of(self, lane: str) -> list[str]:
        """The jobs of a lane, in order."""
        found = self.client.zrange(self.key(f"lanes:{lane}"), 0, -1)
        return [member.decode().rsplit("@", 1)[0] for member in found]

    def lanes(self) -> list[str]:
        """All lanes, in the order of each class."""
        classes = sorted(name.decode() for name in self.client.hkeys(self.key("classes")))
        return [lane for name in classes for lane in self.members(f"classes:{name}")]

    def waiting(self) -> list[str]:
        return [job for lane in self.lanes() for job in self.lane_of(lane)]

    def seq_of(self, job: Job) -> int:
        return int(self.client.zscore(self.key(f"lanes:{job.lane}"), f"{job.id}@{job.created}"))

    def key_of(self, lane: str) -> float:
        """The lane's order key among those of its class."""
        _, digest, _, model = lane.split("|")
        return float(self.client.zscore(self.key(f"classes:{digest}|{model}"), lane))

    def lease_of(self, job: str) -> dict[str, str]:
        return {name.decode(): text.decode() for name, text in self.client.hgetall(self.key(f"leases:{job}")).items()}

    def expiry_of(self, job: str) -> int | None:
        score = self.client.zscore(self.key("leases"), job)
        return None if score is None else int(score)

    # -- the scripts -----------------------------------------------------------------------------------------

    def run(self, name: str, *args: Any) -> Any:
        """Run a script with these words as arguments, and return its reply."""
        return self.scripts.run(Command(self.scripts.target(name, self.fleet, _plain), args))

    def with_slots(self, count: int) -> Self:
        """Add one server `gpu` with so many slots, and open the queue."""
        return self.with_servers(Server("gpu", count))

    def with_servers(self, *servers: Server) -> Self:
        self.sync(*servers)
        self.open()
        return self

    def sync(self, *servers: Server, version: int | None = None, repairs: bool = False) -> str:
        """Brings every second version as its changes, the others whole."""
        base, before, rules = self.version, {one.name: one.args for one in self.servers}, self.rules_sent
        self.version = self.version + 1 if version is None else version
        self.servers, self.rules_sent = servers, dict(self.rules)
        entries = {server.name: server.args for server in servers}
        answer = "behind"
        if self.version % 2 and base < self.version and not repairs:
            changed = [[name, ""] for name in before if name not in entries]
            changed += [args for name, args in entries.items() if args != before.get(name)]
            answer = self._sync(base, repairs, self.rules_sent if self.rules_sent != rules else None, changed)
        if answer == "behind":
            answer = self._sync(-1, repairs, self.rules_sent, entries.values())
        while self.run("reindex_lanes", 7):
            pass
        return answer

    def _sync(self, base: int, repairs: bool, rules: dict[str, str] | None, servers: Collection[list[Any]]) -> str:
        words = [*chain(*servers), *chain(*(rules or {}).items())]
        head = RECORD, self.version, base, int(repairs), int(rules is not None), len(servers)
        return self.run("sync_catalog", *head, *words)[0]

    def configure(self, model: str = "zimg", state: str = "online", **config: Any) -> Self:
        """What is configured for a model, as the catalog's snapshot would bring it."""
        self.rules |= model_rules(Model(model, "zimg", {}, a_config(**config), state))
        self.sync(*self.servers)
        return self

    def begin(self, record: str = RECORD) -> str:
        self._fillings += 1
        return self.run("begin_rebuild", record, f"filling{self._fillings}")[0]

    def open(self, epoch: int = EPOCH) -> str:
        self.begin()
        return self.run("open_queue", epoch)

    def enqueue(self, *jobs: Job, limit: int = 8, capacity: int = CAPACITY) -> list[Offered]:
        return self.enqueued(*jobs, limit=limit, capacity=capacity)[1]

    def place_on_entry(self, job: Job, limit: int = 8) -> tuple[int | None, int | None]:
        """Enqueue a job, and return how many jobs are ahead of it, and the mean slot time."""
        _, _, ahead, run_ms = self.run("enqueue", *self._offering(limit, CAPACITY), 1, *job.args)
        return ahead, run_ms

    def enqueued(self, *jobs: Job, limit: int = 8, capacity: int = CAPACITY) -> tuple[int, list[Offered]]:
        args = [arg for job in jobs for arg in job.args]
        added, rows, *_ = self.run("enqueue", *self._offering(limit, capacity), 0, *args)
        return added, [Offered(*row) for row in rows]

    def offer(self, limit: int = 256, capacity: int = CAPACITY, claimant: str = "") -> list[Offered]:
        return [Offered(*row) for row in self.run("offer", *self._offering(limit, capacity, claimant))]

    def keep(self, offer: Offered, *, resumes: bool = False) -> str:
        return self.run("extend_offer", offer.job, offer.lease, OFFER_MS, int(resumes))

    def claim(self, offer: Offered, owner: str = "w1") -> str:
        return "claimed" if self.run("claim", offer.job, offer.lease, owner, LEASE_MS) else "lost"

    def renew(self, owner: str, *held: Offered) -> list[str]:
        return self.run(
            "renew", owner, LEASE_MS, "", 0, *[text for offer in held for text in (offer.job, offer.lease)]
        )[2]

    def release(
        self,
        offer: Offered,
        owner: str = "w1",
        *,
        return_to_lane: bool = False,
        cooldown_ms: int = 0,
        limit: int = 8,
        capacity: int = CAPACITY,
        claimant: str = "",
        signal: str = "",
        breaker: tuple[float, ...] = BREAKER,
    ) -> tuple[str, list[Offered]]:
        row = [offer.job, offer.lease, owner, int(return_to_lane), cooldown_ms, signal, *[""] * 3]
        return self.release_all([[*row, *self._offering(limit, capacity, claimant)]], breaker)[0]

    def release_all(
        self, rows: Sequence[Sequence[Any]], breaker: tuple[float, ...] = BREAKER
    ) -> list[tuple[str, list[Offered]]]:
        """Release leases in one call; `rows`: the words of each release."""
        answers = self.run("release", *breaker, BUSY_MAX_MS, *[word for row in rows for word in row])
        return [("released" if released else "lost", [Offered(*row) for row in made]) for released, made in answers]

    def held(self) -> list[list[str]]:
        """Return job, lease, owner and slot of all leases."""
        return [held for held, _ in self.run("list_leases", 0, -1)]

    def expired(self, limit: int = 256) -> list[list[str]]:
        return [held for held, _ in self.run("list_leases", 1, limit)]

    def seize(
        self,
        offer: Offered,
        owner: str,
        new_lease_owner: str = "reaper",
        *,
        new_lease: str = "seized",
        only_expired: bool,
    ) -> str:
        args = [offer.job, offer.lease, owner, new_lease, new_lease_owner, LEASE_MS, int(only_expired)]
        return "seized" if self.run("seize", *args) else "lost"

    def restore(self, *leases: tuple[Job, str, str, str]) -> int:
        """Each: job, lease, owner, slot."""
        args = [
            arg
            for job, *held in leases
            for arg in (job.id, *held, job.lane, job.constraints, job.seq, job.created, job.deadline)
        ]
        return self.run("restore_leases", LEASE_MS, *args)

    def withdraw(self, job: Job) -> str:
        return self.run("withdraw", job.id, job.created, job.lane)

    def position(self, job: Job) -> list[Any]:
        """Place and, of one that waits, jobs ahead."""
        place, ahead, *_ = self.run("job_status", job.id, job.created, job.deadline, job.lane, 0)
        return [place, ahead] if place == "waiting" else [place]

    def cool_down(self, server: str, first_ms: int, max_ms: int = 30_000, why: str = "") -> list[int]:
        return self.run("cool_down", server, first_ms, max_ms, why)

    def drain(self, limit: int = 1000) -> list[str]:
        """Give the first free slot to one job after another until none is left; answers the jobs in order."""
        order_of_jobs: list[str] = []
        offers = self.offer(1)
        while offers and len(order_of_jobs) < limit:
            order_of_jobs.append(offers[0].job)
            _, offers = self.release(offers[0], "", limit=1)
        return order_of_jobs

    def _offering(self, limit: int, capacity: int, claimant: str = "") -> list[Any]:
        self._prefixes += 1
        return [f"p{self._prefixes}", limit, capacity, OFFER_MS, claimant, LEASE_MS]


def _plain(answer: Any) -> Any:
    if isinstance(answer, bytes):
        return answer.decode()
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        return [_plain(part) for part in answer]
    return answer
