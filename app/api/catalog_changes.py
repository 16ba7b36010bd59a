"""What the administrators' modules share."""

from typing import Literal

import structlog
from flask_openapi import APIBlueprint
from redis.exceptions import RedisError

from app.api.openapi import blueprint
from app.auth import access
from app.context import dispatcher
from routing.maintenance.rebuild import refresh_fleet
from routing.queries import server_status
from routing.queries.server_status import ServerStatus
from routing.queue.fleets import QueueCounts

log = structlog.get_logger(__name__)


def admin_blueprint(name: str, title: str, prefix: str) -> APIBlueprint:
    """Views that only a tenant which may administer can use."""
    api = blueprint(name, title, prefix)
    api.before_request(access.require_admin)
    return api


def refresh_redis(*fleets: str) -> None:
    """Let a change of the catalog take effect now.  While Redis is away, the sweep does it later."""
    for fleet in fleets:
        try:
            refresh_fleet(dispatcher(), fleet)
        except RedisError as error:  # Its time-out is paid once, not for each fleet.
            log.warning("refresh_postponed", fleet=fleet, error=str(error))
            return


def close_breaker(fleet: str, kind: Literal["server", "model"], name: str) -> None:
    """Somebody says that it works again: it is not left alone any longer.  While Redis is away, nothing is done."""
    try:
        dispatcher().slots.reset_breaker(fleet, kind, name)
    except RedisError as error:
        log.warning("reset_left_out", kind=kind, name=name, error=str(error))


def read_server_status(fleets: list[str]) -> dict[str, ServerStatus]:
    """How each server of these fleets stands.  Raises RedisError."""
    slots = dispatcher().slots
    return dispatcher().queues.call_if_available(
        lambda: {name: it for fleet in fleets for name, it in server_status.read_servers(slots, fleet).items()}
    )


def queue_counts(fleets: list[str]) -> dict[str, QueueCounts]:
    """What stands in each fleet's room; one that cannot be read is left out.  Raises RedisError: Redis is away."""
    queues = dispatcher().queues
    return queues.call_if_available(lambda: dispatcher().fleets.counts(fleets))
