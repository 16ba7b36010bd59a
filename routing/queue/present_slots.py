"""On how many slots a model can run now: those of nodes count only while the node is connected and takes jobs."""

import time

from redis.exceptions import RedisError

from routing.queue.presence import Presence
from slotkeeper.redis.scripts import Scripts
from slotkeeper.registry.snapshot import CatalogSnapshot

_KEPT_S = 1.0


class PresentSlots:
    """Counts slots.  Which nodes of a fleet are connected is read once a second at most.  Thread-safe."""

    def __init__(self, scripts: Scripts) -> None:
        self._presence = Presence(scripts)
        self._kept: dict[str, tuple[float, frozenset[str]]] = {}  # fleet -> until when (monotonic s), its nodes

    def count(self, catalog: CatalogSnapshot, model: str) -> int:
        """Count the slots on which this model can run now.  All nodes count while Redis has not answered yet."""
        serving = catalog.servers_for(model)
        present = self._present(serving[0].fleet) if any(server.node for server in serving) else None
        return sum(
            server.slots for server in serving if server.node is None or present is None or server.name in present
        )

    def _present(self, fleet: str) -> frozenset[str] | None:
        until_s, present = self._kept.get(fleet, (0.0, None))
        if time.monotonic() >= until_s:
            try:
                found = self._presence.list_present([fleet]).get(fleet)
            except RedisError:
                found = None
            if found is not None:
                present = frozenset(found)
                self._kept[fleet] = time.monotonic() + _KEPT_S, present
        return present
