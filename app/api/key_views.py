"""Keys of tenants: with the scope `keys` a key manages those of its tenant, with `operate` those of all tenants."""

from collections.abc import Collection
from typing import Any

from app.api.openapi import blueprint, no_store, problem_responses
from app.auth.access import current_identity, current_tenant, scope, visible_name
from app.context import dispatcher
from app.schemas.tenant_schemas import (
    CeleryTokenBody,
    CeleryTokenView,
    KeyBody,
    KeyChangeBody,
    KeyList,
    KeyPath,
    KeyRotateBody,
    KeyView,
    NewKeyView,
    OwnTenantView,
    TenantPath,
)
from slotkeeper.clock import iso_time, now_ms
from slotkeeper.errors import Conflict, ScopeMissing
from slotkeeper.registry.api_keys import ApiKey, ApiKeys, NewKey
from slotkeeper.registry.identity import Scope, format_scopes, parse_scopes
from slotkeeper.registry.tenant_limits import parse_rate
from slotkeeper.registry.values import AdminState
from tasks.security.celery_tokens import TokenSubject, make_token
from tasks.services import database

api = no_store(blueprint("keys", "Own tenant", "/tenants", scope=Scope.KEYS))


@api.get("/<path:tenant>", responses={200: OwnTenantView, **problem_responses(404, 422)})
@scope(Scope.READ)
def get_tenant(path: TenantPath) -> dict[str, Any]:
    """Show a tenant: its state, its limits, and what the key of this request may be used for."""
    name, snapshot = visible_name(path.tenant), dispatcher().catalog.refresh()
    state = snapshot.tenants[name].state if name in snapshot.tenants else AdminState.ONLINE.value
    scopes = format_scopes(current_identity().scopes).split()
    return OwnTenantView.build(tenant=name, state=state, scopes=scopes, limits=snapshot.limits_of(name).model_dump())


@api.get("/<path:tenant>/keys", responses={200: KeyList, **problem_responses(404, 422)})
def list_keys(path: TenantPath) -> dict[str, Any]:
    """List the keys of a tenant, the newest first.  `me` is the tenant of the key that is used."""
    at_ms = now_ms()
    keys = ApiKeys(database()).list_of(visible_name(path.tenant))
    return KeyList.build(keys=[_view(key, at_ms) for key in keys])


@api.post("/<path:tenant>/keys", responses={201: NewKeyView, **problem_responses(400, 404, 409, 413, 415, 422)})
def add_key(path: TenantPath, body: KeyBody) -> tuple[dict[str, Any], int]:
    """Make a key, which only this response shows.

    403: the new key would have a scope that the key of this request has not.
    """
    tenant, at_ms = visible_name(path.tenant), now_ms()
    scopes = _givable_scopes(body.scopes)
    expires_ms = _end_of(body.expires_in_s, at_ms)
    keys, by = ApiKeys(database()), current_tenant().name
    rate = parse_rate(body.rate_per_s, body.burst)
    new = keys.add(tenant, scopes, now_ms=at_ms, name=body.name, by=by, expires_ms=expires_ms, rate=rate)
    return _new_view(keys, tenant, new), 201


@api.patch("/<path:tenant>/keys/<key>", responses={200: KeyView, **problem_responses(400, 404, 409, 413, 415, 422)})
def change_key(path: KeyPath, body: KeyChangeBody) -> dict[str, Any]:
    """Change a key's name, scopes or end, within a second everywhere.  403: as for a new key, or it may more itself."""
    tenant, at_ms, keys = visible_name(path.tenant), now_ms(), ApiKeys(database())
    _check_givable(keys.get(tenant, path.key).scopes)
    changes: dict[str, Any] = {}
    if body.name is not None:
        changes["name"] = body.name
    if body.scopes is not None:
        changes["scopes"] = _givable_scopes(body.scopes)
    if "expires_in_s" in body.model_fields_set:
        changes["expires_ms"] = _end_of(body.expires_in_s, at_ms)
    if changes:
        keys.change(tenant, path.key, changes, at_ms, keeps_an_operator=True)
    return _view(keys.get(tenant, path.key), at_ms)


@api.post(
    "/<path:tenant>/keys/<key>/rotate",
    responses={201: NewKeyView, **problem_responses(400, 404, 409, 413, 415, 422)},
)
def rotate_key(path: KeyPath, body: KeyRotateBody) -> tuple[dict[str, Any], int]:
    """Replace a key by a new one with the same name and scopes.  The former stays valid for `overlap_s`."""
    tenant, at_ms, keys = visible_name(path.tenant), now_ms(), ApiKeys(database())
    _check_givable(keys.get(tenant, path.key).scopes)
    new = keys.rotate(tenant, path.key, 1000 * body.overlap_s, now_ms=at_ms, by=current_tenant().name)
    return _new_view(keys, tenant, new), 201


@api.delete("/<path:tenant>/keys/<key>", responses={204: None, **problem_responses(404, 409, 415)})
def revoke_key(path: KeyPath) -> tuple[str, int]:
    """Revoke a key, within a second everywhere.  409: no other may operate."""
    tenant, keys = visible_name(path.tenant), ApiKeys(database())
    _check_givable(keys.get(tenant, path.key).scopes)
    keys.revoke(tenant, path.key, now_ms(), keeps_an_operator=True)
    return "", 204


@api.post("/me/celery-tokens", responses={201: CeleryTokenView, **problem_responses(400, 409, 413, 415, 422)})
@scope(Scope.SUBMIT)
def make_celery_token(body: CeleryTokenBody) -> tuple[dict[str, Any], int]:
    """Make a token for the messages of bare Celery clients, which is valid while the key of this request is.

    409: this installation requires no keys, so its messages need no token.
    """
    identity, expires_ms = current_identity(), now_ms() + 1000 * body.ttl_s
    if identity.key_id is None:
        raise Conflict("This installation requires no keys, so messages need no token.")
    token = make_token(TokenSubject(identity.tenant.name, identity.key_id), expires_ms)
    return CeleryTokenView.build(token=token, expires_at=iso_time(expires_ms)), 201


def _end_of(expires_in_s: int | None, at_ms: int) -> int | None:
    """Return when a key ends (ms); None: when it is revoked."""
    return None if expires_in_s is None else at_ms + 1000 * expires_in_s


def _givable_scopes(words: Collection[str]) -> frozenset[Scope]:
    """Return the scopes of a new key.  Raises InvalidRequest, ScopeMissing."""
    scopes = parse_scopes(words)
    _check_givable(scopes)
    return scopes


def _check_givable(scopes: frozenset[Scope]) -> None:
    """Refuse to make, change or revoke a key that may do more than that of this request.  Raises ScopeMissing."""
    identity = current_identity()
    if not identity.may_give(scopes):
        own = format_scopes(identity.scopes)
        raise ScopeMissing(f"That key may do more than this one, which has the scopes: {own}.")


def _view(key: ApiKey, at_ms: int) -> dict[str, Any]:
    return KeyView.build(key, valid=key.is_valid(at_ms))


def _new_view(keys: ApiKeys, tenant: str, new: NewKey) -> dict[str, Any]:
    return NewKeyView.build(keys.get(tenant, new.id), valid=True, key=new.key)
