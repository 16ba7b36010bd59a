"""All connections of this gateway, and what Redis and the catalog know of their nodes.

Calls of the database and of Redis block, so they run in threads; the rest is for the event loop.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import structlog
from redis.exceptions import RedisError

from app.gateway.connection import NodeConnection
from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance.node_connections import servers_of_nodes
from routing.maintenance.rebuild import refresh_fleet
from routing.queue.fleets import isolate_errors
from routing.queue.presence import Claim, Connection, NodePresence, NodeState, Presence
from slotkeeper.clock import now_ms
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.registry.nodes import Nodes

log = structlog.get_logger(__name__)

_PATIENCE_S = 120.0  # of a model that this gateway does not know


class _Facts(NamedTuple):
    """What a thread needs of a connection."""

    node: str
    number: int
    instance: str
    takes_jobs: bool
    reason: str

    @property
    def state(self) -> NodeState:
        return NodeState.CONNECTED if self.takes_jobs else NodeState.PAUSED


def _facts(connection: NodeConnection) -> _Facts:
    return _Facts(connection.node, connection.number, connection.instance, connection.takes_jobs, connection.reason)


class Connections:
    """The connections of this gateway.

    name: of the gateway.  address: where workers reach it.
    """

    def __init__(self, name: str, address: str, dispatcher: Dispatcher, nodes: Nodes, presence: Presence) -> None:
        self.name, self.address, self.nodes = name, address, nodes
        self._dispatcher, self._presence = dispatcher, presence
        self._by_node: dict[str, NodeConnection] = {}
        self._declared: dict[str, bytes] = {}  # that are to be stored
        self._declaring = asyncio.Lock()
        self._catalog_version = -1
        self._asked_ms: dict[str, int] = {}  # since when nodes that Redis does not know have been asked for

    def __len__(self) -> int:
        return len(self._by_node)

    def find(self, node: str) -> NodeConnection | None:
        """Return the newest connection of a node to this gateway."""
        return self._by_node.get(node)

    # -- a connection begins, changes and ends ---------------------------------------------------------------

    async def claim(self, node: str, instance: str, *, takes_jobs: bool, reason: str, replaces: bool) -> Claim:
        """Note a new connection in Redis, as Presence.connect does.  Raises redis errors."""
        state = NodeState.CONNECTED if takes_jobs else NodeState.PAUSED
        return await asyncio.to_thread(
            self._presence.connect, node, instance, self.name, state, reason, replaces=replaces
        )

    async def find_address(self, gateway: str) -> str | None:
        """Return where another gateway is reached."""
        found = (await asyncio.to_thread(self._presence.read)).gateways.get(gateway)
        return None if found is None else found.address

    def add(self, connection: NodeConnection) -> NodeConnection | None:
        """Add a claimed connection, and return the one that it replaces."""
        former = self._by_node.get(connection.node)
        self._by_node[connection.node] = connection
        return former

    async def declare(self, node: str, declaration: bytes) -> None:
        """Store what a node declares.  Nodes that wait for the same transaction share the next one.

        Raises DatabaseUnavailable.
        """
        self._declared[node] = declaration
        async with self._declaring:
            if node in self._declared:
                declared, self._declared = self._declared, {}
                await asyncio.to_thread(self._declare, declared)

    async def show(self, connection: NodeConnection) -> None:
        """Let jobs be offered to a node, or no more, as its owner wants it."""
        await asyncio.to_thread(self._show, [_facts(connection)])

    async def remove(self, connection: NodeConnection) -> None:
        """End the presence of a node whose connection has ended."""
        if self._by_node.get(connection.node) is connection:
            del self._by_node[connection.node]
        await asyncio.to_thread(self._hide, _facts(connection))

    def _declare(self, declared: Mapping[str, bytes]) -> None:
        for fleet in self.nodes.declare(declared, now_ms()):
            with isolate_errors("declare", fleet=fleet):
                refresh_fleet(self._dispatcher, fleet)
        self._dispatcher.catalog.refresh()

    def _show(self, found: Iterable[_Facts]) -> None:
        servers = servers_of_nodes(self._dispatcher.catalog.get())
        by_fleet = defaultdict[str, list[NodePresence]](list)
        for one in found:
            self._presence.note(one.node, one.number, one.instance, self.name, one.state, one.reason)
            if one.node in servers:
                fleet, server = servers[one.node]
                by_fleet[fleet].append(NodePresence(server, one.number, one.takes_jobs))
        for fleet, nodes in by_fleet.items():
            with isolate_errors("show_nodes", fleet=fleet):
                if self._presence.set_present(fleet, nodes):
                    self._dispatcher.publish_offers(self._dispatcher.queues.offer_all(fleet))

    def _hide(self, one: _Facts) -> None:
        try:
            self._presence.note(one.node, one.number, one.instance, self.name, NodeState.ABSENT, one.reason)
            servers = servers_of_nodes(self._dispatcher.catalog.get())
            if one.node in servers:
                fleet, server = servers[one.node]
                self._presence.set_present(fleet, [NodePresence(server, one.number, False)])
        except (RedisError, DatabaseUnavailable) as error:  # The next beat of this gateway leaves the node out.
            log.warning("node_not_hidden", node=one.node, error=str(error))

    # -- the beat --------------------------------------------------------------------------------------------

    async def beat(self) -> list[NodeConnection]:
        """Report that this gateway lives, repair what Redis lacks, and return connections whose keys were revoked.

        Raises redis errors, DatabaseUnavailable.
        """
        found = [_facts(connection) for connection in self._by_node.values()]
        revoked = await asyncio.to_thread(self._beat, found)
        return [self._by_node[node] for node in revoked if node in self._by_node]

    def _beat(self, found: list[_Facts]) -> set[str]:
        is_known = self._presence.beat(self.name, self.address)
        catalog = self._dispatcher.catalog.get()
        servers = servers_of_nodes(catalog)
        fleets = {servers[one.node][0] for one in found if one.node in servers}
        has_changed = catalog.version != self._catalog_version
        if not is_known or has_changed:
            self._show(found)
        for fleet, is_complete in self._presence.knows_gateway(self.name, sorted(fleets)).items():
            if not is_complete:
                here = [one for one in found if one.node in servers and servers[one.node][0] == fleet]
                self._presence.set_present(
                    fleet,
                    [NodePresence(servers[one.node][1], one.number, one.takes_jobs) for one in here],
                    self.name,
                )
        revoked = set[str]()
        if has_changed:
            valid = self.nodes.list_ids()
            revoked = {one.node for one in found if one.node not in valid}
            self._catalog_version = catalog.version
        return revoked

    async def end(self) -> None:
        """Report that this gateway ends."""
        await asyncio.to_thread(self._presence.beat, self.name, "")

    # -- a node that is not here -----------------------------------------------------------------------------

    async def describe_absence(self, node: str, model: str) -> tuple[int, str]:
        """Return the status and the code with which a poll of a node that is not connected here is answered.

        421: it is connected elsewhere; 503: it may come back; 410: its model waits no longer for it.
        """
        connection, now = await asyncio.to_thread(self._find, node)
        if connection is not None and connection.state is not NodeState.ABSENT:
            return 421, "node_moved"
        found = self._dispatcher.catalog.cached().model(model)
        patience_ms = 1000 * (_PATIENCE_S if found is None else found.config.node_patience)
        since_ms = self._asked_ms.setdefault(node, now) if connection is None else connection.since_ms
        if connection is not None:
            self._asked_ms.pop(node, None)
        return (503, "node_away") if now - since_ms < patience_ms else (410, "node_gone")

    def _find(self, node: str) -> tuple[Connection | None, int]:
        connections = self._presence.read()
        return connections.state_of(node), connections.now_ms
