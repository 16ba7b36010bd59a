"""Metrics for Prometheus, and the load of a model as one number for autoscalers."""

from contextlib import suppress
from typing import Any

from flask import Response, current_app
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from redis.exceptions import RedisError

from app.api.catalog_changes import queue_counts
from app.api.openapi import blueprint, problem_responses
from app.auth.access import metrics_access
from app.context import dispatcher
from app.schemas.model_schemas import ModelPath
from app.schemas.operation_schemas import ModelStats
from routing.queries import gauges
from slotkeeper.errors import NotFound

api = blueprint("figures", "Operation")


@api.get(
    "/metrics", responses={200: {"description": "Metrics", "content": {"text/plain": {}}}, **problem_responses(403)}
)
@metrics_access
def metrics() -> Response:
    """Return metrics in Prometheus' text format.

    Metrics of a part that is unavailable are left out; `slotkeeper_up` shows which part that is.
    """
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
    database, counts = dispatcher().store.database, None
    with suppress(RedisError):
        counts = queue_counts([model.fleet]).get(model.fleet)
    queued, running = gauges.count_model_work(database, model.name, count_queued=counts is None)
    if counts is not None:
        queued = counts.waiting.get(model.name, 0)
    slots = catalog.count_slots(model.name)
    return ModelStats.build(model=model.name, queued=queued, running=running, active=queued + running, slots=slots)
