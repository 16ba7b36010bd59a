"""Models and their configuration, which can be changed while jobs run."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from app.api.catalog_changes import admin_blueprint, close_breaker, queue_counts, refresh_redis
from app.api.openapi import problem_responses, response_of
from app.auth.access import current_tenant
from app.context import dispatcher
from app.describing import validate_description
from app.schemas import model_schemas
from app.schemas.base import StateBody
from app.schemas.model_schemas import ConfigBody, ConfigView, ModelDetail, ModelList, ModelPath, ModelView
from app.schemas.server_schemas import DescriptionSchema, RemovalQuery, RemovalView
from routing.admission.submission import check_name
from routing.maintenance.decommission import forget_model
from routing.queries.model_status import read_model_load
from routing.queue.fleets import QueueCounts
from slotkeeper.clock import now_ms
from slotkeeper.errors import NotFound
from slotkeeper.registry import catalog_removal
from slotkeeper.registry.snapshot import Model
from slotkeeper.registry.values import AdminState
from tasks.servers import Description
from tasks.services import catalog, database

api = admin_blueprint("models", "Models", "/admin")


@api.get("/models", responses={200: ModelList})
def list_models() -> dict[str, Any]:
    """List models, with their servers and the number of waiting jobs."""
    snapshot = dispatcher().catalog.refresh()
    counts: Mapping[str, QueueCounts] = {}
    with suppress(RedisError):
        counts = queue_counts(snapshot.fleets())
    models = sorted(snapshot.models.values(), key=lambda model: model.name)
    views = [model_schemas.model_view(model, snapshot, counts.get(model.fleet)) for model in models]
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
    return model_schemas.model_detail(model, snapshot, load, remaining)


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
    return model_schemas.model_view(model, dispatcher().catalog.get(), counts)


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
