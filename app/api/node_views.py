"""Nodes: machines of other owners whose agents connect to a gateway."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson
from pydantic import ValidationError
from redis.exceptions import RedisError

from app.api.catalog_changes import refresh_redis
from app.api.openapi import blueprint, no_store, problem_responses
from app.auth.access import current_tenant, own_auth, scope, visible_tenant
from app.context import dispatcher
from app.schemas.base import iso_time
from app.schemas.node_schemas import (
    EnrolledNode,
    EnrolmentBody,
    NewToken,
    NodeList,
    NodePath,
    NodeView,
    RevokeBody,
    TokenBody,
    TokenList,
    TokenPath,
    TokenView,
)
from routing.queue.presence import Presence, PresenceSnapshot
from slotkeeper import signatures
from slotkeeper.clock import now_ms
from slotkeeper.errors import InvalidRequest, NotFound
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.nodes import Grant, Node
from slotkeeper.registry.tenants import check_tenant_name
from tasks.services import nodes, scripts

api = no_store(blueprint("nodes", "Nodes", "/nodes", scope=Scope.OPERATE))


@api.post(
    "/enroll",
    responses={
        201: EnrolledNode,
        **problem_responses(400, 409, 413, 415, 422),
    },
)
@own_auth
def enroll_node(body: EnrolmentBody) -> tuple[dict[str, Any], int]:
    """Enrol a node with a token that an operator has made.

    If the response is lost, send the same request again: it returns the same node.
    """
    try:
        public_key, proof = signatures.decode_bytes(body.public_key), signatures.decode_bytes(body.proof)
    except ValueError:
        raise InvalidRequest("public_key", "public_key and proof must be base64") from None
    if len(public_key) != signatures.PUBLIC_KEY_BYTES:
        raise InvalidRequest("public_key", f"public_key must have {signatures.PUBLIC_KEY_BYTES} bytes")
    return EnrolledNode.build(nodes().enroll(body.token, body.name, public_key, proof, now_ms())), 201


@api.get("", responses={200: NodeList})
@scope(Scope.READ)
def list_nodes() -> dict[str, Any]:
    """List nodes: all for operators, otherwise those of the tenant."""
    owner = visible_tenant()
    return NodeList.build(nodes=_views([node for node in nodes().list_all() if owner in (None, node.grant.owner)]))


@api.get("/<name>", responses={200: NodeView, **problem_responses(404)})
@scope(Scope.READ)
def show_node(path: NodePath) -> dict[str, Any]:
    """Show a node."""
    node, owner = nodes().get(path.name), visible_tenant()
    if owner not in (None, node.grant.owner):
        raise NotFound("There is no such node; GET /nodes lists them.", server=path.name)
    return _views([node])[0]


@api.post("/<name>/revoke", responses={200: NodeView, **problem_responses(400, 404, 413, 415, 422)})
def revoke_node(path: NodePath, body: RevokeBody) -> dict[str, Any]:
    """Revoke a node and its keys.

    Gateways close its connection, and its results are refused, also those of runs that have begun.
    """
    refresh_redis(*nodes().revoke(path.name, now_ms(), body.reason))
    return _views([nodes().get(path.name)])[0]


@api.delete("/<name>", responses={204: None, **problem_responses(404, 409, 415)})
def remove_node(path: NodePath) -> tuple[str, int]:
    """Remove a node that was revoked, and on which nothing runs."""
    refresh_redis(*nodes().remove(path.name, now_ms()))
    return "", 204


@api.get("/tokens", responses={200: TokenList})
def list_tokens() -> dict[str, Any]:
    """List the enrolment tokens that can be used."""
    return TokenList.build(tokens=[TokenView.build(token) for token in nodes().list_tokens(now_ms())])


@api.post("/tokens", responses={201: NewToken, **problem_responses(400, 413, 415, 422)})
def make_token(body: TokenBody) -> tuple[dict[str, Any], int]:
    """Make an enrolment token.  It is shown once."""
    owner = current_tenant().name if body.owner is None else check_tenant_name(body.owner)
    fields = body.model_dump(exclude={"owner", "uses", "valid_s"})
    try:
        grant = Grant(owner=owner, **fields)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise InvalidRequest(str(fault["loc"][0]), f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
    expires_ms = now_ms() + body.valid_s * 1000
    token_id, text = nodes().make_token(grant, current_tenant().name, now_ms(), expires_ms, body.uses)
    return NewToken.build(id=token_id, token=text, expires_at=iso_time(expires_ms)), 201


@api.delete("/tokens/<token_id>", responses={204: None, **problem_responses(404, 415)})
def remove_token(path: TokenPath) -> tuple[str, int]:
    """Remove an enrolment token.  Nodes that have enrolled with it stay."""
    nodes().remove_token(path.token_id)
    return "", 204


def _views(found: Sequence[Node]) -> list[dict[str, Any]]:
    servers, connections = dispatcher().catalog.refresh().servers, None
    with suppress(RedisError):
        connections = Presence(scripts()).read()
    return [
        _view(node, connections, sorted(servers[node.name].endpoints) if node.name in servers else []) for node in found
    ]


def _view(node: Node, connections: PresenceSnapshot | None, models: list[str]) -> dict[str, Any]:
    connection = None if connections is None else connections.state_of(node.id)
    state = "unknown" if connections is None else "absent" if connection is None else connection.state.value
    if node.revoked_ms is not None:
        state = "revoked"
    return NodeView.build(
        node,
        state=state,
        since=connection and iso_time(connection.since_ms),
        reason=(connection and connection.reason) or None,
        gateway=connection.gateway if connection is not None and state in ("connected", "paused") else None,
        models=models,
        declaration=None if node.declaration is None else orjson.loads(node.declaration),
    )
