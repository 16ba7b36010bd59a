"""Tenants: who has a key, and who is paused, draining or frozen.  Keys are made on the command line."""

from typing import Any

from app import views
from app.api.admin import admin_blueprint, bring_to_redis
from app.api.context import dispatcher
from app.api.openapi import problems
from app.auth import tenant
from app.schemas import StateBody, TenantList, TenantPath, TenantView
from jobs.errors import InvalidJob
from jobs.record import now_ms
from jobs.tenants import Tenant, Tenants
from tasks.wiring import catalog, database

api = admin_blueprint("tenants", "Tenants", "/admin")

_LONGEST_NAME = 200


@api.get("/tenants", responses={200: TenantList})
def list_tenants() -> dict[str, Any]:
    """List the tenants that have a key, and those that do not stand online."""
    keyed, states = _keyed(), dispatcher().fleet.refresh().tenants
    names = sorted(keyed.keys() | states.keys())
    return {"tenants": [views.tenant(name, keyed.get(name), states.get(name)) for name in names]}


@api.patch("/tenants/<path:tenant>", responses={200: TenantView, **problems(400, 413, 415, 422)})
def change_tenant(path: TenantPath, body: StateBody) -> dict[str, Any]:
    """Drain, pause, freeze or resume a tenant, for all models.  It need not have a key.

    paused: nothing of it is started, its submits are accepted; draining: what waits goes on, its submits are 409;
    frozen: both.  What runs is left to end.
    """
    name = _check_name(path.tenant)
    catalog().set_tenant_state(name, body.state, reason=body.reason or "", by=tenant().name, now=now_ms())
    now = dispatcher().fleet.refresh()
    bring_to_redis(*now.fleets())
    return views.tenant(name, _keyed().get(name), now.tenants.get(name))


def _keyed() -> dict[str, Tenant]:
    return {it.name: it for it in Tenants(database()).all()}


def _check_name(name: str) -> str:
    """Raises InvalidJob."""
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise InvalidJob("tenant", f"tenant must be 1 to {_LONGEST_NAME} printable characters")
    return name
