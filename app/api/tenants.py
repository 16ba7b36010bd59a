"""Tenants: who has a key, and who is paused, draining or frozen.  Keys are made on the command line."""

from typing import Any

from app import views
from app.api.admin import admin_blueprint, bring_to_redis
from app.api.context import dispatcher
from app.api.openapi import problems
from app.auth import tenant
from app.schemas import StateBody, TenantList, TenantPath, TenantView
from jobs.record import now_ms
from jobs.tenants import Tenant, Tenants, check_tenant_name
from tasks.wiring import catalog, database

api = admin_blueprint("tenants", "Tenants", "/admin")


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
    name = check_tenant_name(path.tenant)
    catalog().set_tenant_state(name, body.state, reason=body.reason or "", by=tenant().name, now=now_ms())
    now = dispatcher().fleet.refresh()
    bring_to_redis(*now.fleets())
    return views.tenant(name, _keyed().get(name), now.tenants.get(name))


def _keyed() -> dict[str, Tenant]:
    return {it.name: it for it in Tenants(database()).all()}
