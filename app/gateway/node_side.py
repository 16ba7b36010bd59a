"""The side of the agents: the handshake of a connection, its control messages, and its end."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog
from redis.exceptions import RedisError
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from app.gateway.connection import NodeConnection
from app.gateway.connections import Connections
from slotkeeper import signatures
from slotkeeper.clock import now_ms
from slotkeeper.errors import Conflict, DatabaseUnavailable
from slotkeeper.registry.nodes import Declaration, InvalidDeclaration, Node, digest_of, parse_declaration
from slotkeeper.tunnel import handshake
from slotkeeper.tunnel.frames import FrameType, TunnelError, decode_control, encode_json_frame
from slotkeeper.tunnel.handshake import Hello

log = structlog.get_logger(__name__)

SILENT_S = 45.0
"""After as many seconds without a sign of its agent a connection is broken; agents send a ping each 20 s."""
_MAX_UNVERIFIED, _MAX_UNVERIFIED_OF_ADDRESS = 200, 10
_MAX_CONTROLS = 8  # of one connection that are handled at a time


class _Refused(Exception):
    """The connection is closed with this code, for this reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class NodeSocket(ServerConnection):
    """A WebSocket that notes when it received something last, also a ping.

    Pings of agents show that both sides are there; those of a gateway would double what idle nodes cost it.
    """

    received_s = float("inf")  # monotonic

    def data_received(self, data: bytes) -> None:
        self.received_s = time.monotonic()
        super().data_received(data)


class NodeSide:
    """Handles the WebSockets of agents.

    hosts: names under which agents may dial this gateway.  max_nodes: connections at a time.
    ping: returns whether a node answers at another gateway.
    """

    def __init__(
        self,
        connections: Connections,
        hosts: frozenset[str],
        max_nodes: int,
        ping: Callable[[str, str], Any],
    ) -> None:
        self._connections, self._hosts, self._max_nodes, self._ping = connections, hosts, max_nodes, ping
        self._unverified = Counter[str]()
        self._sockets: dict[NodeConnection, NodeSocket] = {}
        self._claiming = set[str]()  # nodes
        self._closing = set[asyncio.Task[None]]()
        self.is_stopping = False

    async def handle(self, websocket: ServerConnection) -> None:
        """Serve one connection, a NodeSocket, until it ends."""
        assert isinstance(websocket, NodeSocket)
        try:
            connection, node = await self._admit(websocket)
        except _Refused as refused:
            log.info("node_refused", code=refused.code, reason=refused.reason)
            await websocket.close(refused.code, refused.reason[: handshake.MAX_REASON])
            return
        except (ConnectionClosed, TimeoutError, TunnelError):
            await websocket.close(handshake.CLOSE_PROTOCOL, "the handshake failed")
            return
        except (DatabaseUnavailable, RedisError) as error:
            log.warning("node_not_admitted", error=str(error))
            await websocket.close(handshake.CLOSE_TRY_LATER, "the database or Redis does not answer")
            return
        log.info("node_connected", node=node.name, number=connection.number)
        await self._serve(websocket, connection)
        log.info("node_disconnected", node=node.name, number=connection.number)

    def close_soon(self, connection: NodeConnection, code: int, reason: str) -> None:
        """Close a connection; an agent that does not answer takes a while."""
        task = asyncio.ensure_future(self._close(connection, code, reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, connection: NodeConnection, code: int, reason: str) -> None:
        websocket = self._sockets.get(connection)
        if websocket is not None:
            await websocket.close(code, reason)

    def drop_silent(self) -> None:
        """Break the connections whose agents send no pings any more."""
        silent_since_s = time.monotonic() - SILENT_S
        for connection, websocket in self._sockets.items():
            if websocket.received_s < silent_since_s:
                log.warning("node_silent", node=connection.node)
                websocket.transport.abort()

    async def stop(self, within_s: float) -> None:
        """Tell all agents to connect elsewhere, wait until their requests have ended, and close."""
        self.is_stopping = True
        connections = list(self._sockets)
        for connection in connections:
            connection.send_control("go_away")
        waits = [asyncio.ensure_future(connection.wait_idle()) for connection in connections]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=within_s)
            for wait in pending:
                wait.cancel()
        await asyncio.gather(
            *(self._close(connection, handshake.CLOSE_STOPPING, "the gateway stops") for connection in connections)
        )

    # -- the handshake ---------------------------------------------------------------------------------------

    async def _admit(self, websocket: NodeSocket) -> tuple[NodeConnection, Node]:
        """Verify an agent, and claim its node.  Raises _Refused, and what its parts raise."""
        address = str((websocket.remote_address or ("",))[0])
        if self.is_stopping or len(self._connections) >= self._max_nodes:
            raise _Refused(handshake.CLOSE_TRY_LATER, "this gateway takes no more connections")
        if self._unverified.total() >= _MAX_UNVERIFIED or self._unverified[address] >= _MAX_UNVERIFIED_OF_ADDRESS:
            raise _Refused(handshake.CLOSE_TRY_LATER, "too many connections are being verified")
        self._unverified[address] += 1
        try:
            async with asyncio.timeout(handshake.HANDSHAKE_S):
                hello, node, declared = await self._verify(websocket)
        finally:
            self._unverified[address] -= 1
            self._unverified += Counter()  # without addresses that have none
        connection = self._make_connection(websocket, hello, node, declared.slots, await self._claim(hello))
        try:
            await self._store(hello, node)
        except BaseException:
            await self._connections.remove(connection)
            raise
        return connection, node

    async def _verify(self, websocket: NodeSocket) -> tuple[Hello, Node, Declaration]:
        nonce = handshake.make_nonce()
        challenge = {"type": "challenge", "nonce": signatures.encode_bytes(nonce), "gateway": self._connections.name}
        await websocket.send(encode_json_frame(FrameType.CONTROL, 0, challenge))
        hello = handshake.read_hello(decode_control(await websocket.recv()))
        if hello.host not in self._hosts:  # An operator has to mend that, so agents go on trying.
            reason = f"{hello.host} is no name of this gateway; see SLOTKEEPER_NODE_HOSTS"
            raise _Refused(handshake.CLOSE_TRY_LATER, reason)
        node, keys = await asyncio.to_thread(self._connections.nodes.find, hello.node) or (None, {})
        if node is None or hello.key not in keys or not hello.is_signed_by(keys[hello.key], nonce):
            raise _Refused(handshake.CLOSE_REVOKED, "the key is not valid: enrol the node again")
        try:
            return hello, node, parse_declaration(hello.declaration.encode(), node.grant)
        except InvalidDeclaration as invalid:
            raise _Refused(handshake.CLOSE_REFUSED, f"declaration: {invalid}") from None

    async def _claim(self, hello: Hello) -> int:
        """Return the number of the connection.  Raises _Refused: another instance answers."""
        if hello.node in self._claiming or len(self._claiming) >= _MAX_UNVERIFIED:
            raise _Refused(handshake.CLOSE_TRY_LATER, "another connection of this node is being admitted")
        self._claiming.add(hello.node)
        try:
            return await self._claim_once(hello)
        finally:
            self._claiming.discard(hello.node)

    async def _claim_once(self, hello: Hello) -> int:
        replaces = False
        while True:
            claim = await self._connections.claim(
                hello.node, hello.instance, takes_jobs=hello.takes_jobs, reason=hello.reason, replaces=replaces
            )
            if claim.number:
                return claim.number
            address = await self._connections.find_address(claim.former)
            if address is not None and await self._ping(address, hello.node):
                raise _Refused(handshake.CLOSE_OTHER_INSTANCE, "another agent with this key is connected")
            replaces = True

    async def _store(self, hello: Hello, node: Node) -> None:
        declaration = hello.declaration.encode()
        if node.digest != digest_of(declaration):
            await self._connections.declare(node.id, declaration)
        else:
            await asyncio.to_thread(self._connections.nodes.note_seen, node, now_ms())
        await asyncio.to_thread(self._connections.nodes.retire_older_keys, node.id, hello.key, now_ms())

    def _make_connection(
        self, websocket: NodeSocket, hello: Hello, node: Node, declared_slots: int, number: int
    ) -> NodeConnection:
        slots = min(declared_slots, node.grant.max_slots)
        controls = _Controls(self._connections, node)
        connection = NodeConnection(node.id, number, hello.instance, slots, websocket.send, controls.on_message)
        controls.connection = connection
        connection.takes_jobs, connection.reason = hello.takes_jobs, hello.reason
        connection.digest = digest_of(hello.declaration.encode())
        return connection

    # -- a connection ----------------------------------------------------------------------------------------

    async def _serve(self, websocket: NodeSocket, connection: NodeConnection) -> None:
        self._sockets[connection] = websocket
        try:
            connection.send_control("welcome", connection=connection.number, declared=connection.digest)
            if self.is_stopping:
                connection.send_control("go_away")
            former = self._connections.add(connection)
            if former is not None:
                self.close_soon(former, handshake.CLOSE_REPLACED, "the agent has connected again")
            if not await self._connections.show(connection):
                self.close_soon(connection, handshake.CLOSE_REPLACED, "the node has another connection")
            if not await asyncio.to_thread(self._connections.nodes.find_keys, connection.node):
                self.close_soon(connection, handshake.CLOSE_REVOKED, "the node was revoked")  # in this moment
            async for message in websocket:
                connection.receive(message)
        except TunnelError as error:
            log.warning("tunnel_error", node=connection.node, error=str(error))
            await websocket.close(handshake.CLOSE_PROTOCOL, str(error)[: handshake.MAX_REASON])
        except (DatabaseUnavailable, RedisError) as error:
            log.warning("node_not_shown", node=connection.node, error=str(error))
            await websocket.close(handshake.CLOSE_TRY_LATER, "the database or Redis does not answer")
        except ConnectionClosed:
            pass
        finally:
            connection.lose()
            del self._sockets[connection]
            await self._connections.remove(connection)


class _Controls:
    """Handles the control messages of one agent, one after the other."""

    def __init__(self, connections: Connections, node: Node) -> None:
        self._connections, self._node = connections, node
        self.connection: NodeConnection | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._turn = asyncio.Lock()

    def on_message(self, message: dict[str, Any]) -> None:
        """Begin to handle a message.  Raises TunnelError: too many are being handled."""
        if len(self._tasks) >= _MAX_CONTROLS:
            raise TunnelError("too many control messages")
        task = asyncio.ensure_future(self._handle(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, message: dict[str, Any]) -> None:
        connection = self.connection
        assert connection is not None
        async with self._turn:
            try:
                match message["type"]:
                    case "accepts":
                        connection.takes_jobs = message.get("yes") is True
                        connection.reason = handshake.clean_reason(str(message.get("reason", "")))
                        await self._connections.show(connection)
                    case "declare":
                        await self._declare(connection, str(message.get("declaration", "")).encode())
                    case "rotate":
                        await self._rotate(connection, message)
                    case _:
                        pass  # of a newer agent
            except (DatabaseUnavailable, RedisError, InvalidDeclaration, Conflict, ValueError) as error:
                text = str(error)[: handshake.MAX_REASON]
                log.warning("control_failed", node=self._node.name, error=text)
                connection.send_control("failed", error=text)

    async def _declare(self, connection: NodeConnection, declaration: bytes) -> None:
        parse_declaration(declaration, self._node.grant)
        await self._connections.declare(self._node.id, declaration)
        connection.digest = digest_of(declaration)
        connection.send_control("declared", digest=connection.digest)
        await self._connections.show(connection)

    async def _rotate(self, connection: NodeConnection, message: dict[str, Any]) -> None:
        """Add a key: the old one has signed it, and it has signed the id of the node.  Raises ValueError, Conflict."""
        nodes = self._connections.nodes
        public_key = signatures.decode_bytes(message.get("public_key"))
        by_old, by_new = (signatures.decode_bytes(message.get(name)) for name in ("signature", "proof"))
        keys = await asyncio.to_thread(nodes.find_keys, self._node.id)
        old = keys.get(str(message.get("key")))
        if (
            old is None
            or not signatures.is_signed(old, signatures.ROTATION_TYPE, public_key, by_old)
            or not signatures.is_signed(public_key, signatures.ROTATION_TYPE, self._node.id.encode(), by_new)
        ):
            raise ValueError("the new key is not signed by the old one, or has not signed the node's id")
        key = await asyncio.to_thread(nodes.rotate, self._node.id, public_key, now_ms())
        connection.send_control("key_stored", key=key)
