"""All connections of this gateway, and what Redis and the catalog know of their nodes.

Calls of the database and of Redis block, so they run in threads; the rest is for the event loop.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import structlog
from redis.exceptions import RedisError

from app.gateway.connection import NodeConnection
from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance.node_connections import servers_of_nodes
from routing.maintenance.rebuild import refresh_fleet
from routing.queue.fleets import isolate_errors
from routing.queue.presence import GATEWAY_TTL_MS, Claim, Connection, NodePresence, NodeState, Presence
from slotkeeper.clock import now_ms
from slotkeeper.errors import DatabaseUnavailable
from slotkeeper.registry.nodes import Nodes

log = structlog.get_logger(__name__)

_DECLARE_EVERY_S = 10.0  # of one node: each other declaration is a change of the catalog
_BATCH_S = 0.05  # So long declarations of further nodes are waited for.
_PATIENCE_S = 120.0  # of a model that this gateway does not know


class BeatResult(NamedTuple):
    """Connections that have to be closed: their nodes were revoked, or are connected elsewhere by now."""

    revoked: list[NodeConnection]
    replaced: list[NodeConnection]


class Connections:
    """The connections of this gateway.

    name: of the gateway.  address: where workers reach it.
    """

    def __init__(self, name: str, address: str, dispatcher: Dispatcher, nodes: Nodes, presence: Presence) -> None:
        self.name, self.address, self.nodes = name, address, nodes
        self._dispatcher, self._presence = dispatcher, presence
        self._by_node: dict[str, NodeConnection] = {}
        self._declared: dict[str, bytes] = {}  # that are to be stored
        self._batch: asyncio.Future[None] | None = None  # of the transaction that stores them
        self._declared_s: dict[str, float] = {}  # monotonic: when a node's declaration was stored last
        self._catalog_version = -1
        self._lacks_nodes = True  # Redis may lack some of the connections.
        # The beat must not wait for the threads of others, whose calls may hang.
        self._beat_thread = ThreadPoolExecutor(1, "beat")
        self._beaten_s = self._steady_since_s = float("-inf")  # monotonic: the last beat, and the first without a gap

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
        """Add a claimed connection, and return the one that is replaced: it may be the given one, which was slower."""
        former = self._by_node.get(connection.node)
        if former is not None and former.number > connection.number:
            return connection
        self._by_node[connection.node] = connection
        return former

    async def declare(self, node: str, declaration: bytes) -> None:
        """Store what a node declares: each at most once in ten seconds, and several nodes in one transaction.

        Raises DatabaseUnavailable.
        """
        await asyncio.sleep(self._declared_s.get(node, float("-inf")) + _DECLARE_EVERY_S - time.monotonic())
        self._declared[node] = declaration
        if self._batch is None:
            self._batch = asyncio.ensure_future(self._store_declared())
        await asyncio.shield(self._batch)

    async def _store_declared(self) -> None:
        await asyncio.sleep(_BATCH_S)
        declared, self._declared, self._batch = self._declared, {}, None
        now_s = time.monotonic()
        self._declared_s = {node: at_s for node, at_s in self._declared_s.items() if now_s - at_s < _DECLARE_EVERY_S}
        self._declared_s |= dict.fromkeys(declared, now_s)
        await asyncio.to_thread(self._declare, declared)

    async def show(self, connection: NodeConnection) -> bool:
        """Let jobs be offered to a node, or no more, as its owner wants it.

        Returns False if the node has another connection by now.
        """
        return not await asyncio.to_thread(self._show, [connection])

    async def remove(self, connection: NodeConnection) -> None:
        """End the presence of a node whose connection has ended."""
        if self._by_node.get(connection.node) is connection:
            del self._by_node[connection.node]
        await asyncio.to_thread(self._hide, connection)

    def _declare(self, declared: Mapping[str, bytes]) -> None:
        for fleet in self.nodes.declare(declared, now_ms()):
            with isolate_errors("declare", fleet=fleet):
                refresh_fleet(self._dispatcher, fleet)
        self._dispatcher.catalog.refresh()

    def _show(self, found: Sequence[NodeConnection]) -> list[NodeConnection]:
        """Note connections and the presence of their nodes, and return those whose nodes have another one by now."""
        servers, replaced = servers_of_nodes(self._dispatcher.catalog.get()), list[NodeConnection]()
        by_fleet = defaultdict[str, list[NodePresence]](list)
        for one in found:
            state = NodeState.CONNECTED if one.takes_jobs else NodeState.PAUSED
            if not self._presence.note(one.node, one.number, one.instance, self.name, state, one.reason):
                replaced.append(one)
            elif one.node in servers:
                fleet, server = servers[one.node]
                by_fleet[fleet].append(NodePresence(server, one.number, one.takes_jobs))
        for fleet, nodes in by_fleet.items():
            with isolate_errors("show_nodes", fleet=fleet):
                if self._presence.set_present(fleet, nodes):
                    self._dispatcher.publish_offers(self._dispatcher.queues.offer_all(fleet))
        for one in found:
            if one.is_lost:  # It has ended meanwhile, and `_hide` may have been the quicker.
                self._hide(one)
        return replaced

    def _hide(self, one: NodeConnection) -> None:
        try:
            self._presence.note(one.node, one.number, one.instance, self.name, NodeState.ABSENT)
            servers = servers_of_nodes(self._dispatcher.catalog.get())
            if one.node in servers:
                fleet, server = servers[one.node]
                self._presence.set_present(fleet, [NodePresence(server, one.number, False)])
        except (RedisError, DatabaseUnavailable) as error:  # The next beat of this gateway leaves the node out.
            log.warning("node_not_hidden", node=one.node, error=str(error))

    # -- the beat --------------------------------------------------------------------------------------------

    async def beat(self) -> BeatResult:
        """Report that this gateway lives, and repair what Redis lacks.  Raises redis errors, DatabaseUnavailable."""
        found = list(self._by_node.values())
        return await asyncio.get_running_loop().run_in_executor(self._beat_thread, self._beat, found)

    def _beat(self, found: list[NodeConnection]) -> BeatResult:
        self._lacks_nodes |= not self._presence.beat(self.name, self.address)
        now_s = time.monotonic()
        if self._lacks_nodes or (now_s - self._beaten_s) * 1000 > GATEWAY_TTL_MS:
            self._steady_since_s = now_s
        self._beaten_s = now_s
        catalog = self._dispatcher.catalog.get()
        servers = servers_of_nodes(catalog)
        fleets = {servers[one.node][0] for one in found if one.node in servers}
        has_changed = catalog.version != self._catalog_version
        replaced = self._show(found) if self._lacks_nodes or has_changed else []
        self._lacks_nodes = False  # Only after all were noted.
        for fleet, is_complete in self._presence.knows_gateway(self.name, sorted(fleets)).items():
            if not is_complete:
                here = [one for one in found if one.node in servers and servers[one.node][0] == fleet]
                self._presence.set_present(
                    fleet,
                    [NodePresence(servers[one.node][1], one.number, one.takes_jobs) for one in here],
                    self.name,
                )
        revoked: list[NodeConnection] = []
        if has_changed:
            valid = self.nodes.list_ids()
            revoked = [one for one in found if one.node not in valid]
            self._catalog_version = catalog.version
        return BeatResult(revoked, replaced)

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
        # While no gateway could be reached, or Redis, the node could not come back.
        absent_ms = (time.monotonic() - self._steady_since_s) * 1000
        if connection is not None:
            absent_ms = min(absent_ms, now - connection.since_ms)
        return (503, "node_away") if absent_ms < patience_ms else (410, "node_gone")

    def _find(self, node: str) -> tuple[Connection | None, int]:
        connections = self._presence.read()
        return connections.state_of(node), connections.now_ms
