"""Nodes over the API: tokens, enrolment, and what their owners see."""

from typing import Any

import orjson
import pytest
from pytest_httpserver import HTTPServer

from app.cli import doctor_checks
from routing.maintenance.rebuild import refresh_fleet
from routing.queue.presence import NodeState, Presence
from slotkeeper import signatures
from slotkeeper.clock import now_ms
from slotkeeper.registry.identity import Scope
from tasks import services
from tasks.security.keyring import gateway_keys
from tests.support.api import Api


def _token(api: Api, **changes: Any) -> str:
    made = api.client.post("/nodes/tokens", json={"pool": "homes", "owner": "acme"} | changes)
    assert made.status_code == 201, made.json
    return str(made.json["token"])


def _body(token: str, name: str = "attic", key: Any = None) -> dict[str, str]:
    key = key or signatures.make_key()
    public = signatures.public_key_of(key)
    proof = signatures.sign(key, signatures.ENROLMENT_TYPE, signatures.enrolment_statement(token, public))
    return {
        "token": token,
        "name": name,
        "public_key": signatures.encode_bytes(public),
        "proof": signatures.encode_bytes(proof),
    }


def test_a_node_enrols_without_a_key_and_is_listed(api: Api) -> None:
    body = _body(_token(api, max_slots=2))

    enrolled = api.client.post("/nodes/enroll", json=body)

    assert enrolled.status_code == 201
    assert enrolled.json["grant"]["pool"] == "homes" and enrolled.json["grant"]["max_slots"] == 2
    assert api.client.post("/nodes/enroll", json=body).json == enrolled.json
    (listed,) = api.client.get("/nodes").json["nodes"]
    assert (listed["name"], listed["state"], listed["models"]) == ("attic", "absent", [])
    assert api.client.get("/nodes/attic").json == listed
    assert api.client.get("/nodes/tokens").json == {"tokens": []}


@pytest.mark.parametrize("change", [{"public_key": "!"}, {"proof": "!"}, {"public_key": "AAAA"}, {"name": "tokens"}])
def test_an_enrolment_that_cannot_be_read_is_refused(api: Api, change: dict[str, str]) -> None:
    assert api.client.post("/nodes/enroll", json=_body(_token(api)) | change).status_code == 422


def test_a_wrong_token_is_refused(api: Api) -> None:
    assert api.client.post("/nodes/enroll", json=_body("nt_wrong")).status_code == 422


def test_a_token_can_be_removed(api: Api) -> None:
    token = _token(api)
    (listed,) = api.client.get("/nodes/tokens").json["tokens"]
    assert "token" not in listed
    assert api.client.delete(f"/nodes/tokens/{listed['id']}").status_code == 204
    assert api.client.delete(f"/nodes/tokens/{listed['id']}").status_code == 404
    assert api.client.post("/nodes/enroll", json=_body(token)).status_code == 422


@pytest.mark.parametrize("change", [{"pool": "a\nb"}, {"environments": ["a b\n"]}, {"max_slots": 0}, {"owner": ""}])
def test_a_token_for_a_grant_that_cannot_be_is_refused(api: Api, change: dict[str, Any]) -> None:
    assert api.client.post("/nodes/tokens", json={"pool": "homes"} | change).status_code == 422


def test_the_state_of_a_connection_is_shown(api: Api) -> None:
    node = api.client.post("/nodes/enroll", json=_body(_token(api))).json
    presence = Presence(services.scripts())
    presence.beat("g1", "http://127.0.0.1:1")
    presence.connect(node["id"], "i1", "g1", NodeState.PAUSED, "a game")

    shown = api.client.get("/nodes/attic").json

    assert (shown["state"], shown["reason"], shown["gateway"]) == ("paused", "a game", "g1")
    assert shown["since"] is not None


def test_the_doctor_counts_a_node_that_is_not_connected_and_finds_nothing_wrong_with_it(api: Api) -> None:
    node = api.client.post("/nodes/enroll", json=_body(_token(api))).json["id"]
    api.model(node_pools=["homes"])
    api.register()
    services.nodes().declare({node: orjson.dumps({"models": {"zimg": {}}, "slots": 1})}, now_ms())
    refresh_fleet(api.dispatcher, "zimg")
    api.client.patch("/admin/servers/gpu1", json={"state": "paused"})

    (found,) = doctor_checks.servers()

    assert (found.level, "1 are nodes that are not connected" in found.message) == ("ok", True)


def test_the_doctor_finds_that_no_gateway_runs_or_that_one_cannot_be_reached(api: Api, httpserver: HTTPServer) -> None:
    assert list(doctor_checks.gateways()) == []
    node = api.client.post("/nodes/enroll", json=_body(_token(api))).json["id"]
    (found,) = doctor_checks.gateways()
    assert found.level == "fail" and "No gateway runs" in found.message

    presence = Presence(services.scripts())
    presence.beat("gw1", httpserver.url_for(""))
    httpserver.expect_request("/ping/n_0").respond_with_data("", status=401)
    (found,) = doctor_checks.gateways()
    assert found.level == "fail" and "gw1: It does not answer" in found.message

    httpserver.clear()
    key = f"Bearer {gateway_keys()[0]}"
    httpserver.expect_request("/ping/n_0", headers={"Authorization": key}).respond_with_data("", status=404)
    presence.connect(node, "i1", "gw1", NodeState.CONNECTED)
    (found,) = doctor_checks.gateways()
    assert (found.level, found.message) == ("ok", "Answering: 1; nodes connected: 1 of 1.")


@pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
def test_an_owner_sees_its_nodes_and_no_others(api: Api) -> None:
    operator, owner, other = (
        api.tenant("ops", admin=True),
        api.with_key("acme", Scope.READ),
        api.with_key("else", Scope.READ),
    )
    made = api.client.post("/nodes/tokens", json={"pool": "homes", "owner": "acme"}, headers=operator)
    assert api.client.post("/nodes/enroll", json=_body(made.json["token"])).status_code == 201

    assert [node["name"] for node in api.client.get("/nodes", headers=owner).json["nodes"]] == ["attic"]
    assert api.client.get("/nodes", headers=other).json["nodes"] == []
    assert api.client.get("/nodes/attic", headers=owner).status_code == 200
    assert api.client.get("/nodes/attic", headers=other).status_code == 404
    assert api.client.get("/nodes/tokens", headers=owner).status_code == 403


def test_a_revoked_node_is_removed(api: Api) -> None:
    api.client.post("/nodes/enroll", json=_body(_token(api)))
    assert api.client.delete("/nodes/attic").status_code == 409
    assert api.client.post("/nodes/attic/revoke", json={"reason": "sold"}).json["state"] == "revoked"
    assert api.client.delete("/nodes/attic").status_code == 204
    assert api.client.get("/nodes/attic").status_code == 404
    acts = [entry["act"] for entry in api.client.get("/admin/audit").json["acts"]]
    assert {"node.token", "node.enroll", "node.revoke", "node.remove"} <= set(acts)
