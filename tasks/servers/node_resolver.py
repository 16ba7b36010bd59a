"""How the HTTP client finds the gateway of a node: implemented by tasks/node_addresses.py, which knows Redis."""

from typing import NamedTuple, Protocol

from tasks.servers.endpoint import Endpoint


class ResolveError(Exception):
    """It cannot be found out now where a node is connected."""


class GatewayAddress(NamedTuple):
    """A gateway, and the number of the node's connection; 0: the node is not connected, as far as is known."""

    endpoint: Endpoint
    number: int


class NodeResolver(Protocol):
    """Finds the gateways of nodes."""

    async def resolve(self, node: str) -> GatewayAddress | None:
        """Return the node's gateway, any gateway if the node is not connected, or None without one.

        Raises ResolveError.
        """

    def forget(self, node: str) -> None:
        """Look the node up again the next time, since a request did not reach it."""
