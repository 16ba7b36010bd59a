"""Functions that the views for administrators share."""

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
    """Return a blueprint whose views only administrators may use."""
    api = blueprint(name, title, prefix)
    api.before_request(access.require_admin)
    return api


def refresh_redis(*fleets: str) -> None:
    """Write a change of the catalog to Redis.  While Redis is unavailable this is left to the sweep."""
    for fleet in fleets:
        try:
            refresh_fleet(dispatcher(), fleet)
        except RedisError as error:  # Wait for its timeout once, not for each fleet.
            log.warning("refresh_postponed", fleet=fleet, error=str(error))
            return


def close_breaker(fleet: str, kind: Literal["server", "model"], name: str) -> None:
    """Close the breaker of a server or model that an operator reports as working.  Does nothing if Redis is away."""
    try:
        dispatcher().slots.reset_breaker(fleet, kind, name)
    except RedisError as error:
        log.warning("reset_left_out", kind=kind, name=name, error=str(error))


def read_server_status(fleets: list[str]) -> dict[str, ServerStatus]:
    """Return the status of each server of these fleets, by its name.  Raises RedisError."""
    slots = dispatcher().slots
    return dispatcher().queues.call_if_available(
        lambda: {name: status for fleet in fleets for name, status in server_status.read_servers(slots, fleet).items()}
    )


def queue_counts(fleets: list[str]) -> dict[str, QueueCounts]:
    """Return the counts of each fleet's queue; a fleet that cannot be read is left out.  Raises RedisError."""
    queues = dispatcher().queues
    return queues.call_if_available(lambda: dispatcher().fleets.counts(fleets))
