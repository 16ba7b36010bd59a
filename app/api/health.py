"""Health: whether the process lives, and whether it can do its work."""

from typing import Any

from app.auth import public
from app.context import context
from app.job_answers import Alive, Health, Part
from app.openapi import blueprint, described

api = blueprint("health", "Operation", keyed=False)


@api.get("/health/live", responses={200: Alive})
@public
def live() -> dict[str, Any]:
    """Say that this process answers."""
    return Alive.of(status="ok")


@api.get("/health/ready", responses={200: Health, 503: described(Health, "Jobs cannot be accepted")})
@public
def ready() -> tuple[dict[str, Any], int]:
    """Say what this process can reach.

    Without the database nothing can be accepted: 503.  Without Redis, the broker, maintenance or workers jobs are
    accepted and wait: 200, degraded.  Within a second all who ask get the same answer.
    """
    parts = {name: Part.of(ok=why is None, why=why) for name, why in context().readiness.parts().items()}
    if not parts["database"]["ok"]:
        return Health.of(status="unavailable", parts=parts), 503
    status = "ok" if all(part["ok"] for part in parts.values()) else "degraded"
    return Health.of(status=status, parts=parts), 200
