"""Secrets that descriptions of servers name.  They come in, and never go out again."""

from collections.abc import Callable
from typing import Any

from flask import Response

from app import views
from app.admin import admin_blueprint
from app.auth import tenant
from app.context import dispatcher
from app.openapi import described, problems
from app.sealed import SecretBody, SecretList, SecretPath, SecretView
from jobs.errors import Conflict, NotFound
from jobs.record import now_ms
from jobs.secrets import Secret
from routing.submission import check_model_name
from tasks import descriptions, vault
from tasks.wiring import catalog

api = admin_blueprint("secrets", "Secrets", "/admin")


@api.get("/secrets", responses={200: SecretList})
def list_secrets() -> dict[str, Any]:
    """List the secrets that descriptions of servers may name.  Nobody is shown their values."""
    found = dispatcher().fleet.refresh().secrets
    return {"secrets": [views.secret(found[name]) for name in sorted(found)]}


@api.put(
    "/secrets/<name>",
    responses={200: SecretView, 201: described(SecretView, "New"), **problems(400, 409, 413, 415, 422)},
)
def set_secret(path: SecretPath, body: SecretBody) -> tuple[dict[str, Any], int]:
    """Set a secret, or replace it: requests have the new value within two seconds.

    Only the models that are named may use it.  Those whose descriptions name it already must stay among them: 409.
    """
    for model in body.models or ():
        check_model_name(model)
    known = dispatcher().fleet.refresh().secrets.get(path.name)
    models = None if body.models is None else frozenset(body.models)
    secret = Secret(path.name, models, vault.seal(path.name, body.value), tenant().name, now_ms())
    _check_unused(path.name, lambda model: secret.is_for(model))
    catalog().set_secret(secret)
    dispatcher().fleet.refresh()
    return views.secret(secret), 201 if known is None else 200


@api.delete("/secrets/<name>", responses={204: None, **problems(404, 409, 415)})
def remove_secret(path: SecretPath) -> tuple[str, int]:
    """Forget a secret.  409 while a description names it."""
    if path.name not in dispatcher().fleet.refresh().secrets:
        raise NotFound("There is no such secret; GET /admin/secrets lists them.", secret=path.name)
    _check_unused(path.name, lambda _: False)
    catalog().remove_secret(path.name)
    dispatcher().fleet.refresh()
    return "", 204


@api.after_request
def _keep_out_of_caches(answer: Response) -> Response:
    answer.headers["Cache-Control"] = "no-store"
    return answer


def _check_unused(name: str, but_by: Callable[[str], bool]) -> None:
    """Raises Conflict while models other than those are spoken to by a description that names the secret."""
    users = [model for model in descriptions.models_naming(name, dispatcher().fleet.snapshot()) if not but_by(model)]
    if users:
        raise Conflict(
            f"The descriptions of {', '.join(users[:5])} name this secret; change them first.",
            secret=name,
            models=users,
        )
