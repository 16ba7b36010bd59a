"""Figures: all of them for Prometheus, and a model's load in one number for what scales by it."""

from contextlib import suppress
from typing import Any

from flask import Response, current_app
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from redis.exceptions import RedisError

from app.api.catalog_changes import queue_counts
from app.api.openapi import blueprint, problem_responses
from app.auth.access import metrics_access
from app.context import dispatcher
from app.schemas.base import ResponseSchema
from app.schemas.job_schemas import ModelPath
from routing.queries import gauges
from slotkeeper.errors import NotFound

api = blueprint("figures", "Operation")


class ModelStats(ResponseSchema):
    """A model's load.  `active` is `queued` and `running` together."""

    model: str
    queued: int
    running: int
    active: int
    slots: int


@api.get(
    "/metrics", responses={200: {"description": "Figures", "content": {"text/plain": {}}}, **problem_responses(403)}
)
@metrics_access
def metrics() -> Response:
    """Give figures in Prometheus' text format.  What cannot be reached is left out, and `slotkeeper_up` says so."""
    registry: CollectorRegistry = current_app.extensions["slotkeeper_metrics"]
    return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


@api.get("/models/<path:model>/stats", responses={200: ModelStats, **problem_responses(403, 404)})
@metrics_access
def stats(path: ModelPath) -> dict[str, Any]:
    """Return a model's load as flat numbers; KEDA's metrics-api scaler can read `active`."""
    catalog = dispatcher().catalog.get()
    model = catalog.models.get(path.model)
    if model is None:
        raise NotFound("There is no such model; GET /admin/models lists them.", model=path.model)
    database, waiting = dispatcher().store.database, None
    with suppress(RedisError):
        waiting = queue_counts([model.fleet]).get(model.fleet)
    queued, running = gauges.count_model_work(database, model.name, count_queued=waiting is None)
    if waiting is not None:
        queued = waiting.waiting.get(model.name, 0)
    slots = catalog.count_slots(model.name)
    return ModelStats.build(model=model.name, queued=queued, running=running, active=queued + running, slots=slots)
