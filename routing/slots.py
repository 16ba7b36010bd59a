"""Slots: which of a fleet's slots can be offered."""

from typing import Any

from jobs.catalog import Snapshot
from routing.config import RoutingSettings
from routing.scripts import Scripts


class Slots:
    """Talks to the fleets' slots.  Every method is one atomic script; redis errors pass through."""

    def __init__(self, scripts: Scripts, settings: RoutingSettings) -> None:
        self._scripts = scripts
        self._settings = settings

    def sync(self, fleet: str, catalog: Snapshot) -> bool:
        """Bring the fleet's servers and slots to what the catalog says.  False: a newer one is there already."""
        args: list[Any] = [catalog.version]
        for server in catalog.servers_of(fleet):
            models = "".join(f"{model}\n" for model in sorted(server.endpoints))
            args += [server.name, f"{server.state} {server.slots}\n{models}", server.slots]
        return self._scripts.run("sync_servers", fleet, args)[0] == b"synced"

    def rest(self, fleet: str, server: str) -> int:
        """A server failed: offer its slots to nobody for a while, longer each time in a row; answers ms."""
        settings = self._settings
        args = [server, settings.unreachable_rest_ms, settings.unreachable_rest_max_ms]
        return int(self._scripts.run("rest", fleet, args)[0])

    def wake(self, fleet: str, server: str) -> int:
        """A server is well: offer its slots again; answers how many were resting."""
        return int(self._scripts.run("rest", fleet, [server, 0, 0])[1])

    def failing(self, fleet: str, server: str) -> bool:
        """Whether the server failed when it was last called or asked."""
        return self._scripts.failures(fleet, server) > 0

    def occupy(self, fleet: str, server: str, count: int, rest_ms: int) -> int:
        """Others use `count` of a server's slots: offer so many fewer for a while; answers how many rest."""
        return int(self._scripts.run("occupy", fleet, [server, count, rest_ms]))
