"""The pages of a tenant: its keys, with what they may be used for and new ones, and what it has used."""

from typing import Any

from flask import redirect, request

from app.api import key_views as keys_api
from app.api.usage_views import usage_rows
from app.auth.access import current_identity, visible_name
from app.page.layout import form
from app.page.login import page_view, run_or_ask_again
from app.page.rendering import render_page, segment
from app.schemas.tenant_schemas import KeyBody, KeyPath, KeyRotateBody, TenantPath, UsageQuery
from slotkeeper.registry.identity import FIRST_SCOPES, Scope
from slotkeeper.registry.tenants import OWN_TENANT

_DAY_S = 86_400


@page_view("/page/keys", Scope.KEYS)
def keys() -> Any:
    return _render(request.args.get("tenant", OWN_TENANT))


@page_view("/page/keys/add", Scope.KEYS, method="POST")
def add_key() -> Any:
    """Make a key and show it: it is in no other response."""
    fields = form()
    tenant, days = fields.get("tenant", OWN_TENANT), fields.get("days", "").strip()

    def add() -> Any:
        body: dict[str, Any] = {"name": fields.get("name", "").strip(), "scopes": fields.getlist("scope")}
        if days:
            body["expires_in_s"] = int(days) * _DAY_S if days.isdecimal() else days
        new, _ = keys_api.add_key(TenantPath(tenant=tenant), KeyBody.model_validate(body))
        return _render(tenant, new=new)

    return run_or_ask_again(add, lambda error: _render(tenant, error=error))


@page_view("/page/keys/rotate", Scope.KEYS, method="POST")
def rotate_key() -> Any:
    """Replace a key, whose former one stays valid for a day, and show the new one."""
    path = KeyPath(tenant=form().get("tenant", OWN_TENANT), key=form().get("key", ""))
    new, _ = keys_api.rotate_key(path, KeyRotateBody(overlap_s=_DAY_S))
    return _render(path.tenant, new=new)


@page_view("/page/keys/revoke", Scope.KEYS, method="POST")
def revoke_key() -> Any:
    path = KeyPath(tenant=form().get("tenant", OWN_TENANT), key=form().get("key", ""))

    def revoke() -> Any:
        keys_api.revoke_key(path)
        return redirect(f"/page/keys?tenant={segment(path.tenant)}&done=revoked", 303)

    return run_or_ask_again(revoke, lambda error: _render(path.tenant, error=error))


@page_view("/page/usage", Scope.READ)
def usage() -> Any:
    """Show what a tenant has used this month, by day and model."""
    name = visible_name(request.args.get("tenant", OWN_TENANT))
    by_day, by_model = (usage_rows(name, UsageQuery.model_validate({"by": by})) for by in ("day", "model"))
    most_s = max((row["slot_s"] for row in by_day), default=0)
    return render_page("usage.html", tenant=name, by_day=by_day, by_model=by_model, most_s=most_s)


def _render(tenant: str, *, new: dict[str, Any] | None = None, error: str = "") -> Any:
    name = visible_name(tenant)
    return render_page(
        "keys.html",
        tenant=name,
        listed=keys_api.list_keys(TenantPath(tenant=name))["keys"],
        scopes=[scope.value for scope in Scope if current_identity().may(scope)],
        given_first=[scope.value for scope in FIRST_SCOPES],
        new=new,
        error=error,
    )
