"""Models, their configuration, and its defaults, which can be changed while jobs run."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from app.api.catalog_changes import (
    close_breaker,
    queue_counts,
    refresh_redis,
    validate_description,
    validate_description_for_all,
)
from app.api.openapi import blueprint, problem_responses, response_of
from app.auth.access import current_tenant
from app.context import dispatcher
from app.schemas import model_schemas
from app.schemas.base import StateBody
from app.schemas.model_schemas import (
    ConfigBody,
    ConfigView,
    DefaultsBody,
    DefaultsView,
    KindList,
    KindPath,
    ModelDetail,
    ModelList,
    ModelPath,
    ModelView,
    kind_view,
)
from app.schemas.server_schemas import DescriptionSchema, RemovalQuery, RemovalView
from routing.admission.submission import check_name
from routing.maintenance.decommission import forget_model
from routing.queries.model_status import read_model_load
from routing.queue.fleets import QueueCounts
from slotkeeper.clock import now_ms
from slotkeeper.errors import NotFound
from slotkeeper.registry import catalog_removal
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.model_config import INSTALLATION, Defaults
from slotkeeper.registry.snapshot import CatalogSnapshot, Model
from slotkeeper.registry.values import AdminState
from tasks.servers import Description
from tasks.services import catalog, database

api = blueprint("models", "Models", "/admin", scope=Scope.OPERATE)
defaults_api = blueprint("defaults", "Defaults", "/admin", scope=Scope.OPERATE)


@api.get("/models", responses={200: ModelList})
def list_models() -> dict[str, Any]:
    """List models, with their servers and the number of waiting jobs."""
    snapshot = dispatcher().catalog.refresh()
    counts: Mapping[str, QueueCounts] = {}
    with suppress(RedisError):
        counts = queue_counts(snapshot.fleets())
    models = sorted(snapshot.models.values(), key=lambda model: model.name)
    views = [
        model_schemas.model_view(model, snapshot, _count_slots(snapshot, model), counts.get(model.fleet))
        for model in models
    ]
    return ModelList.build(models=views)


@api.get("/models/<path:model>", responses={200: ModelDetail, **problem_responses(404)})
def get_model(path: ModelPath) -> dict[str, Any]:
    """Show a model: its state, its load, and the longest wait that its policy can cause.

    `longest_wait` expresses that wait in terms of the load; `load.work_s` is the load now, in seconds of slot time.
    """
    model = known_model(path.model)
    load = remaining = None
    with suppress(RedisError):
        load = dispatcher().queues.call_if_available(lambda: read_model_load(dispatcher(), model))
    snapshot = dispatcher().catalog.get()
    if snapshot.is_being_removed(model.name):
        remaining = catalog_removal.count_active_jobs(database(), model.name)
    return model_schemas.model_detail(model, snapshot, _count_slots(snapshot, model), load, remaining)


@api.patch("/models/<path:model>", responses={200: ModelView, **problem_responses(400, 404, 413, 415, 422)})
def change_model(path: ModelPath, body: StateBody) -> dict[str, Any]:
    """Drain, pause, freeze or resume a model on all of its servers.

    paused: no job starts, submits are accepted.  draining: waiting jobs start, submits are 409.  frozen: no job starts,
    submits are 409.
    """
    model = known_model(path.model)
    catalog().set_model_state(
        model.name, body.state, reason=body.reason or "", by=current_tenant().name, now_ms=now_ms()
    )
    if body.state == AdminState.ONLINE:
        close_breaker(model.fleet, "model", model.name)
    refresh_redis(model.fleet)
    return _model_response(known_model(path.model))


@api.delete(
    "/models/<path:model>",
    responses={
        200: RemovalView,
        202: response_of(RemovalView, "It takes no new jobs, and is removed when its last job has ended"),
        **problem_responses(404, 409, 415, 422),
    },
)
def remove_model(path: ModelPath, query: RemovalQuery) -> tuple[dict[str, Any], int]:
    """Remove a model: its configuration, its registrations at servers, and its measurements.

    409: it has jobs that have not ended; the response has their number.  With `drain` it takes no new jobs, and is
    removed when its last job has ended.  Ended jobs stay readable under its name; dead jobs cannot be queued again.
    """
    by = current_tenant().name
    removal = catalog_removal.remove_model(database(), known_model(path.model).name, now_ms(), by, drain=query.drain)
    if removal.is_over:
        forget_model(dispatcher(), removal)
    else:
        refresh_redis(removal.fleet)
    return RemovalView.build(removal), 200 if removal.is_over else 202


@api.delete("/models/<path:model>/removal", responses={200: ModelView, **problem_responses(404, 415)})
def keep_model(path: ModelPath) -> dict[str, Any]:
    """Cancel the removal of a model: it takes jobs again."""
    model = known_model(path.model)
    catalog_removal.cancel_model_removal(database(), model.name)
    refresh_redis(model.fleet)
    return _model_response(known_model(model.name))


@api.get("/model-configs/<path:model>", responses={200: ConfigView, **problem_responses(404)})
def get_config(path: ModelPath) -> dict[str, Any]:
    """Show a model's configuration, and which of its fields differ from the defaults."""
    return model_schemas.config_view(known_model(path.model), dispatcher().catalog.get())


@api.get("/description-schema", responses={200: DescriptionSchema})
def get_description_schema() -> dict[str, Any]:
    """Show the JSON schema of server descriptions, for editors.  docs/reference/descriptions.md explains it."""
    return Description.model_json_schema()


@api.put("/model-configs/<path:model>", responses={200: ConfigView, **problem_responses(400, 413, 415, 422)})
def put_config(path: ModelPath, body: ConfigBody) -> dict[str, Any]:
    """Replace a model's overrides.  A field that the body omits has its default.  A new model is created.

    `description` and `preset` define the requests to its servers, and how their responses are read.  Both are checked
    completely; `errors` of a refusal names each place as a JSON pointer into the body.  New runs use the new
    description; running ones keep the one with which they began.
    """
    check_name(path.model)
    return _configure(path.model, body.model_dump(exclude_unset=True))


@api.delete("/model-configs/<path:model>", responses={200: ConfigView, **problem_responses(404, 415)})
def delete_config(path: ModelPath) -> dict[str, Any]:
    """Reset a model's configuration to the defaults."""
    return _configure(known_model(path.model).name, {})


def _model_response(model: Model) -> dict[str, Any]:
    counts = None
    with suppress(RedisError):
        counts = queue_counts([model.fleet]).get(model.fleet)
    snapshot = dispatcher().catalog.get()
    return model_schemas.model_view(model, snapshot, _count_slots(snapshot, model), counts)


def _count_slots(snapshot: CatalogSnapshot, model: Model) -> int:
    return dispatcher().queues.count_slots(snapshot, model.name)


def _configure(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    model = catalog().configure(name, overrides, now_ms(), validate_description(name, overrides))
    refresh_redis(model.fleet)
    return model_schemas.config_view(model, dispatcher().catalog.get())


def known_model(name: str) -> Model:
    """Return the model of this name.  Raises NotFound."""
    model = dispatcher().catalog.refresh().models.get(name)
    if model is None:
        raise NotFound("There is no such model; GET /admin/models lists them.", model=name)
    return model


@defaults_api.get("/defaults", responses={200: DefaultsView})
def get_defaults() -> dict[str, Any]:
    """Show the defaults of all models, and which of them are built in."""
    return DefaultsView.build(_find_defaults(INSTALLATION) or Defaults(INSTALLATION, {}, 0))


@defaults_api.put("/defaults", responses={200: DefaultsView, **problem_responses(400, 413, 415, 422)})
def put_defaults(body: DefaultsBody) -> dict[str, Any]:
    """Replace the defaults of all models.  A setting that the body omits has its built-in default.

    They apply to jobs that are accepted afterwards.  422: they contradict the configuration of a model; nothing was
    changed.
    """
    return _set_defaults(INSTALLATION, body)


@defaults_api.get("/kinds", responses={200: KindList})
def list_kinds() -> dict[str, Any]:
    """List the kinds of models, with their settings and their models."""
    snapshot = dispatcher().catalog.refresh()
    kinds = [defaults for name, defaults in sorted(snapshot.defaults.items()) if name != INSTALLATION]
    return KindList.build(kinds=[kind_view(kind, snapshot) for kind in kinds])


@defaults_api.get("/kinds/<path:kind>", responses={200: DefaultsView, **problem_responses(404)})
def get_kind(path: KindPath) -> dict[str, Any]:
    """Show the settings that models of a kind have by default."""
    defaults = _find_defaults(path.kind)
    if defaults is None:
        raise NotFound("There is no such kind; GET /admin/kinds lists them.", kind=path.kind)
    return DefaultsView.build(defaults)


@defaults_api.put("/kinds/<path:kind>", responses={200: DefaultsView, **problem_responses(400, 413, 415, 422)})
def put_kind(path: KindPath, body: DefaultsBody) -> dict[str, Any]:
    """Add a kind, or replace its settings.  A model belongs to the kind that its field `kind` names.

    A setting that the body omits has the installation's default.
    """
    check_name(path.kind, "kind")
    return _set_defaults(path.kind, body)


@defaults_api.delete("/kinds/<path:kind>", responses={204: None, **problem_responses(404, 409, 415)})
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
