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
from tests.support.stage import Stage


class Home:
    """A harness with one node, `attic`, of the pool `homes`."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.nodes = stage, Nodes(stage.catalog, '{"mode": "async"}')
        self.keeper = NodeKeeper(stage.dispatcher, self.nodes)
        self.presence = Presence(stage.dispatcher.slots.scripts)
        token = self.nodes.make_token(Grant(owner="acme", pool="homes"), "ops", stage.now, stage.now + 1000)[1]
        key = signatures.make_key()
        public = signatures.public_key_of(key)
        proof = signatures.sign(key, signatures.ENROLMENT_TYPE, signatures.enrolment_statement(token, public))
        self.node: Node = self.nodes.enroll(token, "attic", public, proof, stage.now)
        declaration = orjson.dumps({"models": {"zimg": {}}, "slots": 1})
        self.nodes.declare({self.node.id: declaration}, stage.now)
        self.number = 0

    def set_clock(self, now_ms: int) -> None:
        self.stage.set_clock(now_ms)
        self.stage.redis.set("clock:{test:nodes}", now_ms)

    def serve(self) -> None:
        self.stage.catalog.configure("zimg", {"node_pools": ["homes"]}, self.stage.now)
        self.keeper.apply_models()

    def connect(self, state: NodeState = NodeState.CONNECTED, reason: str = "") -> None:
        self.presence.beat("g1", "http://127.0.0.1:1")
        self.number = self.presence.connect(self.node.id, "i1", "g1", state, reason).number
        present = state is NodeState.CONNECTED
        self.presence.set_present("zimg", [NodePresence("attic", self.number, present)])
        refresh_fleet(self.stage.dispatcher, "zimg")

    def why_idle(self) -> str:
        server = self.stage.dispatcher.catalog.refresh().servers["attic"]
        found = explain_idle_server(self.stage.dispatcher, self.stage.living_worker(), server)
        return "; ".join(blocker.sentence for blocker in found)


@pytest.fixture
def home(stage: Stage) -> Home:
    home = Home(stage)
    home.set_clock(stage.now)
    return home


def test_a_model_is_served_by_nodes_as_soon_as_it_names_their_pool(home: Home) -> None:
    assert home.stage.catalog.read().servers == {}
    home.serve()
    home.connect()
    job = home.stage.submit()

    assert home.stage.dispatcher.catalog.refresh().servers["attic"].endpoints == {"zimg": home.node.endpoint}
    assert home.stage.start().run.job.id == job
    home.stage.catalog.configure("zimg", {}, home.stage.now)
    assert home.keeper.apply_models() == ["zimg"]
    assert home.keeper.apply_models() == home.keeper.apply_models() == []


def test_a_job_waits_for_a_node_and_the_explanation_names_its_state(home: Home) -> None:
    home.serve()
    refresh_fleet(home.stage.dispatcher, "zimg")
    job = home.stage.submit()
    assert "a node that has not connected yet" in home.stage.explained(job)
    home.connect(NodeState.PAUSED, "a game until 18:00")
    assert "paused by its owner" in home.stage.explained(job)
    assert "a game until 18:00" in home.why_idle()
    home.presence.note(home.node.id, home.number, "i1", "g1", NodeState.ABSENT)
    assert "'attic' is a node that is not connected since 20" in home.stage.explained(job)


def test_a_node_of_a_dead_gateway_gets_no_more_jobs(home: Home) -> None:
    home.serve()
    home.set_clock(1)
    home.connect()
    assert home.stage.room.members("free") == ["attic-slot0"]

    assert home.keeper.drop_lost_gateways() == 1
    assert home.keeper.drop_lost_gateways() == 0

    assert home.stage.room.members("free") == []
    found = home.presence.read().state_of(home.node.id)
    assert found is not None and found.state is NodeState.ABSENT


def test_a_fleet_with_an_absent_node_is_not_repaired_again_and_again(home: Home) -> None:
    home.serve()
    sweeper = sweep.Sweeper(home.stage.dispatcher)
    sweeper.sweep()
    repaired = sweeper.state.synced["zimg"]
    sweeper.sweep()
    assert sweeper.state.synced["zimg"] == repaired
    home.connect()
    sweeper.sweep()
    assert sweeper.state.synced["zimg"][2] == repaired[2]
