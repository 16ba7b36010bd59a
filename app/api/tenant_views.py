"""Tenants: their keys, limits and states.  Keys are created on the command line."""

from typing import Any

from app.api.catalog_changes import admin_blueprint, refresh_redis
from app.api.openapi import no_store, problem_responses
from app.auth.access import current_tenant
from app.context import dispatcher
from app.schemas import tenant_schemas
from app.schemas.tenant_schemas import TenantBody, TenantList, TenantPath, TenantView, WebhookSecretView
from slotkeeper.clock import now_ms
from slotkeeper.registry.tenants import SecretRotation, Tenant, Tenants, check_tenant_name
from tasks.security.keyring import webhook_secrets
from tasks.services import catalog, database, secret_rotations

api = no_store(admin_blueprint("tenants", "Tenants", "/admin"))


@api.get("/tenants", responses={200: TenantList})
def list_tenants() -> dict[str, Any]:
    """List the tenants that have a key, and those that are not online."""
    keyed, states = _tenants_with_key(), dispatcher().catalog.refresh().tenants
    names = sorted(keyed.keys() | states.keys())
    views = [tenant_schemas.tenant_view(name, keyed.get(name), states.get(name)) for name in names]
    return TenantList.build(tenants=views)


@api.patch("/tenants/<path:tenant>", responses={200: TenantView, **problem_responses(400, 404, 409, 413, 415, 422)})
def change_tenant(path: TenantPath, body: TenantBody) -> dict[str, Any]:
    """Change a tenant's limits, or drain, pause, freeze or resume it for all models.

    Only a tenant with a key can have limits; they apply within seconds.

    paused: none of its jobs starts, submits are accepted.  draining: its waiting jobs start, submits are 409.  frozen:
    none of its jobs starts, submits are 409.  Running jobs go on in each case.
    """
    name = check_tenant_name(path.tenant)
    if body.limits:
        Tenants(database()).change(name, body.limits)
    if body.state is not None:
        catalog().set_tenant_state(
            name, body.state, reason=body.reason or "", by=current_tenant().name, now_ms=now_ms()
        )
    snapshot = dispatcher().catalog.refresh()
    refresh_redis(*snapshot.fleets())
    return tenant_schemas.tenant_view(name, _tenants_with_key().get(name), snapshot.tenants.get(name))


@api.get("/webhook-secrets/<path:tenant>", responses={200: WebhookSecretView, **problem_responses(404, 422)})
def get_webhook_secret(path: TenantPath) -> dict[str, Any]:
    """Show the secret with which a tenant verifies its webhooks.  The tenant need not have a key."""
    return _secret_view(path.tenant, secret_rotations().get(check_tenant_name(path.tenant)))


@api.post("/webhook-secrets/<path:tenant>", responses={200: WebhookSecretView, **problem_responses(404, 415, 422)})
def rotate_webhook_secret(path: TenantPath) -> dict[str, Any]:
    """Give a tenant a new webhook secret.

    For a day messages are also signed with the former secret, so that receivers can be updated.  If the secret is
    rotated again within that day, the oldest secret is not used any more.
    """
    return _secret_view(path.tenant, secret_rotations().rotate(check_tenant_name(path.tenant), now_ms()))


def _secret_view(name: str, rotation: SecretRotation) -> dict[str, Any]:
    now = now_ms()
    return tenant_schemas.webhook_secret_view(name, rotation, webhook_secrets(name, rotation, now), now)


def _tenants_with_key() -> dict[str, Tenant]:
    return {tenant.name: tenant for tenant in Tenants(database()).list_all()}
