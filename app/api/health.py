"""Health: whether the process lives, whether it can do its work, and its figures for Prometheus."""

from collections.abc import Callable
from typing import Any

from flask import Response, current_app
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from app import probes
from app.admin import admin_blueprint
from app.auth import public
from app.openapi import blueprint, described
from app.schemas import Alive, Health

api = blueprint("health", "Operation", keyed=False)
metrics_api = admin_blueprint("metrics", "Operation", "")

_PROBES: dict[str, Callable[[], str | None]] = {
    "database": probes.database,
    "redis": probes.redis,
    "broker": probes.broker,
    "maintenance": probes.maintenance,
    "clocks": probes.clocks,
}


@api.get("/health/live", responses={200: Alive})
@public
def live() -> dict[str, str]:
    """Say that this process answers."""
    return {"status": "ok"}


@api.get("/health/ready", responses={200: Health, 503: described(Health, "Jobs cannot be accepted")})
@public
def ready() -> tuple[dict[str, Any], int]:
    """Say what this process can reach.

    Without the database nothing can be accepted: 503.  Without Redis, the broker or maintenance jobs are accepted
    and wait: 200, degraded.
    """
    parts = {name: _part(probe()) for name, probe in _PROBES.items()}
    if not parts["database"]["ok"]:
        return {"status": "unavailable", "parts": parts}, 503
    status = "ok" if all(part["ok"] for part in parts.values()) else "degraded"
    return {"status": status, "parts": parts}, 200


@metrics_api.get("/metrics", responses={200: {"description": "Figures", "content": {"text/plain": {}}}})
def metrics() -> Response:
    """Give figures in Prometheus' text format.  What cannot be reached is left out, and `slotkeeper_up` says so."""
    registry: CollectorRegistry = current_app.extensions["slotkeeper_metrics"]
    return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


def _part(why: str | None) -> dict[str, Any]:
    return {"ok": why is None, "why": why}
