"""Every script works on a Redis Cluster: all keys of a fleet lie in one hash slot."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from routing.admission.submit_limits import LimitContext, RateBucket
from routing.config import RoutingSettings
from routing.progress import EntryId, ProgressCommands
from routing.queries.process_list import ProcessList
from routing.queue.presence import NodePresence, NodeState, Presence
from routing.queue.queues import Queues
from routing.queue.worker_capacity import WorkerCapacity
from routing.scripts import LIBRARY
from slotkeeper.redis.keys import FLEET_KEYS, Keys
from slotkeeper.redis.scripts import Scripts
from slotkeeper.redis.signatures import BoundScript
from tasks.relay.sinks.redis_stream import Entry, EventStream
from tests.support.fleet_queue import FleetQueue, Job, Server, a
from tools.cluster.valkey_process import NoValkey, Valkey

FLEET = "org/model-7b:latest"
NO_FLEETS = ["test:events", "test:nodes", "test:rate:acme", "test:said:j1", "test:workers"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    """A cluster of one node, which refuses keys of two hash slots in one script like any other."""
    try:
        server = Valkey(tmp_path_factory.mktemp("cluster"), settings={"cluster-enabled": "yes"}).start()
    except NoValkey as missing:
        pytest.skip(str(missing))
    with server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        tick = threading.Event()
        for _ in range(1000):
            if client.execute_command("CLUSTER INFO")["cluster_state"] == "ok":
                break
            tick.wait(0.01)
        yield client
    server.kill()


# Without this line Redis lets a script touch any key that happens to lie on the same node.
_STRICT = "#!lua\n"


class _Strict(Scripts):
    """Runs scripts so that each key they touch must lie in one hash slot; remembers which were run."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        super().__init__(redis, keys, LIBRARY)
        self.ran: set[str] = set()

    def _call(self, commands: Any) -> list[Any]:
        self.ran.update(command.target.script for command in commands)
        return [self._eval(command.target, command.args) for command in commands]

    def _eval(self, bound: BoundScript, args: tuple[Any, ...]) -> Any:
        return self.redis.eval(_STRICT + LIBRARY.assemble(bound.script), len(bound.keys), *bound.keys, *args)


def _b(job_id: str, seq: int, priority: int = 5) -> Job:
    return a(job_id, seq, priority, FLEET, constraints="gpu=A100")


def test_every_script_works_on_a_cluster_with_the_servers_own_clock(cluster):
    cluster.flushall()
    queue = FleetQueue(cluster, FLEET)
    queue.scripts = strict = _Strict(cluster, queue.keys)
    server = Server("gpu-slot3", 2, models=(FLEET, "flux"), attributes={"gpu": "A100"})
    queue.configure(FLEET, policy="fair", tenant_slots=5)
    assert queue.sync(server) == "synced"
    assert queue.open() == "opened"
    one, two = queue.enqueue(_b("j1", 1), _b("j2", 2), _b("j3", 3), _b("urgent", 4, 1))
    assert queue.claim(one) == "claimed" and queue.renew("w1", one) == ["renewed"]
    assert queue.run("check_lease", one.job, one.lease, "w1", one.slot, 4000) == "held"
    assert queue.position(_b("j3", 3)) == ["waiting", 1]
    assert queue.run("model_status", f"default|{FLEET}", 1) == [2, 2, None, 0, "online", "closed", 0, ""]
    assert queue.run("count_constraints", f"default|{FLEET}", 1, FLEET, f"d1|{FLEET}") == [2, 2]
    assert len(queue.run("server_status")) == 1
    assert queue.run("queue_counts")[:4] == [1, 0, 0, 2]
    assert queue.claim(two) == "claimed"
    assert queue.withdraw(_b("j3", 3)) == "withdrawn" and queue.withdraw(_b("j1", 1)) == "asked"
    assert queue.seize(two, "w1", "", only_expired=False) == "seized"
    answer, (following,) = queue.release(one, return_to_lane=True, claimant="w1")
    assert (answer, following.job, following.owner) == ("released", "urgent", "w1")
    assert queue.release(following)[0] == "released"
    assert queue.expired() == []
    assert queue.cool_down("gpu-slot3", 1000) == [1000, 0]
    assert queue.run("occupy_slots", "gpu-slot3", 1, 500) == 0
    assert len(queue.held()) == 2
    now_ms, first_ms = queue.run("lease_span")
    assert now_ms < first_ms
    assert queue.run("clamp_times", 60_000, 60_000, 60_000) == 0
    assert queue.offer() == []
    assert queue.keep(two._replace(lease="1.seized")) == "kept"
    assert queue.restore((_b("back", 9), "p9-1", "w2", "elsewhere-slot0")) == 1
    settings = RoutingSettings()
    context = LimitContext(None, Queues(strict, settings), settings, None, None)  # type: ignore[arg-type]
    assert queue.run("tenant_waiting", "acme|zimg") == 0
    buckets = [RateBucket(name, 1, 100, 5) for name in ("tenant", "key:k")]
    assert strict.run(context.rate_limit_command("acme", buckets)) == [(0, 4), (0, 4)]
    assert WorkerCapacity(strict).report("w1", 3) == 3
    assert strict.run(ProgressCommands(strict).publish_command("j1", EntryId(1, 1), "{}", 9)) == 0
    assert EventStream(strict, 9).add(0, [Entry(1, "{}")]) == 1
    assert ProcessList(strict).read_all() == []
    assert queue.run("note_silence", "gpu-slot3", 1) > 0
    assert queue.run("reset_breaker", "server", "gpu-slot3") == 0
    assert queue.place_on_entry(_b("last", 10)) == (0, None)
    assert queue.run("close_queue", queue.version) == "closed" and queue.open() == "opened"
    assert queue.run("discard_queue", 1) == "closed"
    presence = Presence(strict)
    assert not presence.beat("g1", "http://127.0.0.1:1")
    claim = presence.connect("n1", "i1", "g1", NodeState.CONNECTED)
    assert presence.note("n1", claim.number, "i1", "g1", NodeState.ABSENT)
    assert presence.set_present(FLEET, [NodePresence("gpu-slot3", claim.number, True)], "g1") == 1
    assert strict.ran == set(LIBRARY.script_names())

    _check_keys(cluster)


def _check_keys(cluster: Redis) -> None:
    """Every key of a fleet carries its hash tag; only a tenant's rate and the list of workers belong to none."""
    found = [key.decode() for key in cluster.scan_iter() if not key.startswith(b"clock:")]
    assert sorted(key for key in found if f"{{{FLEET}}}" not in key) == NO_FLEETS
    assert {key.split("}:")[1].split(":")[0] for key in found if "}" in key} <= set(FLEET_KEYS)


def test_a_script_that_uses_a_key_without_the_hash_tag_is_refused(cluster):
    """Prove that the tests above would detect a key without the tag."""
    text = 'redis.call("SET", KEYS[1], 1) redis.call("SET", KEYS[1] .. "x", 1)'
    with pytest.raises(ResponseError, match="same slot"):
        cluster.eval(_STRICT + text, 1, "test:untagged")


def test_two_fleets_do_not_share_keys(client):
    one, two = FleetQueue(client, "zimg"), FleetQueue(client, "zimg2")
    one.with_slots(1)
    two.enqueue(a("j", 1))
    assert one.offer() == [] and two.offer() == []
    assert not set(one.keys.fleet_keys("zimg")) & set(two.keys.fleet_keys("zimg2"))
