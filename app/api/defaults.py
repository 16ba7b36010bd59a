"""Defaults of model configurations: those of a kind of models, and those of all models."""

from typing import Any

from app.api.catalog_changes import admin_blueprint, refresh_redis
from app.api.openapi import problem_responses
from app.auth.access import current_tenant
from app.context import dispatcher
from app.describing import validate_description_for_all
from app.schemas.model_schemas import DefaultsBody, DefaultsView, KindList, KindPath, kind_view
from routing.admission.submission import check_name
from slotkeeper.clock import now_ms
from slotkeeper.errors import NotFound
from slotkeeper.registry.model_config import INSTALLATION, Defaults
from tasks.services import catalog

api = admin_blueprint("defaults", "Defaults", "/admin")


@api.get("/defaults", responses={200: DefaultsView})
def get_defaults() -> dict[str, Any]:
    """Show the defaults of all models, and which of them are built in."""
    return DefaultsView.build(_find_defaults(INSTALLATION) or Defaults(INSTALLATION, {}, 0))


@api.put("/defaults", responses={200: DefaultsView, **problem_responses(400, 413, 415, 422)})
def put_defaults(body: DefaultsBody) -> dict[str, Any]:
    """Replace the defaults of all models.  A setting that the body omits has its built-in default.

    They apply to jobs that are accepted afterwards.  422: they contradict the configuration of a model; nothing was
    changed.
    """
    return _set_defaults(INSTALLATION, body)


@api.get("/kinds", responses={200: KindList})
def list_kinds() -> dict[str, Any]:
    """List the kinds of models, with their settings and their models."""
    snapshot = dispatcher().catalog.refresh()
    kinds = [defaults for name, defaults in sorted(snapshot.defaults.items()) if name != INSTALLATION]
    return KindList.build(kinds=[kind_view(kind, snapshot) for kind in kinds])


@api.get("/kinds/<path:kind>", responses={200: DefaultsView, **problem_responses(404)})
def get_kind(path: KindPath) -> dict[str, Any]:
    """Show the settings that models of a kind have by default."""
    defaults = _find_defaults(path.kind)
    if defaults is None:
        raise NotFound("There is no such kind; GET /admin/kinds lists them.", kind=path.kind)
    return DefaultsView.build(defaults)


@api.put("/kinds/<path:kind>", responses={200: DefaultsView, **problem_responses(400, 413, 415, 422)})
def put_kind(path: KindPath, body: DefaultsBody) -> dict[str, Any]:
    """Add a kind, or replace its settings.  A model belongs to the kind that its field `kind` names.

    A setting that the body omits has the installation's default.
    """
    check_name(path.kind, "kind")
    return _set_defaults(path.kind, body)


@api.delete("/kinds/<path:kind>", responses={204: None, **problem_responses(404, 409, 415)})
def remove_kind(path: KindPath) -> tuple[str, int]:
    """Remove a kind that no model belongs to."""
    catalog().remove_kind(path.kind)
    dispatcher().catalog.refresh()
    return "", 204


def _set_defaults(kind: str, body: DefaultsBody) -> dict[str, Any]:
    overrides = body.model_dump(exclude_unset=True)
    defaults = catalog().set_defaults(
        kind, overrides, now_ms(), current_tenant().name, validate_description_for_all(overrides)
    )
    refresh_redis(*dispatcher().catalog.refresh().fleets())
    return DefaultsView.build(defaults)


def _find_defaults(kind: str) -> Defaults | None:
    return dispatcher().catalog.refresh().defaults.get(kind)
