"""Health: whether the process lives, and whether it can do its work."""

from typing import Any

from app.api.openapi import blueprint, response_of
from app.auth.access import public
from app.context import context
from app.job_answers import LivenessView, PartStatus, ReadinessView

api = blueprint("health", "Operation", keyed=False)


@api.get("/health/live", responses={200: LivenessView})
@public
def live() -> dict[str, Any]:
    """Say that this process answers."""
    return LivenessView.build(status="ok")


@api.get("/health/ready", responses={200: ReadinessView, 503: response_of(ReadinessView, "Jobs cannot be accepted")})
@public
def ready() -> tuple[dict[str, Any], int]:
    """Say what this process can reach.

    Without the database nothing can be accepted: 503.  Without Redis, the broker, maintenance or workers jobs are
    accepted and wait: 200, degraded.  Within a second all who ask get the same answer.
    """
    parts = {name: PartStatus.build(ok=why is None, why=why) for name, why in context().readiness.parts().items()}
    if not parts["database"]["ok"]:
        return ReadinessView.build(status="unavailable", parts=parts), 503
    status = "ok" if all(part["ok"] for part in parts.values()) else "degraded"
    return ReadinessView.build(status=status, parts=parts), 200
