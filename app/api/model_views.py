"""Models and their configuration, changed while everything runs."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from app.api.catalog_changes import admin_blueprint, close_breaker, queue_counts, refresh_redis
from app.api.openapi import problem_responses
from app.api.openapi import response_of as told
from app.auth.access import current_tenant
from app.context import dispatcher
from app.describing import validate_description
from app.kinds import DescriptionSchema
from app.problems import know_fields
from app.removal import RemovalQuery, RemovalView
from app.schemas import server_schemas as shape
from app.schemas.job_schemas import ConfigBody, ModelPath, StateBody
from app.schemas.server_schemas import ConfigView, ModelDetail, ModelList, ModelView
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

know_fields("ConfigBody", ConfigBody.model_fields)


@api.get("/models", responses={200: ModelList})
def list_models() -> dict[str, Any]:
    """List models, with their servers and how many jobs wait."""
    found = dispatcher().catalog.refresh()
    depths: Mapping[str, QueueCounts] = {}
    with suppress(RedisError):
        depths = queue_counts(found.fleets())
    models = sorted(found.models.values(), key=lambda model: model.name)
    return ModelList.build(models=[shape.model_view(model, found, depths.get(model.fleet)) for model in models])


@api.get("/models/<path:model>", responses={200: ModelDetail, **problem_responses(404)})
def get_model(path: ModelPath) -> dict[str, Any]:
    """Show a model: its state, its load, and the longest wait that its policy can cause.

    `longest_wait` expresses that wait in terms of the load; `load.work_s` is the load now, in seconds of slot time.
    """
    known = known_model(path.model)
    load = None
    with suppress(RedisError):
        load = dispatcher().queues.call_if_available(lambda: read_model_load(dispatcher(), known))
    found = dispatcher().catalog.get()
    left = catalog_removal.count_active_jobs(database(), known.name) if found.is_being_removed(known.name) else None
    return shape.model_detail(known, found, load, left)


@api.patch("/models/<path:model>", responses={200: ModelView, **problem_responses(400, 404, 413, 415, 422)})
def change_model(path: ModelPath, body: StateBody) -> dict[str, Any]:
    """Drain, pause, freeze or resume a model on all of its servers.

    paused: no job starts, submits are accepted.  draining: waiting jobs start, submits are 409.  frozen: no job starts,
    submits are 409.
    """
    known = known_model(path.model)
    catalog().set_model_state(
        known.name, body.state, reason=body.reason or "", by=current_tenant().name, now_ms=now_ms()
    )
    if body.state == AdminState.ONLINE:
        close_breaker(known.fleet, "model", known.name)
    refresh_redis(known.fleet)
    return _model_response(known_model(path.model))


@api.delete(
    "/models/<path:model>",
    responses={
        200: RemovalView,
        202: told(RemovalView, "It takes no new jobs, and goes when the last has ended"),
        **problem_responses(404, 409, 415, 422),
    },
)
def remove_model(path: ModelPath, query: RemovalQuery) -> tuple[dict[str, Any], int]:
    """Remove a model: its configuration, its place on its servers, and what was learned of it.

    With jobs that have not ended it is 409, which says how many; or, with `drain`, it takes no new ones, and goes when
    the last has ended.  Ended jobs stay readable under its name; dead ones cannot be queued again.
    """
    by = current_tenant().name
    found = catalog_removal.remove_model(database(), known_model(path.model).name, now_ms(), by, drain=query.drain)
    if found.is_over:
        forget_model(dispatcher(), found)
    else:
        refresh_redis(found.fleet)
    return RemovalView.build(found), 200 if found.is_over else 202


@api.delete("/models/<path:model>/removal", responses={200: ModelView, **problem_responses(404, 415)})
def keep_model(path: ModelPath) -> dict[str, Any]:
    """Call a removal off: the model takes jobs again."""
    known = known_model(path.model)
    catalog_removal.cancel_model_removal(database(), known.name)
    refresh_redis(known.fleet)
    return _model_response(known_model(known.name))


@api.get("/model-configs/<path:model>", responses={200: ConfigView, **problem_responses(404)})
def get_config(path: ModelPath) -> dict[str, Any]:
    """Show how a model's jobs are treated, and what of it differs from the defaults."""
    return shape.config_view(known_model(path.model), dispatcher().catalog.get())


@api.get("/description-schema", responses={200: DescriptionSchema})
def get_description_schema() -> dict[str, Any]:
    """Show the JSON schema of a description of a server, for editors.  docs/reference/descriptions.md explains it."""
    return Description.model_json_schema()


@api.put("/model-configs/<path:model>", responses={200: ConfigView, **problem_responses(400, 413, 415, 422)})
def put_config(path: ModelPath, body: ConfigBody) -> dict[str, Any]:
    """Replace a model's overrides.  What the body leaves out goes back to its default; a new model is created.

    `description` and `preset` say how its servers are spoken to.  They are checked whole; `errors` of a refusal name
    each place as a JSON pointer into the body.  New runs are by the new one, those under way go on by theirs.
    """
    check_name(path.model)
    return _configure(path.model, body.model_dump(exclude_unset=True))


@api.delete("/model-configs/<path:model>", responses={200: ConfigView, **problem_responses(404, 415)})
def delete_config(path: ModelPath) -> dict[str, Any]:
    """Go back to the defaults."""
    return _configure(known_model(path.model).name, {})


def _model_response(model: Model) -> dict[str, Any]:
    depths = None
    with suppress(RedisError):
        depths = queue_counts([model.fleet]).get(model.fleet)
    return shape.model_view(model, dispatcher().catalog.get(), depths)


def _configure(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    model = catalog().configure(name, overrides, now_ms(), validate_description(name, overrides))
    refresh_redis(model.fleet)
    return shape.config_view(model, dispatcher().catalog.get())


def known_model(name: str) -> Model:
    found = dispatcher().catalog.refresh().models.get(name)
    if found is None:
        raise NotFound("There is no such model; GET /admin/models lists them.", model=name)
    return found
