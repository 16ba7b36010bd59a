"""Tenants: their limits and states; and the secrets that server descriptions name.

Tenants are added on the command line.  Secrets can be set, and never read.
"""

from collections.abc import Sequence
from typing import Any

from app.api.catalog_changes import refresh_redis
from app.api.openapi import blueprint, no_store, problem_responses, response_of
from app.auth.access import current_tenant, scope, visible_name
from app.context import dispatcher
from app.schemas import tenant_schemas
from app.schemas.tenant_schemas import (
    LimitsBody,
    LimitsView,
    SecretBody,
    SecretList,
    SecretPath,
    SecretView,
    TenantBody,
    TenantList,
    TenantPath,
    TenantView,
    WebhookSecretView,
)
from routing.admission.submission import check_name
from slotkeeper.clock import now_ms
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.registry.api_keys import ApiKey, ApiKeys
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.model_config import INSTALLATION
from slotkeeper.registry.server_descriptions import Secret
from slotkeeper.registry.snapshot import CatalogSnapshot
from slotkeeper.registry.tenant_limits import NO_LIMITS
from slotkeeper.registry.tenants import Tenants, check_tenant_name
from slotkeeper.registry.webhook_rotations import SecretRotation
from tasks import server_adapters
from tasks.security import vault
from tasks.security.keyring import webhook_secrets
from tasks.services import catalog, database, secret_rotations

api = no_store(blueprint("tenants", "Tenants", "/admin", scope=Scope.OPERATE))
secrets_api = no_store(blueprint("secrets", "Secrets", "/admin", scope=Scope.OPERATE))


@api.get("/tenants", responses={200: TenantList})
def list_tenants() -> dict[str, Any]:
    """List the tenants that were added, and those that are not online."""
    snapshot, keys = dispatcher().catalog.refresh(), ApiKeys(database()).list_by_tenant(now_ms())
    added = {tenant.name for tenant in Tenants(database()).list_all()}
    names = sorted(added | snapshot.tenants.keys())
    return TenantList.build(tenants=[_view(name, snapshot, keys.get(name, ())) for name in names])


@api.patch("/tenants/<path:tenant>", responses={200: TenantView, **problem_responses(400, 404, 409, 413, 415, 422)})
def change_tenant(path: TenantPath, body: TenantBody) -> dict[str, Any]:
    """Change a tenant's limits, or drain, pause, freeze or resume it for all models.

    Only a tenant that was added can have limits; they apply within a second.

    paused: none of its jobs starts, submits are accepted.  draining: its waiting jobs start, submits are 409.  frozen:
    none of its jobs starts, submits are 409.  Running jobs go on in each case.
    """
    name = check_tenant_name(path.tenant)
    if body.limit_changes:
        Tenants(database()).change(name, body.limit_changes, now_ms())
    if body.state is not None:
        catalog().set_tenant_state(
            name, body.state, reason=body.reason or "", by=current_tenant().name, now_ms=now_ms()
        )
    snapshot = dispatcher().catalog.refresh()
    refresh_redis(*snapshot.fleets())
    return _view(name, snapshot, ApiKeys(database()).list_by_tenant(now_ms()).get(name, ()))


@api.get("/limits", responses={200: LimitsView})
def get_limits() -> dict[str, Any]:
    """Show the limits of the installation, which apply to each tenant for which a limit is not set."""
    return LimitsView.build(limits=dispatcher().catalog.refresh().limits.get(INSTALLATION, NO_LIMITS).model_dump())


@api.patch("/limits", responses={200: LimitsView, **problem_responses(400, 413, 415, 422)})
def change_limits(body: LimitsBody) -> dict[str, Any]:
    """Change the limits of the installation, within a second everywhere."""
    limits = Tenants(database()).change(INSTALLATION, body.changes, now_ms())
    refresh_redis(*dispatcher().catalog.refresh().fleets())
    return LimitsView.build(limits=limits.model_dump())


@api.get("/webhook-secrets/<path:tenant>", responses={200: WebhookSecretView, **problem_responses(404, 422)})
@scope(Scope.MANAGE)
def get_webhook_secret(path: TenantPath) -> dict[str, Any]:
    """Show the secret with which a tenant verifies its webhooks.  The tenant need not have a key."""
    name = visible_name(path.tenant)
    return _secret_view(name, secret_rotations().get(name))


@api.post("/webhook-secrets/<path:tenant>", responses={200: WebhookSecretView, **problem_responses(404, 415, 422)})
@scope(Scope.MANAGE)
def rotate_webhook_secret(path: TenantPath) -> dict[str, Any]:
    """Give a tenant a new webhook secret.

    For a day messages are also signed with the former secret, so that receivers can be updated.  If the secret is
    rotated again within that day, the oldest secret is not used any more.
    """
    name = visible_name(path.tenant)
    return _secret_view(name, secret_rotations().rotate(name, now_ms()))


def _secret_view(name: str, rotation: SecretRotation) -> dict[str, Any]:
    now = now_ms()
    return tenant_schemas.webhook_secret_view(name, rotation, webhook_secrets(name, rotation, now), now)


def _view(name: str, snapshot: CatalogSnapshot, keys: Sequence[ApiKey]) -> dict[str, Any]:
    limits = snapshot.limits.get(name, NO_LIMITS)
    return tenant_schemas.tenant_view(name, snapshot.tenants.get(name), limits, keys)


@secrets_api.get("/secrets", responses={200: SecretList})
def list_secrets() -> dict[str, Any]:
    """List the secrets that server descriptions may name, without their values."""
    secrets = dispatcher().catalog.refresh().secrets
    return SecretList.build(secrets=[SecretView.build(secrets[name]) for name in sorted(secrets)])


@secrets_api.put(
    "/secrets/<name>",
    responses={200: SecretView, 201: response_of(SecretView, "New"), **problem_responses(400, 409, 413, 415, 422)},
)
def set_secret(path: SecretPath, body: SecretBody) -> tuple[dict[str, Any], int]:
    """Set a secret, or replace it.  Requests to servers have the new value within two seconds.

    Only the models in `models` may use it.  409: a model whose description names it is not among them, or a description
    of defaults names it and it would not be for all models.
    """
    for model in body.models or ():
        check_name(model)
    former = dispatcher().catalog.refresh().secrets.get(path.name)
    models = None if body.models is None else frozenset(body.models)
    secret = Secret(path.name, models, vault.seal(path.name, body.value), current_tenant().name, now_ms())
    _check_unused(path.name, secret)
    catalog().set_secret(secret)
    dispatcher().catalog.refresh()
    return SecretView.build(secret), 201 if former is None else 200


@secrets_api.delete("/secrets/<name>", responses={204: None, **problem_responses(404, 409, 415)})
def remove_secret(path: SecretPath) -> tuple[str, int]:
    """Remove a secret.  409: a description names it."""
    if path.name not in dispatcher().catalog.refresh().secrets:
        raise NotFound("There is no such secret; GET /admin/secrets lists them.", secret=path.name)
    _check_unused(path.name, None)
    catalog().remove_secret(path.name)
    dispatcher().catalog.refresh()
    return "", 204


def _check_unused(name: str, new: Secret | None) -> None:
    """Raise Conflict if a description names the secret and may not use `new`; None: the secret is removed."""
    snapshot = dispatcher().catalog.get()
    models = [
        model for model in server_adapters.models_using_secret(name, snapshot) if new is None or not new.is_for(model)
    ]
    if models:
        raise Conflict(
            f"The descriptions of {', '.join(models[:5])} name this secret; change them first.",
            secret=name,
            models=models,
        )
    if new is None or new.models is not None:
        _check_no_defaults(name, snapshot)


def _check_no_defaults(name: str, snapshot: CatalogSnapshot) -> None:
    """Raise Conflict if a description of defaults names the secret."""
    kinds = server_adapters.defaults_using_secret(name, snapshot)
    if kinds:
        shown = ", ".join(f"of kind {kind}" if kind != INSTALLATION else "of all models" for kind in kinds[:5])
        raise Conflict(f"The defaults {shown} name this secret; change them first.", secret=name, kinds=kinds)
