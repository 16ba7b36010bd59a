"""Liveness and readiness of the process."""

from typing import Any

from app.api.openapi import blueprint, response_of
from app.auth.access import public
from app.context import context
from app.schemas.operation_schemas import LivenessView, PartStatus, ReadinessView

api = blueprint("health", "Operation", keyed=False)


@api.get("/health/live", responses={200: LivenessView})
@public
def live() -> dict[str, Any]:
    """Report that this process answers."""
    return LivenessView.build(status="ok")


@api.get("/health/ready", responses={200: ReadinessView, 503: response_of(ReadinessView, "Jobs cannot be accepted")})
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
