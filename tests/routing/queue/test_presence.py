"""Nodes: which nodes take jobs, and which connection of a node is current."""

import pytest

from routing.queue.presence import GATEWAY_TTL_MS, Claim, NodePresence, NodeState, Presence
from tests.support.fleet_queue import START_MS, FleetQueue, Server, a

NODE = Server("attic", 2, is_node=True)
CONNECTED = NodeState.CONNECTED


class Gateways:
    """The connections of nodes, with a clock that the test sets."""

    def __init__(self, queue: FleetQueue) -> None:
        self.presence, self._room = Presence(queue.scripts), queue
        self.set_clock(START_MS)

    def set_clock(self, now_ms: int) -> None:
        self._room.client.set(f"clock:{{{self._room.keys.nodes()}}}", now_ms)


@pytest.fixture
def gateways(queue: FleetQueue) -> Gateways:
    return Gateways(queue)


@pytest.fixture
def presence(gateways: Gateways) -> Presence:
    gateways.presence.beat("g1", "http://g1:1")
    gateways.presence.beat("g2", "http://g2:2")
    return gateways.presence


def _set(presence: Presence, number: int, present: bool, server: str = "attic") -> int:
    return presence.set_present("zimg", [NodePresence(server, number, present)])


# -- which nodes take jobs -------------------------------------------------------------------------------------


def test_an_absent_node_is_offered_nothing(queue: FleetQueue, presence: Presence) -> None:
    queue.with_servers(NODE)
    queue.enqueue(a("j1", 1))
    assert queue.members("free") == queue.offer() == []

    assert _set(presence, 5, True) == 1
    assert [offer.job for offer in queue.offer()] == ["j1"]


def test_a_node_that_leaves_keeps_its_leases_and_gets_no_more(queue: FleetQueue, presence: Presence) -> None:
    queue.with_servers(NODE)
    _set(presence, 5, True)
    queue.enqueue(a("j1", 1), limit=0)
    (offer,) = queue.offer()
    assert queue.claim(offer) == "claimed"

    assert _set(presence, 5, False) == 1
    queue.enqueue(a("j2", 2))

    assert queue.offer() == queue.members("free") == []
    assert queue.renew("w1", offer) == ["renewed"]
    assert queue.release(offer) == ("released", [])
    assert _set(presence, 6, True) == 1
    assert [offer.job for offer in queue.offer()] == ["j2"]


def test_a_slot_in_cooldown_of_an_absent_node_does_not_become_free(queue: FleetQueue, presence: Presence) -> None:
    queue.with_servers(NODE)
    _set(presence, 5, True)
    queue.cool_down("attic", 1000)
    assert len(queue.members("cooling")) == 2
    _set(presence, 5, False)
    queue.later(2000)
    queue.enqueue(a("j1", 1))
    assert queue.members("free") == queue.members("cooling") == queue.offer() == []


def test_an_old_connection_cannot_end_the_presence_of_a_newer_one(queue: FleetQueue, presence: Presence) -> None:
    queue.with_servers(NODE)
    _set(presence, 5, True)
    _set(presence, 6, True)

    assert _set(presence, 5, False) == _set(presence, 5, True) == 0
    assert presence.list_present(["zimg"]) == {"zimg": {"attic": 6}}
    assert len(queue.members("free")) == 2
    assert _set(presence, 6, False) == 1
    assert queue.members("free") == []


def test_a_slot_with_a_lease_does_not_become_free_when_its_node_connects_again(
    queue: FleetQueue, presence: Presence
) -> None:
    queue.with_servers(Server("attic", 1, is_node=True))
    _set(presence, 5, True)
    queue.enqueue(a("j1", 1), limit=0)
    (offer,) = queue.offer()
    queue.claim(offer)
    _set(presence, 6, True)
    queue.enqueue(a("j2", 2))
    assert queue.members("free") == queue.offer() == []


def test_an_operator_stops_a_node_as_any_server(queue: FleetQueue, presence: Presence) -> None:
    queue.with_servers(NODE)
    _set(presence, 5, True)
    queue.sync(Server("attic", 2, "paused", is_node=True))
    assert queue.members("free") == []
    queue.sync(NODE)
    assert len(queue.members("free")) == 2


def test_a_sync_frees_no_slot_of_an_absent_node(queue: FleetQueue, presence: Presence) -> None:
    queue.with_servers(NODE)
    queue.sync(NODE, Server("gpu", 1), repairs=True)
    assert queue.members("free") == ["gpu-slot0"]


def test_a_node_may_connect_before_the_catalog_of_redis_has_it(queue: FleetQueue, presence: Presence) -> None:
    queue.with_servers(Server("gpu", 1))
    _set(presence, 5, True)
    assert queue.members("free") == ["gpu-slot0"]
    queue.sync(Server("gpu", 1), NODE)
    assert sorted(queue.members("free")) == ["attic-slot0", "attic-slot1", "gpu-slot0"]


def test_the_presence_of_a_removed_node_does_not_apply_to_a_later_one(queue: FleetQueue, presence: Presence) -> None:
    queue.with_servers(NODE)
    _set(presence, 5, True)
    queue.sync()
    assert presence.list_present(["zimg"]) == {"zimg": {}}


def test_a_gateway_detects_that_a_fleet_has_lost_its_nodes(queue: FleetQueue, presence: Presence) -> None:
    queue.with_servers(NODE)
    assert presence.knows_gateway("g1", ["zimg"]) == {"zimg": False}
    presence.set_present("zimg", [NodePresence("attic", 5, True)], "g1")
    assert presence.knows_gateway("g1", ["zimg"]) == {"zimg": True}
    queue.client.delete(queue.keys.present_nodes("zimg"))
    assert presence.knows_gateway("g1", ["zimg"]) == {"zimg": False}
    assert presence.set_present("zimg", [], "g1") == 0
    assert presence.knows_gateway("g1", ["zimg"]) == {"zimg": True}


# -- whose connection counts -------------------------------------------------------------------------------------


def test_a_connection_number_grows_after_redis_is_emptied(queue: FleetQueue, gateways: Gateways) -> None:
    presence = gateways.presence
    first = presence.connect("n1", "i1", "g1", CONNECTED)
    second = presence.connect("n1", "i1", "g1", CONNECTED)
    queue.client.flushall()
    gateways.set_clock(START_MS + 10)
    third = presence.connect("n1", "i1", "g1", CONNECTED)
    assert START_MS <= first.number < second.number < third.number


def test_a_second_instance_of_a_node_is_refused_while_the_first_is_connected_to_a_live_gateway(
    gateways: Gateways, presence: Presence
) -> None:
    first = presence.connect("n1", "i1", "g1", CONNECTED)
    assert presence.connect("n1", "i2", "g2", CONNECTED) == Claim(0, "g1")
    assert presence.connect("n1", "i2", "g2", CONNECTED, replaces=True).number > first.number
    assert presence.connect("n1", "i1", "g1", CONNECTED) == Claim(0, "g2")
    gateways.set_clock(START_MS + GATEWAY_TTL_MS + 1)
    assert presence.connect("n1", "i1", "g1", CONNECTED).number > first.number


def test_a_new_connection_of_the_same_instance_replaces_the_old_connection(presence: Presence) -> None:
    first = presence.connect("n1", "i1", "g1", CONNECTED)
    assert presence.connect("n1", "i1", "g2", CONNECTED) == Claim(first.number + 1, "g1")


def test_an_absent_node_may_connect_anywhere(presence: Presence) -> None:
    first = presence.connect("n1", "i1", "g1", CONNECTED)
    assert presence.note("n1", first.number, "i1", "g1", NodeState.ABSENT)
    assert presence.connect("n1", "i2", "g2", CONNECTED) == Claim(first.number + 1, "")
    assert not presence.note("n1", first.number, "i1", "g1", NodeState.ABSENT)


def test_workers_find_the_gateway_of_a_node_that_is_connected(gateways: Gateways, presence: Presence) -> None:
    assert presence.find_gateway("n1") is None
    claim = presence.connect("n1", "i1", "g1", CONNECTED)
    assert presence.find_gateway("n1") == (claim.number, "http://g1:1")
    presence.note("n1", claim.number, "i1", "g1", NodeState.PAUSED, "its owner plays a game")
    assert presence.find_gateway("n1") == (claim.number, "http://g1:1")
    found = presence.read().state_of("n1")
    assert found is not None and found.reason == "its owner plays a game"
    presence.note("n1", claim.number, "i1", "g1", NodeState.ABSENT)
    assert presence.find_gateway("n1") is None


def test_a_lost_gateway_takes_its_nodes_away(queue: FleetQueue, gateways: Gateways, presence: Presence) -> None:
    queue.with_servers(NODE, Server("cellar", 1, is_node=True))
    lost, kept = presence.connect("n1", "i1", "gone", CONNECTED), presence.connect("n2", "i2", "g1", CONNECTED)
    presence.set_present("zimg", [NodePresence("attic", lost.number, True), NodePresence("cellar", kept.number, True)])
    gateways.set_clock(1)
    presence.beat("gone", "http://gone:3")

    changed = presence.drop_lost_gateways({"n1": ("zimg", "attic"), "n2": ("zimg", "cellar")})

    assert changed == {"zimg": 1}
    assert queue.members("free") == ["cellar-slot0"]
    assert set(presence.read().gateways) == {"g1", "g2"}
