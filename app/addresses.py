"""Addresses of inference servers, as operators give them."""

from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from app.config import is_loopback
from app.context import context
from foundation.errors import InvalidRequest
from tasks.servers.client import split_endpoint

_WRONG = "{} must be a full URL with a host, such as http://gpu1:9001/generate"


def check_endpoint(endpoint: str, field: str = "endpoint") -> None:
    """Raises InvalidRequest unless a request can be sent there.  No credentials: a URL is shown and logged."""
    try:
        split_endpoint(endpoint)
    except ValueError:
        raise InvalidRequest(field, _WRONG.format(field)) from None
    parts = urlsplit(endpoint)
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest(field, f"{field} must hold no user or password")
    _check_host(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), field)
    if parts.port == 0 or any(ord(sign) <= 32 or ord(sign) > 126 or sign == "\\" for sign in endpoint):
        raise InvalidRequest(field, _WRONG.format(field))


def _check_host(host: str, port: int, field: str) -> None:
    """Raises InvalidRequest for addresses at which no inference server can stand."""
    with suppress(ValueError):
        address = ip_address(host)
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_link_local or address.is_multicast or address.is_unspecified:
            raise InvalidRequest(field, f"{field} must not lead to {host}: it is no address of an inference server")
    settings = context().settings
    if port == settings.port and (is_loopback(host) or host in settings.own_names):
        raise InvalidRequest(field, f"{field} must not lead to this API itself")
