"""Scripts: how they are assembled and run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.asyncio import connection as live
from redis.exceptions import ResponseError

from routing.config import RoutingSettings
from routing.queue.fleets import Fleets
from routing.scripts import LIBRARY, make_scripts
from slotkeeper.redis.connections import connect, make_async_connection
from slotkeeper.redis.keys import QUEUE_FORMAT, Keys
from tests.house.lua_text import body, called_functions
from tests.house.rule import for_each
from tests.support.fleet_queue import CLOCK, FRAGMENTS, FleetQueue, a
from tools.cluster.valkey_process import Valkey


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A server whose settings a test may change."""
    with Valkey(tmp_path) as server:
        yield server


@for_each(LIBRARY.script_names())
def test_a_fragment_is_replaced_by_its_name_and_nothing_else_is(name):
    ours = LIBRARY.assemble(name, FRAGMENTS)
    assert (CLOCK in ours) == ("lib/now_ms" in LIBRARY.list_includes(name))
    assert ours.replace(CLOCK, LIBRARY.read_source("lib/now_ms")) == LIBRARY.assemble(name)
    assert "@include" not in ours


def test_a_script_is_sent_once_and_then_named_by_its_hash(client: Redis):
    fleets = Fleets(make_scripts(client, Keys("test")), RoutingSettings())
    client.function_flush()
    client.config_resetstat()
    for _ in range(3):
        fleets.counts(["zimg"])
    calls = client.info("commandstats")
    assert calls["cmdstat_function|load"]["calls"] == 1
    assert calls["cmdstat_fcall"]["calls"] == 4, "the first finds no function"


def test_the_scripts_are_loaded_again_into_a_redis_that_lost_them(client: Redis):
    queue = FleetQueue(client)
    queue.with_slots(1)
    client.function_flush()
    assert queue.run("queue_counts")[1] == 1
    client.function_flush()
    assert len(Fleets(queue.scripts, RoutingSettings()).counts(["zimg", "flux"])) == 2
    assert queue.offer() == []


def test_a_call_keeps_no_state_for_the_next_call(client: Redis):
    """The fragments of a function outlive a call: two fleets take turns, each with its rules and its servers."""
    one, two = (
        FleetQueue(client, "zimg").configure(policy="fair"),
        FleetQueue(client, "flux").configure("zimg", tenant_slots=1),
    )
    one.with_slots(2)
    two.with_slots(3)
    jobs = [a(f"j{n}", n) for n in range(4)]
    assert [len(one.enqueue(*jobs)), len(two.enqueue(*jobs)), len(one.offer()), len(two.offer())] == [2, 1, 0, 0]
    assert (len(one.waiting()), len(two.waiting())) == (2, 3)


@for_each(LIBRARY.script_names())
def test_a_script_that_changes_hash_fields_writes_them_at_its_end(name):
    """Changes of fields are lost unless the script flushes them at its end."""
    changes = any(f"{change}(" in called_functions(name) for change in ("set_field", "increment_field"))
    assert ("flush_hashes()" in body(name)) == changes


def test_a_full_redis_accepts_no_new_jobs_and_still_serves_its_jobs(own_valkey):
    with own_valkey.client() as client:
        queue = FleetQueue(client).with_slots(1)
        (held,) = queue.enqueue(a("j1", 1), a("j2", 2), limit=1)
        assert queue.run("queue_counts")[0] == 1
        assert [queue.claim(held, "w0"), queue.renew("w1", held), queue.release(held, "w2")[0]] == [
            "claimed",
            ["lost"],
            "lost",
        ]
        client.config_set("maxmemory", 1)
        with pytest.raises(ResponseError, match="maxmemory"):
            queue.enqueue(a("j3", 3))
        assert queue.claim(held, "w0") == "lost" and queue.renew("w0", held) == ["renewed"]
        answer, (following,) = queue.release(held, "w0", claimant="w1")
        assert (answer, following.job) == ("released", "j2")
        assert queue.run("queue_counts")[0] == 1


@pytest.mark.parametrize("fleet", ["zimg", "stable-diffusion", "org/model.v2", "a-slot3"])
def test_keys_of_a_fleet_are_its_prefix_its_tag_and_a_name(fleet):
    keys = Keys("mine").fleet_keys(fleet)
    assert keys[0] == f"mine:{QUEUE_FORMAT}:{{{fleet}}}:classes" and len(keys) == len(set(keys)) == 14
    assert Keys("mine").fleet_keys(fleet) == keys


@pytest.mark.parametrize(
    ("url", "kind", "expected"),
    [
        ("redis://h:1/2", live.Connection, {"host": "h", "port": 1, "db": 2}),
        ("redis://u:p@h?protocol=2", live.Connection, {"username": "u", "password": "p", "protocol": 2}),
        ("rediss://h?ssl_cert_reqs=none&ssl_ca_certs=ca.pem", live.SSLConnection, {"host": "h", "ca_certs": "ca.pem"}),
        ("unix:///run/redis.sock?db=3", live.UnixDomainSocketConnection, {"path": "/run/redis.sock", "db": 3}),
    ],
)
def test_an_event_loops_connection_is_to_the_same_redis_as_the_clients(url, kind, expected):
    found = make_async_connection(connect(url, 3.0))
    assert type(found) is kind
    assert {name: getattr(found, name) for name in expected} == expected
