"""Health, metrics, the load of a model for autoscalers, the ledger, and the processes of all hosts."""

from contextlib import suppress
from typing import Any

from flask import Response, current_app
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from redis.exceptions import RedisError

from app.api.catalog_changes import queue_counts
from app.api.openapi import blueprint, problem_responses, response_of
from app.auth.access import metrics_access, public
from app.context import context, dispatcher
from app.schemas.model_schemas import ModelPath
from app.schemas.operation_schemas import (
    LedgerView,
    LivenessView,
    ModelStats,
    PartStatus,
    ProcessList,
    ProcessView,
    ReadinessView,
)
from routing.queries import gauges
from slotkeeper.errors import NotFound
from slotkeeper.jobs import ledger
from slotkeeper.registry.identity import Scope
from tasks.services import processes

health_api = blueprint("health", "Operation", scope=None)
figures_api = blueprint("figures", "Operation", scope=Scope.READ)
ledger_api = blueprint("ledger", "Operation", "/admin", scope=Scope.OPERATE)
processes_api = blueprint("processes", "Operation", "/admin", scope=Scope.OPERATE)


@health_api.get("/health/live", responses={200: LivenessView})
@public
def live() -> dict[str, Any]:
    """Report that this process answers."""
    return LivenessView.build(status="ok")


@health_api.get(
    "/health/ready", responses={200: ReadinessView, 503: response_of(ReadinessView, "Jobs cannot be accepted")}
)
@public
def ready() -> tuple[dict[str, Any], int]:
    """Report which parts of the installation this process can use.

    503: the database is unavailable, and no job can be accepted.  200 with `degraded`: Redis, the broker, maintenance
    or workers are unavailable; jobs are accepted and wait.  A response is cached for one second.
    """
    parts = {name: PartStatus.build(ok=why is None, why=why) for name, why in context().readiness.parts().items()}
    if not parts["database"]["ok"]:
        return ReadinessView.build(status="unavailable", parts=parts), 503
    status = "ok" if all(part["ok"] for part in parts.values()) else "degraded"
    return ReadinessView.build(status=status, parts=parts), 200


@figures_api.get(
    "/metrics", responses={200: {"description": "Metrics", "content": {"text/plain": {}}}, **problem_responses(403)}
)
@metrics_access
def metrics() -> Response:
    """Return metrics in Prometheus' text format.

    Metrics of a part that is unavailable are left out; `slotkeeper_up` shows which part that is.
    """
    registry: CollectorRegistry = current_app.extensions["slotkeeper_metrics"]
    return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


@figures_api.get("/models/<path:model>/stats", responses={200: ModelStats, **problem_responses(403, 404)})
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
    slots = dispatcher().queues.count_slots(catalog, model.name)
    return ModelStats.build(model=model.name, queued=queued, running=running, active=queued + running, slots=slots)


@ledger_api.get("/ledger", responses={200: LedgerView})
def get_ledger() -> dict[str, Any]:
    """Show the balance: accepted jobs = jobs in each state + jobs that were removed after their end."""
    return LedgerView.build(ledger.read(dispatcher().store.database))


@processes_api.get("/processes", responses={200: ProcessList})
def list_processes() -> dict[str, Any]:
    """List the processes that have reported in the last minute, with their state."""
    return ProcessList.build(processes=[ProcessView.build(process) for process in processes().read_all()])
