"""Where nodes are connected: the gateway of each, read from Redis."""

import asyncio
import time
from functools import lru_cache

from redis.exceptions import RedisError

from routing.queue.presence import Presence
from slotkeeper.process import singleton
from tasks.security.keyring import gateway_keys
from tasks.servers.endpoint import Endpoint, parse_endpoint
from tasks.servers.node_resolver import GatewayAddress, ResolveError
from tasks.services import scripts

_KEPT_S = 1.0
_MAX_KEPT = 10_000


class NodeAddresses:
    """The gateways of nodes, each kept for a second.  Thread-safe."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._kept: dict[str, tuple[float, GatewayAddress]] = {}

    async def resolve(self, node: str) -> GatewayAddress | None:
        """Return the node's gateway, any gateway if the node is not connected, or None without one.

        Raises ResolveError.
        """
        kept = self._kept.get(node)
        if kept is not None and kept[0] > time.monotonic():
            return kept[1]
        try:
            found = await asyncio.to_thread(self._find, node)
        except RedisError as error:
            raise ResolveError(str(error)) from error
        if found is not None and found.number:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[node] = (time.monotonic() + _KEPT_S, found)
        return found

    def forget(self, node: str) -> None:
        """Look the node up again the next time."""
        self._kept.pop(node, None)

    def _find(self, node: str) -> GatewayAddress | None:
        if (found := self._presence.find_gateway(node)) is not None:
            number, address = found
            return GatewayAddress(_gateway_endpoint(address), number)
        connections = self._presence.read()
        alive = [one.address for one in connections.gateways.values() if connections.is_alive(one.name)]
        return GatewayAddress(_gateway_endpoint(min(alive)), 0) if alive else None


def gateway_headers() -> dict[str, str]:
    """Return the headers with which this installation authenticates at its gateways."""
    return {"Authorization": f"Bearer {gateway_keys()[0]}"}


@lru_cache(maxsize=1024)
def _gateway_endpoint(address: str) -> Endpoint:
    endpoint = parse_endpoint(address)
    lines = (f"{name}: {value}" for name, value in gateway_headers().items())
    return endpoint._replace(header_lines=(*endpoint.header_lines, *lines))


@singleton
def node_addresses() -> NodeAddresses:
    return NodeAddresses(Presence(scripts()))
