"""Secrets that server descriptions name.  They can be set, and never read."""

from typing import Any

from app.api.catalog_changes import admin_blueprint
from app.api.openapi import no_store, problem_responses, response_of
from app.auth.access import current_tenant
from app.context import dispatcher
from app.schemas.tenant_schemas import SecretBody, SecretList, SecretPath, SecretView
from routing.admission.submission import check_name
from slotkeeper.clock import now_ms
from slotkeeper.errors import Conflict, NotFound
from slotkeeper.registry.model_config import INSTALLATION
from slotkeeper.registry.server_descriptions import Secret
from slotkeeper.registry.snapshot import CatalogSnapshot
from tasks import server_adapters
from tasks.security import vault
from tasks.services import catalog

api = no_store(admin_blueprint("secrets", "Secrets", "/admin"))


@api.get("/secrets", responses={200: SecretList})
def list_secrets() -> dict[str, Any]:
    """List the secrets that server descriptions may name, without their values."""
    secrets = dispatcher().catalog.refresh().secrets
    return SecretList.build(secrets=[SecretView.build(secrets[name]) for name in sorted(secrets)])


@api.put(
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


@api.delete("/secrets/<name>", responses={204: None, **problem_responses(404, 409, 415)})
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
