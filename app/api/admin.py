"""What the administrators' modules share."""

import structlog
from flask_openapi import APIBlueprint
from redis.exceptions import RedisError

from app import auth
from app.api.context import dispatcher
from app.api.openapi import blueprint
from routing import reconcile
from routing.queues import Depths

log = structlog.get_logger(__name__)


def admin_blueprint(name: str, title: str, prefix: str) -> APIBlueprint:
    """Views that only a tenant which may administer can use."""
    api = blueprint(name, title, prefix)
    api.before_request(auth.require_admin)
    return api


def bring_to_redis(fleet: str) -> None:
    """Let a change of the catalog take effect now.  While Redis is away, the sweep does it later."""
    try:
        reconcile.refresh_fleet(dispatcher(), fleet)
    except RedisError as error:
        log.warning("refresh_postponed", fleet=fleet, error=str(error))


def depths_of(fleets: list[str]) -> dict[str, Depths]:
    """What stands in each fleet's room.  Raises RedisError."""
    return {fleet: dispatcher().queues.depths(fleet) for fleet in fleets}
