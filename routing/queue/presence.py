"""Where nodes are connected, and which of them take jobs.

One hash has the connection of each node and the address of each gateway.  Each fleet has the nodes that take jobs: only
these are offered any.  Every connection of a node has a higher number than the one before, and what an older connection
does is ignored.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from slotkeeper.redis.scripts import Command, Scripts, log_failures

BEAT_S = 2.0
"""How often a gateway reports that it lives."""
GATEWAY_TTL_MS = 6_000
"""A gateway without a report for so long counts as dead."""
_NODES_AT_ONCE = 500
_GATEWAY_DIED = "its gateway died"


class NodeState(StrEnum):
    """The state of a node's connection.  PAUSED: it is connected, and its owner takes no jobs."""

    CONNECTED = "connected"
    PAUSED = "paused"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Connection:
    """The newest connection of a node.  since_ms: of its state.  gateway: where it is, or was, connected."""

    number: int
    since_ms: int
    state: NodeState
    instance: str
    gateway: str
    reason: str


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that lives, or has not ended properly.  until_ms: by Redis' clock."""

    name: str
    until_ms: int
    address: str


@dataclass(frozen=True, slots=True)
class PresenceSnapshot:
    """All connections of nodes, by the node's id, and all gateways by their names, at one moment of Redis' clock."""

    now_ms: int
    nodes: Mapping[str, Connection]
    gateways: Mapping[str, Gateway]

    def is_alive(self, gateway: str) -> bool:
        """Return whether a gateway has reported recently."""
        found = self.gateways.get(gateway)
        return found is not None and found.until_ms > self.now_ms

    def state_of(self, node: str) -> Connection | None:
        """Return the connection of a node, ABSENT if its gateway has died; None: none is known."""
        found = self.nodes.get(node)
        if found is None or found.state is NodeState.ABSENT or self.is_alive(found.gateway):
            return found
        gateway = self.gateways.get(found.gateway)
        since_ms = found.since_ms if gateway is None else max(gateway.until_ms, found.since_ms)
        return Connection(found.number, since_ms, NodeState.ABSENT, found.instance, found.gateway, _GATEWAY_DIED)


class Claim(NamedTuple):
    """The number of a new connection; 0: another instance is connected at the gateway `former`."""

    number: int
    former: str


class NodePresence(NamedTuple):
    """Whether a node, by the name of its server, takes jobs over the connection with this number."""

    server: str
    number: int
    present: bool


class PresenceScripts(Protocol):
    """The scripts of this module."""

    def connect_node(
        self, key: str, *, node: str, instance: str, gateway: str, state: str, reason: str, replaces: bool
    ) -> Command[Claim]: ...
    def note_node(
        self, key: str, *, node: str, number: int, instance: str, gateway: str, state: str, reason: str
    ) -> Command[bool]: ...
    def gateway_beat(self, key: str, *, gateway: str, address: str, ttl_ms: int) -> Command[bool]: ...
    def set_presence(self, fleet: str, *, gateway: str, nodes: Sequence[NodePresence]) -> Command[int]: ...


class Presence:
    """The connections of nodes.  Methods raise redis errors."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts, self._key = scripts, scripts.keys.nodes()
        self._lua: PresenceScripts = scripts.bind(PresenceScripts)

    def connect(
        self, node: str, instance: str, gateway: str, state: NodeState, reason: str = "", *, replaces: bool = False
    ) -> Claim:
        """Note a new connection of a node, unless another instance of its agent is connected at a living gateway.

        replaces: that instance's connection was found dead.
        """
        command = self._lua.connect_node(
            self._key, node=node, instance=instance, gateway=gateway, state=state, reason=reason, replaces=replaces
        )
        return self._scripts.run(command)

    def note(self, node: str, number: int, instance: str, gateway: str, state: NodeState, reason: str = "") -> bool:
        """Note the state of a connection.  Returns False if the node has another one."""
        command = self._lua.note_node(
            self._key, node=node, number=number, instance=instance, gateway=gateway, state=state, reason=reason
        )
        return self._scripts.run(command)

    def beat(self, gateway: str, address: str) -> bool:
        """Report that a gateway lives.  Returns False if this Redis did not know it.  address: "": it ends."""
        return self._scripts.run(
            self._lua.gateway_beat(self._key, gateway=gateway, address=address, ttl_ms=GATEWAY_TTL_MS)
        )

    def read(self) -> PresenceSnapshot:
        """Return all connections."""
        with self._scripts.redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(self._key)
            pipe.time()
            fields, (seconds, microseconds) = pipe.execute()
        found = {name.decode(): value.decode() for name, value in fields.items()}
        return PresenceSnapshot(seconds * 1000 + microseconds // 1000, *_parse(found))

    def find_gateway(self, node: str) -> tuple[int, str] | None:
        """Return the number of a node's connection and the address of its gateway; None: it is not connected."""
        redis = self._scripts.redis
        text: Any = redis.hget(self._key, f"node {node}")
        found = None if text is None else _parse({f"node {node}": text.decode()})[0][node]
        if found is None or found.state is NodeState.ABSENT:
            return None
        with redis.pipeline(transaction=False) as pipe:
            pipe.hget(self._key, f"gateway {found.gateway}")
            pipe.time()
            gateway, (seconds, _) = pipe.execute()
        if gateway is None:
            return None
        until_ms, _, address = gateway.decode().partition(" ")
        return (found.number, address) if int(until_ms) > seconds * 1000 else None

    def set_present(self, fleet: str, nodes: Iterable[NodePresence], gateway: str = "") -> int:
        """Set which nodes of a fleet take jobs, and return how many that changes.  The caller makes offers then.

        gateway: the nodes are all of this gateway.
        """
        given = list(nodes)
        parts = [given[at : at + _NODES_AT_ONCE] for at in range(0, len(given), _NODES_AT_ONCE)] or [[]]
        last = len(parts) - 1
        return sum(
            self._scripts.run(self._lua.set_presence(fleet, gateway=gateway if number == last else "", nodes=part))
            for number, part in enumerate(parts)
        )

    def list_present(self, fleets: Collection[str]) -> dict[str, dict[str, int]]:
        """Return the nodes that take jobs, by fleet: server -> number.  A fleet that fails is left out."""
        with self._scripts.redis.pipeline(transaction=False) as pipe:
            for fleet in fleets:
                pipe.hgetall(self._scripts.keys.present_nodes(fleet))
            answers = pipe.execute(raise_on_error=False)
        found = dict(zip(fleets, answers, strict=True))
        failed = {fleet: answer for fleet, answer in found.items() if isinstance(answer, Exception)}
        log_failures("presence_not_read", failed)  # type: ignore[arg-type]
        return {
            fleet: {name.decode(): int(number) for name, number in answer.items() if not name.startswith(b"#")}
            for fleet, answer in found.items()
            if fleet not in failed
        }

    def knows_gateway(self, gateway: str, fleets: Collection[str]) -> dict[str, bool]:
        """Return of each fleet whether it has the nodes of a gateway; not after Redis was emptied."""
        with self._scripts.redis.pipeline(transaction=False) as pipe:
            for fleet in fleets:
                pipe.hexists(self._scripts.keys.present_nodes(fleet), f"#{gateway}")
            return dict(zip(fleets, map(bool, pipe.execute()), strict=True))

    def drop_lost_gateways(self, servers: Mapping[str, tuple[str, str]]) -> dict[str, int]:
        """Note the nodes of gateways that have died as absent, and return the fleets where that changed something.

        servers: id of a node -> fleet and name of its server.
        """
        connections = self.read()
        lost = {name for name, one in connections.gateways.items() if one.until_ms <= connections.now_ms}
        gone = defaultdict[str, list[NodePresence]](list)
        for node, connection in connections.nodes.items():
            if connection.state is NodeState.ABSENT or connections.is_alive(connection.gateway):
                continue
            self.note(
                node,
                connection.number,
                connection.instance,
                connection.gateway,
                NodeState.ABSENT,
                _GATEWAY_DIED,
            )
            if node in servers:
                fleet, server = servers[node]
                gone[fleet].append(NodePresence(server, connection.number, False))
        changed = {fleet: self.set_present(fleet, nodes) for fleet, nodes in gone.items()}
        for gateway in lost:  # Last: until then a node may be connected there.
            for fleet in {fleet for fleet, _ in servers.values()}:
                self._scripts.redis.hdel(self._scripts.keys.present_nodes(fleet), f"#{gateway}")
            self._scripts.redis.hdel(self._key, f"gateway {gateway}")
        return changed


def _parse(fields: Mapping[str, str]) -> tuple[dict[str, Connection], dict[str, Gateway]]:
    nodes, gateways = dict[str, Connection](), dict[str, Gateway]()
    for field, text in fields.items():
        kind, _, name = field.partition(" ")
        if kind == "gateway":
            until_ms, _, address = text.partition(" ")
            gateways[name] = Gateway(name, int(until_ms), address)
        else:
            number, since_ms, state, instance, gateway, reason = text.split(" ", 5)
            nodes[name] = Connection(int(number), int(since_ms), NodeState(state), instance, gateway, reason)
    return nodes, gateways
