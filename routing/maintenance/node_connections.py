"""Keep nodes in line: end the presence of those whose gateway has died, and bring endpoints in line with models."""

from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance.rebuild import refresh_fleet
from routing.queue.fleets import isolate_errors
from routing.queue.presence import Presence
from slotkeeper.clock import now_ms
from slotkeeper.registry.nodes import Nodes
from slotkeeper.registry.snapshot import CatalogSnapshot


def servers_of_nodes(catalog: CatalogSnapshot) -> dict[str, tuple[str, str]]:
    """Return the fleet and the name of each node's server, by the node's id."""
    return {server.node.id: (server.fleet, server.name) for server in catalog.servers.values() if server.node}


class NodeKeeper:
    """What maintenance does for nodes.  It remembers the version of the catalog with which endpoints are in line."""

    def __init__(self, dispatcher: Dispatcher, nodes: Nodes) -> None:
        self._dispatcher, self._nodes = dispatcher, nodes
        self._presence = Presence(dispatcher.slots.scripts)
        self._applied = -1

    def drop_lost_gateways(self) -> int:
        """Offer nothing more to nodes whose gateway has died, and return how many there were."""
        return sum(self._presence.drop_lost_gateways(servers_of_nodes(self._dispatcher.catalog.get())).values())

    def apply_models(self) -> list[str]:
        """After a change of the catalog, give nodes the endpoints that follow from it, and return the fleets changed.

        A gateway does the same when a node declares something new.
        """
        version = self._dispatcher.catalog.get().version
        if version == self._applied:
            return []
        changed = self._nodes.apply(now_ms())
        for fleet in changed:
            with isolate_errors("apply_nodes", fleet=fleet):
                refresh_fleet(self._dispatcher, fleet)
        self._applied = self._dispatcher.catalog.get().version if not changed else -1
        return changed
