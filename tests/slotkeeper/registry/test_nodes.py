"""Nodes: enrolment, their declarations, and the part that the catalog accepts."""

import hashlib
from typing import Any

import orjson
import pytest

from slotkeeper import signatures
from slotkeeper.errors import Conflict, InvalidRequest, NotFound
from slotkeeper.registry.catalog import Catalog
from slotkeeper.registry.nodes import (
    Grant,
    InvalidDeclaration,
    Node,
    Nodes,
    digest_of,
    parse_declaration,
)
from tests.support.builders import T0, at_once

_DESCRIPTION = '{"mode": "async"}'
_GRANT = Grant(owner="acme", pool="homes", environments=["production", "testnet"], models=["flux-*", "zimg"])


@pytest.fixture
def catalog(database) -> Catalog:
    catalog = Catalog(database)
    catalog.configure("zimg", {"node_pools": ["homes"]}, T0)
    return catalog


@pytest.fixture
def nodes(catalog) -> Nodes:
    return Nodes(catalog, _DESCRIPTION)


def _token(nodes: Nodes, grant: Grant = _GRANT, **more: Any) -> str:
    return nodes.make_token(grant, "admin", T0, T0 + 3_600_000, **more)[1]


def _enroll(nodes: Nodes, token: str, name: str = "attic", key: Any = None, now_ms: int = T0) -> Node:
    key = key or signatures.make_key()
    public = signatures.public_key_of(key)
    proof = signatures.sign(key, signatures.ENROLMENT_TYPE, signatures.enrolment_statement(token, public))
    return nodes.enroll(token, name, public, proof, now_ms)


def _declaration(**changes: Any) -> bytes:
    return orjson.dumps({"models": {"zimg": {"model_version": "v1"}}, "slots": 2, "labels": {"gpu": "4090"}} | changes)


# -- enrolment -------------------------------------------------------------------------------------------------


def test_a_token_enrolls_one_node_and_a_repeated_request_with_the_same_key_returns_that_node(nodes: Nodes) -> None:
    token, key = _token(nodes), signatures.make_key()
    node = _enroll(nodes, token, key=key)

    assert _enroll(nodes, token, key=key, now_ms=T0 + 7_200_000) == node  # The first response was lost.
    with pytest.raises(InvalidRequest, match="token"):
        _enroll(nodes, token, name="other")
    assert nodes.list_tokens(T0) == []


def test_only_one_of_several_nodes_with_the_same_token_enrolls(nodes: Nodes) -> None:
    token = _token(nodes)

    def enroll(number: int) -> str:
        try:
            return _enroll(nodes, token, f"attic{number}").name
        except InvalidRequest:
            return ""

    assert sum(map(bool, at_once(*[lambda n=n: enroll(n) for n in range(4)]))) == 1


def test_a_wrong_a_used_and_an_expired_token_are_refused_alike(nodes: Nodes) -> None:
    used, expired = _token(nodes), _token(nodes)
    _enroll(nodes, used)
    messages = set()
    for token, now_ms in ((used, T0), (expired, T0 + 3_600_000), ("nt_wrong", T0)):
        with pytest.raises(InvalidRequest, match="token") as refused:
            _enroll(nodes, token, name="b", now_ms=now_ms)
        messages.add(str(refused.value))
    assert len(messages) == 1


def test_a_removed_token_enrols_no_node(nodes: Nodes) -> None:
    token_id, token = nodes.make_token(_GRANT, "admin", T0, T0 + 1000)
    nodes.remove_token(token_id)
    with pytest.raises(InvalidRequest, match="token"):
        _enroll(nodes, token)
    with pytest.raises(NotFound):
        nodes.remove_token(token_id)


def test_a_node_proves_that_it_has_its_key(nodes: Nodes) -> None:
    token, key = _token(nodes), signatures.make_key()
    public = signatures.public_key_of(key)
    other = signatures.sign(
        signatures.make_key(), signatures.ENROLMENT_TYPE, signatures.enrolment_statement(token, public)
    )
    with pytest.raises(InvalidRequest, match="proof"):
        nodes.enroll(token, "attic", public, other, T0)
    with pytest.raises(InvalidRequest, match="name"):
        _enroll(nodes, token, name="a/b")
    assert _enroll(nodes, token, key=key).name == "attic"


def test_a_name_and_a_key_belong_to_one_node(nodes: Nodes, catalog: Catalog) -> None:
    catalog.register("zimg", "gpu1", "http://gpu1:9001/", 1, T0)
    token, key = _token(nodes, uses=3), signatures.make_key()
    with pytest.raises(Conflict, match="another name"):
        _enroll(nodes, token, name="gpu1")
    _enroll(nodes, token, name="attic", key=key)
    with pytest.raises(Conflict, match="another name"):
        _enroll(nodes, token, name="attic")
    with pytest.raises(Conflict, match="key"):
        _enroll(nodes, token, name="cellar", key=key)
    with pytest.raises(Conflict, match="is a node"):
        catalog.register("zimg", "attic", "http://elsewhere:9001/", 1, T0)


# -- declarations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"models": {}},
        {"slots": 0},
        {"labels": {"pool": "mine"}},
        {"labels": {"environment": "testnet"}},
        {"labels": {"trust": 1}},
        {"labels": {"owner": "me"}},
        {"labels": {"gpu": "a\nb"}},
        {"environment": "staging"},
        {"more": 1},
        {"models": {"zimg": {"pool": "mine"}}},
    ],
)
def test_a_declaration_with_a_reserved_attribute_or_beyond_its_grant_is_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidDeclaration):
        parse_declaration(_declaration(**change), _GRANT)


def test_a_declaration_of_any_size_or_form_is_refused_with_a_reason() -> None:
    for text in (b"", b"[]", b"{", b" " * (33 << 10)):
        with pytest.raises(InvalidDeclaration):
            parse_declaration(text, _GRANT)


def test_a_node_becomes_a_server_by_its_declaration(nodes: Nodes, catalog: Catalog) -> None:
    node = _enroll(nodes, _token(nodes))
    assert catalog.read().servers == {}

    assert nodes.declare({node.id: _declaration(environment="testnet", slots=50)}, T0) == ["zimg"]

    server = catalog.read().servers["attic"]
    assert server.endpoints == {"zimg": f"node://{node.id}/run"}
    assert server.attributes == {
        "gpu": "4090",
        "pool": "homes",
        "environment": "testnet",
        "zimg:model_version": "v1",
    }
    assert server.slots == _GRANT.max_slots
    assert server.node is not None and (server.node.id, server.node.is_trusted) == (node.id, False)
    found, _ = nodes.find(node.id) or (None, {})
    assert found is not None and found.digest == digest_of(_declaration(environment="testnet", slots=50))


def test_the_catalog_changes_only_if_a_declaration_differs(nodes: Nodes, catalog: Catalog) -> None:
    node = _enroll(nodes, _token(nodes))
    nodes.declare({node.id: _declaration()}, T0)
    version = catalog.get_version()

    assert nodes.declare({node.id: _declaration()}, T0 + 1) == nodes.apply(T0 + 2) == []
    assert catalog.get_version() == version
    assert nodes.declare({node.id: _declaration(models={"zimg": {}}, labels={})}, T0 + 3) == ["zimg"]
    assert catalog.read().servers["attic"].attributes == {"pool": "homes"}
    assert nodes.apply(T0 + 4) == []


def test_a_model_is_served_only_by_nodes_of_its_pools(nodes: Nodes, catalog: Catalog) -> None:
    for model in ("flux-1", "llama"):
        catalog.configure(model, {"node_pools": ["homes"]}, T0)
    catalog.configure("flux-2", {"node_pools": ["offices"]}, T0)
    catalog.configure("flux-3", {}, T0)
    node = _enroll(nodes, _token(nodes))
    declared = {name: {} for name in ("zimg", "flux-1", "flux-2", "flux-3", "llama", "unknown")}

    nodes.declare({node.id: _declaration(models=declared)}, T0)

    assert set(catalog.read().servers["attic"].endpoints) == {"zimg", "flux-1"}


def test_a_node_leaves_a_model_that_no_longer_names_its_pool(nodes: Nodes, catalog: Catalog) -> None:
    catalog.configure("flux-1", {"node_pools": ["homes"]}, T0)
    node = _enroll(nodes, _token(nodes))
    nodes.declare({node.id: _declaration(models={"zimg": {}, "flux-1": {}})}, T0)
    catalog.configure("flux-1", {}, T0)

    assert nodes.apply(T0) == [catalog.read().servers["attic"].fleet]
    assert set(catalog.read().servers["attic"].endpoints) == {"zimg"}
    catalog.configure("zimg", {}, T0)
    nodes.apply(T0)
    assert catalog.read().servers == {}


def test_a_declared_model_of_another_fleet_is_omitted_and_the_reason_is_stored(nodes: Nodes, catalog: Catalog) -> None:
    catalog.register("flux-1", "gpu1", "http://gpu1:9001/", 1, T0)
    catalog.register("zimg", "gpu2", "http://gpu2:9001/", 1, T0)
    catalog.configure("flux-1", {"node_pools": ["homes"]}, T0)
    node = _enroll(nodes, _token(nodes))
    nodes.declare({node.id: _declaration(models={"zimg": {}, "flux-1": {}})}, T0)
    nodes.apply(T0)
    version = catalog.get_version()

    assert nodes.apply(T0) == []
    assert len(catalog.read().servers["attic"].endpoints) == 1
    assert "belongs to fleet" in str(nodes.get("attic").fault)
    assert catalog.get_version() == version


# -- keys --------------------------------------------------------------------------------------------------------


def test_both_keys_are_valid_until_the_new_one_has_connected(nodes: Nodes, catalog: Catalog) -> None:
    first = signatures.make_key()
    node = _enroll(nodes, _token(nodes), key=first)
    nodes.declare({node.id: _declaration()}, T0)
    former = catalog.read()
    new = nodes.rotate(node.id, signatures.public_key_of(signatures.make_key()), T0 + 1)
    old = signatures.key_id(signatures.public_key_of(first))
    assert set(nodes.find_keys(node.id)) == {old, new}

    nodes.retire_older_keys(node.id, old, T0 + 2)
    assert set(nodes.find_keys(node.id)) == {old, new}
    nodes.retire_older_keys(node.id, new, T0 + 2)

    assert set(nodes.find_keys(node.id)) == {new}
    # What the old key signed just before still counts.
    assert set(catalog.read_after(former).servers["attic"].node.keys) == {old, new}  # type: ignore[union-attr]
    with pytest.raises(Conflict):
        nodes.rotate(node.id, signatures.public_key_of(first), T0 + 3)


def test_a_revoked_node_has_no_keys_and_serves_nothing(nodes: Nodes, catalog: Catalog) -> None:
    node = _enroll(nodes, _token(nodes))
    nodes.declare({node.id: _declaration()}, T0)
    former = catalog.read()

    assert nodes.revoke("attic", T0 + 1) == ["zimg"]

    assert nodes.find_keys(node.id) == {}
    assert catalog.read_after(former).servers == {}
    with pytest.raises(NotFound):
        nodes.revoke("cellar", T0)


def test_a_node_is_removed_once_it_is_revoked(nodes: Nodes, catalog: Catalog) -> None:
    node = _enroll(nodes, _token(nodes))
    nodes.declare({node.id: _declaration()}, T0)
    with pytest.raises(Conflict, match="Revoke"):
        nodes.remove("attic", T0)
    nodes.revoke("attic", T0)
    nodes.remove("attic", T0)

    assert nodes.list_all() == []
    assert _enroll(nodes, _token(nodes)).name == "attic"


def test_the_database_holds_no_token(nodes: Nodes, database) -> None:
    token = _token(nodes)
    with database.read() as connection:
        rows = connection.exec_driver_sql("SELECT hash FROM enrolment_tokens").scalars().all()
    assert rows == [hashlib.sha256(token.encode()).hexdigest()]
