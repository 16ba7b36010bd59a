"""Connections of agents, over real WebSockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

from app.gateway import node_side
from app.gateway.connections import Connections
from app.gateway.node_side import SILENT_S, NodeSide, NodeSocket
from routing.queue.presence import Presence
from slotkeeper import signatures
from slotkeeper.registry.nodes import Grant, Nodes
from slotkeeper.tunnel.frames import FrameType, decode_control, encode_json_frame
from slotkeeper.tunnel.handshake import Hello
from tests.support.harness import Harness

_DECLARATION = b'{"models": {"zimg": {}}, "slots": 1}'
_KEY = signatures.make_key()
_PUBLIC = signatures.public_key_of(_KEY)


class Gateway:
    """A gateway with one enrolled node, whose agent the test is."""

    def __init__(self, harness: Harness) -> None:
        nodes = Nodes(harness.catalog, '{"mode": "async"}')
        token = nodes.make_token(Grant(owner="acme", pool="homes"), "ops", harness.now, harness.now + 10_000)[1]
        proof = signatures.sign(_KEY, signatures.ENROLMENT_TYPE, signatures.enrolment_statement(token, _PUBLIC))
        self.node = nodes.enroll(token, "attic", _PUBLIC, proof, harness.now).id
        harness.redis.set("clock:{test:nodes}", harness.now)
        presence = Presence(harness.dispatcher.slots.scripts)
        self.connections = Connections("g1", "http://127.0.0.1:1", harness.dispatcher, nodes, presence)
        self.side = NodeSide(self.connections, frozenset({"127.0.0.1"}), 10, lambda *_: None)

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[ClientConnection]:
        """Connect as the node, and yield the connection after the welcome."""
        listening = serve(self.side.handle, "127.0.0.1", 0, ping_interval=None, create_connection=NodeSocket)
        async with listening as server:
            port = server.sockets[0].getsockname()[1]
            async with connect(f"ws://127.0.0.1:{port}", ping_interval=None, proxy=None) as websocket:
                nonce = signatures.decode_bytes(decode_control(await websocket.recv())["nonce"])
                of = {"node": self.node, "host": "127.0.0.1", "instance": "i1", "agent": "1"}
                hello = Hello.signed(_KEY, nonce, declaration=_DECLARATION, **of)
                await websocket.send(encode_json_frame(FrameType.CONTROL, 0, hello.message()))
                assert decode_control(await websocket.recv())["type"] == "welcome"
                yield websocket


def test_a_connection_is_broken_when_its_agent_sends_no_pings(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(node_side, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    gateway = Gateway(harness)

    async def test() -> None:
        async with gateway.agent() as agent:
            now_s[0] += SILENT_S - 1
            await (await agent.ping())
            now_s[0] += SILENT_S - 1
            gateway.side.drop_silent()
            await (await agent.ping())
            now_s[0] += SILENT_S + 1
            gateway.side.drop_silent()
            with pytest.raises(ConnectionClosed):
                await agent.recv()
            while gateway.connections.find(gateway.node) is not None:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(test(), 30))
