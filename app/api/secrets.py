"""Secrets that descriptions of servers name.  They come in, and never go out again."""

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
    """List the secrets that descriptions of servers may name.  Nobody is shown their values."""
    found = dispatcher().catalog.refresh().secrets
    return SecretList.build(secrets=[SecretView.build(found[name]) for name in sorted(found)])


@api.put(
    "/secrets/<name>",
    responses={200: SecretView, 201: response_of(SecretView, "New"), **problem_responses(400, 409, 413, 415, 422)},
)
def set_secret(path: SecretPath, body: SecretBody) -> tuple[dict[str, Any], int]:
    """Set a secret, or replace it: requests have the new value within two seconds.

    Only the models that are named may use it.  Those whose descriptions name it already must stay among them, and it
    stays for all models while a description of defaults names it: 409.
    """
    for model in body.models or ():
        check_name(model)
    known = dispatcher().catalog.refresh().secrets.get(path.name)
    models = None if body.models is None else frozenset(body.models)
    secret = Secret(path.name, models, vault.seal(path.name, body.value), current_tenant().name, now_ms())
    _check_unused(path.name, secret)
    catalog().set_secret(secret)
    dispatcher().catalog.refresh()
    return SecretView.build(secret), 201 if known is None else 200


@api.delete("/secrets/<name>", responses={204: None, **problem_responses(404, 409, 415)})
def remove_secret(path: SecretPath) -> tuple[str, int]:
    """Forget a secret.  409 while a description names it."""
    if path.name not in dispatcher().catalog.refresh().secrets:
        raise NotFound("There is no such secret; GET /admin/secrets lists them.", secret=path.name)
    _check_unused(path.name, None)
    catalog().remove_secret(path.name)
    dispatcher().catalog.refresh()
    return "", 204


def _check_unused(name: str, then: Secret | None) -> None:
    """Raises Conflict while a description puts the secret in that could not do so by what it is `then`."""
    found = dispatcher().catalog.get()
    models = [it for it in server_adapters.models_using_secret(name, found) if then is None or not then.is_for(it)]
    if models:
        raise Conflict(
            f"The descriptions of {', '.join(models[:5])} name this secret; change them first.",
            secret=name,
            models=models,
        )
    if then is None or then.models is not None:
        _check_no_defaults(name, found)


def _check_no_defaults(name: str, found: CatalogSnapshot) -> None:
    kinds = server_adapters.defaults_using_secret(name, found)
    if kinds:
        shown = ", ".join(f"of kind {it}" if it != INSTALLATION else "of all models" for it in kinds[:5])
        raise Conflict(f"The defaults {shown} name this secret; change them first.", secret=name, kinds=kinds)
