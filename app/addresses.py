"""Validation of the addresses of inference servers."""

import socket
from urllib.parse import urlsplit

from app.context import context
from slotkeeper.errors import InvalidRequest
from slotkeeper.urls import is_local_address, is_metadata_host, parse_host_address
from tasks.servers.endpoint import parse_endpoint

_INVALID_ENDPOINT = "{} must be a full URL with a host, such as http://gpu1:9001/generate"


def validate_endpoint(endpoint: str, field: str = "endpoint") -> None:
    """Check that requests can be sent to a URL.  It must have no credentials: URLs are shown and logged.

    Raises InvalidRequest.
    """
    try:
        parse_endpoint(endpoint)
    except ValueError:
        raise InvalidRequest(field, _INVALID_ENDPOINT.format(field)) from None
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
