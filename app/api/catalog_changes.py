"""What views of the catalog share: they check addresses, read status and counts, and refresh Redis."""

import socket
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import structlog
from redis.exceptions import RedisError

from app.context import context, dispatcher
from app.problems import ProblemError, printable_text
from routing.maintenance.rebuild import refresh_fleet
from routing.queries import server_status
from routing.queries.server_status import ServerStatus
from routing.queue.fleets import QueueCounts
from slotkeeper.errors import InvalidRequest
from slotkeeper.urls import is_local_address, is_metadata_host, parse_host_address
from tasks.servers import validation
from tasks.servers.endpoint import parse_endpoint
from tasks.servers.validation import InvalidDescription

log = structlog.get_logger(__name__)
_INVALID_ENDPOINT = "{} must be a full URL with a host, such as http://gpu1:9001/generate"


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


def validate_endpoint(endpoint: str, field: str = "endpoint") -> None:
    """Check that requests can be sent to a URL.  It must have no credentials: URLs are shown and logged.

    Raises InvalidRequest.
    """
    try:
        is_node = parse_endpoint(endpoint).node is not None
    except ValueError:
        raise InvalidRequest(field, _INVALID_ENDPOINT.format(field)) from None
    if is_node:  # Only a node that has enrolled has such an endpoint.
        raise InvalidRequest(field, _INVALID_ENDPOINT.format(field))
    parts = urlsplit(endpoint)
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest(field, f"{field} must hold no user or password")
    if parts.port == 0 or any(ord(char) <= 32 or ord(char) > 126 or char == "\\" for char in endpoint):
        raise InvalidRequest(field, _INVALID_ENDPOINT.format(field))
    _check_host(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), field)


def _check_host(host: str, port: int, field: str) -> None:
    """Refuse addresses that no inference server can have.  Raises InvalidRequest."""
    address = parse_host_address(host)
    is_special = address is not None and (address.is_link_local or address.is_multicast or address.is_unspecified)
    if is_special or is_metadata_host(host):
        raise InvalidRequest(field, f"{field} must not lead to {host}: it is no address of an inference server")
    if port == context().settings.port and _is_this_api(host):
        raise InvalidRequest(field, f"{field} must not lead to this API itself")


def _is_this_api(host: str) -> bool:
    """Return whether the API listens on this host, if the port is the API's."""
    settings, name = context().settings, host.lower().rstrip(".")
    address, listening = parse_host_address(name), parse_host_address(settings.host)
    if name in settings.own_hostnames or f".{name}".endswith(".localhost"):
        return True
    if address is None:
        return name == socket.gethostname().lower()
    if listening is not None and listening.is_unspecified:
        return is_local_address(address)
    return address.is_loopback or address == listening


def validate_description(model: str, overrides: Mapping[str, Any]) -> str | None:
    """Return the description of a model's servers as JSON; None: `overrides` has no description and no preset.

    Raises ProblemError, whose `errors` name each place as a JSON pointer into the body.
    """
    return _validate(overrides, _make_rule_for_model(model), for_all=False)


def validate_description_for_all(overrides: Mapping[str, Any]) -> str | None:
    """As validate_description, for the defaults of models: only secrets for all models may be named."""
    return _validate(overrides, _make_rule_for_all(), for_all=True)


def _validate(overrides: Mapping[str, Any], may_use: Callable[[str], bool], *, for_all: bool) -> str | None:
    try:
        return validation.validate_description(overrides, may_use, for_all)
    except InvalidDescription as invalid:
        errors = [
            {
                "field": printable_text(fault.pointer.strip("/").replace("/", ".")),
                "pointer": printable_text(fault.pointer),
                "message": printable_text(fault.message),
            }
            for fault in invalid.faults
        ]
        facts = {"field": errors[0]["field"], "errors": errors}
        raise ProblemError(
            422, "invalid_description", "The description is not valid", printable_text(str(invalid)), **facts
        ) from None


def _make_rule_for_all() -> Callable[[str], bool]:
    """Return the rule which secrets the defaults of all models may use, by their name."""
    secrets = dispatcher().catalog.refresh().secrets
    return lambda name: name in secrets and secrets[name].models is None


def _make_rule_for_model(model: str) -> Callable[[str], bool]:
    """Return the rule which secrets a model may use, by their name."""
    secrets = dispatcher().catalog.refresh().secrets
    return lambda name: name in secrets and secrets[name].is_for(model)
