"""A gateway's writes about its connections to Redis and to the catalog, under failures and in any order."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from redis.exceptions import ConnectionError

from app.gateway.connection import NodeConnection
from app.gateway.connections import Connections
from routing.queue import queues
from routing.queue.presence import NodeState, Presence
from slotkeeper import signatures
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.registry.nodes import Grant, Nodes
from tests.support.harness import Harness

_DECLARATION = orjson.dumps({"models": {"zimg": {}}, "slots": 1})


class Gateway:
    """A gateway without sockets, and the nodes that have enrolled."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.nodes = harness, Nodes(harness.catalog, '{"mode": "async"}')
        self.presence = Presence(harness.dispatcher.slots.scripts)
        harness.catalog.configure("zimg", {"node_pools": ["homes"], "node_patience": 100.0}, harness.now)
        self.set_clock(harness.now)
        self.connections = self.another("g1")

    def set_clock(self, now_ms: int) -> None:
        self.harness.set_clock(now_ms)
        self.harness.redis.set("clock:{test:nodes}", now_ms)

    def another(self, name: str) -> Connections:
        return Connections(name, f"http://{name}:1", self.harness.dispatcher, self.nodes, self.presence)

    def enroll(self, name: str) -> str:
        token = self.nodes.make_token(
            Grant(owner="acme", pool="homes"), "ops", self.harness.now, self.harness.now + 10
        )[1]
        key = signatures.make_key()
        public = signatures.public_key_of(key)
        proof = signatures.sign(key, signatures.ENROLMENT_TYPE, signatures.enrolment_statement(token, public))
        return self.nodes.enroll(token, name, public, proof, self.harness.now).id

    async def connect(self, node: str, instance: str = "i1") -> NodeConnection:
        claim = await self.connections.claim(node, instance, takes_jobs=True, reason="", replaces=False)
        connection = NodeConnection(node, claim.number, instance, 1, _discard, lambda _: None)
        await self.connections.declare(node, _DECLARATION)
        self.connections.add(connection)
        await self.connections.show(connection)
        return connection

    def state(self, node: str) -> NodeState | None:
        found = self.presence.read().nodes.get(node)
        return found and found.state


async def _discard(_: bytes) -> None:
    pass


def _run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.fixture
def gateway(harness: Harness) -> Gateway:
    return Gateway(harness)


def test_nodes_that_connect_together_share_a_transaction_and_each_is_stored(gateway: Gateway) -> None:
    ids = [gateway.enroll(f"n{number}") for number in range(5)]

    async def test() -> None:
        await asyncio.gather(*(gateway.connections.declare(node, _DECLARATION) for node in ids))

    version = gateway.harness.catalog.get_version()
    _run(test)
    assert len(gateway.harness.catalog.read().servers) == 5
    assert gateway.harness.catalog.get_version() == version + 1


def test_each_of_several_nodes_gets_an_error_if_no_declaration_was_stored(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[str]:
        raise DatabaseUnavailable("away")

    monkeypatch.setattr(gateway.nodes, "declare", fail)

    async def test() -> None:
        ends = await asyncio.gather(
            *(gateway.connections.declare(f"n_{number}", _DECLARATION) for number in range(3)), return_exceptions=True
        )
        assert [type(end) for end in ends] == [DatabaseUnavailable] * 3

    _run(test)


def test_a_connection_that_ended_is_not_noted_again_by_a_slower_thread(gateway: Gateway) -> None:
    node = gateway.enroll("attic")

    async def test() -> None:
        connection = await gateway.connect(node)
        assert gateway.harness.queue.members("free") == ["attic-slot0"]
        connection.lose()
        await gateway.connections.remove(connection)
        await gateway.connections.show(connection)

    _run(test)
    assert gateway.state(node) is NodeState.ABSENT
    assert gateway.harness.queue.members("free") == []


def test_a_slower_connection_does_not_replace_a_newer_one(gateway: Gateway) -> None:
    node = gateway.enroll("attic")

    async def test() -> None:
        newer = await gateway.connect(node)
        older = NodeConnection(node, newer.number - 1, "i1", 1, _discard, lambda _: None)
        assert gateway.connections.add(older) is older
        assert gateway.connections.find(node) is newer
        assert not await gateway.connections.show(older)

    _run(test)


def test_an_emptied_redis_is_repaired_although_the_first_write_fails(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = gateway.enroll("attic")

    async def test() -> None:
        await gateway.connect(node)
        await gateway.connections.beat()
        gateway.harness.lose_redis()
        gateway.set_clock(gateway.harness.now)
        note = gateway.presence.note

        def fail(*_: Any) -> bool:
            raise ConnectionError("failing over")

        monkeypatch.setattr(gateway.presence, "note", fail)
        with pytest.raises(ConnectionError):
            await gateway.connections.beat()
        monkeypatch.setattr(gateway.presence, "note", note)
        await gateway.connections.beat()

    _run(test)
    assert gateway.state(node) is NodeState.CONNECTED
    assert gateway.presence.list_present(["zimg"])["zimg"].keys() == {"attic"}


def test_revoked_nodes_and_nodes_that_are_connected_elsewhere_are_named(gateway: Gateway) -> None:
    revoked, moved = gateway.enroll("attic"), gateway.enroll("cellar")

    async def test() -> None:
        gone, elsewhere = await gateway.connect(revoked), await gateway.connect(moved)
        await gateway.connections.beat()
        gateway.presence.connect(moved, "i1", "g2", NodeState.CONNECTED)
        gateway.nodes.revoke("attic", gateway.harness.now)
        result = await gateway.connections.beat()
        assert (result.revoked, result.replaced) == ([gone], [elsewhere])

    _run(test)


def test_absence_counts_only_while_the_node_could_have_reconnected(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, seconds = gateway.enroll("attic"), [1000.0]

    async def absence() -> tuple[int, str]:
        return await gateway.connections.describe_absence(node, "zimg")

    async def test() -> None:
        connection = await gateway.connect(node)
        connection.lose()
        await gateway.connections.remove(connection)
        gateway.harness.redis.hset(  # long ago, by Redis' own clock
            gateway.harness.queue.keys.nodes(), f"node {node}", f"{connection.number} 1 absent i1 g1 "
        )
        monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
        await gateway.connections.beat()
        assert await absence() == (503, "node_away")
        for _ in range(30):  # without a gap
            seconds[0] += 5
            await gateway.connections.beat()
        assert await absence() == (410, "node_gone")
        seconds[0] += 60  # This gateway, or Redis, was away.
        await gateway.connections.beat()
        assert await absence() == (503, "node_away")

    asyncio.run(test())


def test_the_slots_of_a_node_count_while_it_is_connected(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(queues, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    dispatcher, node = gateway.harness.dispatcher, gateway.enroll("attic")

    def count_slots() -> int:
        now_s[0] += 1.1
        return dispatcher.queues.count_slots(dispatcher.catalog.refresh(), "zimg")

    async def test() -> None:
        before = count_slots()
        connection = await gateway.connect(node)
        assert count_slots() == before + 1
        await gateway.connections.remove(connection)
        assert count_slots() == before

    _run(test)
