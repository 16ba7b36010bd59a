"""Nodes whose gateway has died, models whose pools change, and how both are explained."""

import orjson
import pytest

from routing.maintenance import sweep
from routing.maintenance.node_connections import NodeKeeper
from routing.maintenance.rebuild import refresh_fleet
from routing.queries.explain import explain_idle_server
from routing.queue.presence import NodePresence, NodeState, Presence
from slotkeeper import signatures
from slotkeeper.registry.nodes import Grant, Node, Nodes
from tests.support.harness import Harness


class Home:
    """A harness with one node, `attic`, of the pool `homes`."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.nodes = harness, Nodes(harness.catalog, '{"mode": "async"}')
        self.keeper = NodeKeeper(harness.dispatcher, self.nodes)
        self.presence = Presence(harness.dispatcher.slots.scripts)
        token = self.nodes.make_token(Grant(owner="acme", pool="homes"), "ops", harness.now, harness.now + 1000)[1]
        key = signatures.make_key()
        public = signatures.public_key_of(key)
        proof = signatures.sign(key, signatures.ENROLMENT_TYPE, signatures.enrolment_statement(token, public))
        self.node: Node = self.nodes.enroll(token, "attic", public, proof, harness.now)
        declaration = orjson.dumps({"models": {"zimg": {}}, "slots": 1})
        self.nodes.declare({self.node.id: declaration}, harness.now)
        self.number = 0

    def set_clock(self, now_ms: int) -> None:
        self.harness.set_clock(now_ms)
        self.harness.redis.set("clock:{test:nodes}", now_ms)

    def serve(self) -> None:
        self.harness.catalog.configure("zimg", {"node_pools": ["homes"]}, self.harness.now)
        self.keeper.apply_models()

    def connect(self, state: NodeState = NodeState.CONNECTED, reason: str = "") -> None:
        self.presence.beat("g1", "http://127.0.0.1:1")
        self.number = self.presence.connect(self.node.id, "i1", "g1", state, reason).number
        present = state is NodeState.CONNECTED
        self.presence.set_present("zimg", [NodePresence("attic", self.number, present)])
        refresh_fleet(self.harness.dispatcher, "zimg")

    def why_idle(self) -> str:
        server = self.harness.dispatcher.catalog.refresh().servers["attic"]
        found = explain_idle_server(self.harness.dispatcher, self.harness.living_worker(), server)
        return "; ".join(blocker.sentence for blocker in found)


@pytest.fixture
def home(harness: Harness) -> Home:
    home = Home(harness)
    home.set_clock(harness.now)
    return home


def test_a_model_is_served_by_nodes_as_soon_as_it_names_their_pool(home: Home) -> None:
    assert home.harness.catalog.read().servers == {}
    home.serve()
    home.connect()
    job = home.harness.submit()

    assert home.harness.dispatcher.catalog.refresh().servers["attic"].endpoints == {"zimg": home.node.endpoint}
    assert home.harness.start().run.job.id == job
    home.harness.catalog.configure("zimg", {}, home.harness.now)
    assert home.keeper.apply_models() == ["zimg"]
    assert home.keeper.apply_models() == home.keeper.apply_models() == []


def test_a_job_waits_for_a_node_and_the_explanation_names_its_state(home: Home) -> None:
    home.serve()
    refresh_fleet(home.harness.dispatcher, "zimg")
    job = home.harness.submit()
    assert "a node that has not connected yet" in home.harness.explained(job)
    home.connect(NodeState.PAUSED, "a game until 18:00")
    assert "paused by its owner" in home.harness.explained(job)
    assert "a game until 18:00" in home.why_idle()
    home.presence.note(home.node.id, home.number, "i1", "g1", NodeState.ABSENT)
    assert "'attic' is a node that is not connected since 20" in home.harness.explained(job)


def test_a_node_of_a_dead_gateway_gets_no_more_jobs(home: Home) -> None:
    home.serve()
    home.set_clock(1)
    home.connect()
    assert home.harness.queue.members("free") == ["attic-slot0"]

    assert home.keeper.drop_lost_gateways() == 1
    assert home.keeper.drop_lost_gateways() == 0

    assert home.harness.queue.members("free") == []
    found = home.presence.read().state_of(home.node.id)
    assert found is not None and found.state is NodeState.ABSENT


def test_a_fleet_with_an_absent_node_is_repaired_only_once(home: Home) -> None:
    home.serve()
    sweeper = sweep.Sweeper(home.harness.dispatcher)
    sweeper.sweep()
    repaired = sweeper.state.synced["zimg"]
    sweeper.sweep()
    assert sweeper.state.synced["zimg"] == repaired
    home.connect()
    sweeper.sweep()
    assert sweeper.state.synced["zimg"][2] == repaired[2]
