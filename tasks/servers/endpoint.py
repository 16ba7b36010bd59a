"""The address of an inference server, read once from the URL with which it is registered."""

import re
from base64 import b64encode
from typing import NamedTuple, TypeAlias
from urllib.parse import quote, unquote, urlsplit

Origin: TypeAlias = tuple[str, str, int]
"""Scheme, host and port.  Requests to the same origin share connections."""

NODE = "node"
"""The scheme of a node's endpoint: its host is the id of the node, which gateways reach."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_UNRESERVED = re.compile(r"[A-Za-z0-9/._~-]+")
_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_RESERVED = "%/?:@!$&'()*+,;=~[]"  # RFC 3986, without "#"; "%" because a target may be quoted already


class Endpoint(NamedTuple):
    """Where the requests to a server go."""

    url: str
    """The URL that jobs are submitted to, without its fragment."""
    origin: Origin
    path: str
    """The path of the URL as registered, without a trailing slash; "" for http://gpu1:9001/."""
    target: str
    """The path and the query of the URL, quoted: what is requested to submit a job."""
    header_lines: tuple[str, ...]
    """The header lines that follow from the URL: Host, and Authorization if it contains a user."""
    node: str | None = None
    """The id of the node to which the requests go; None: it is no node."""


def parse_endpoint(url: str) -> Endpoint:
    """Parse the URL of a server.  Raises ValueError if it is not an http or https URL with a host, nor a node's."""
    parts = urlsplit(url)
    if parts.scheme == NODE and parts.hostname:
        origin = (NODE, parts.hostname, 0)
        return Endpoint(url, origin, parts.path.removesuffix("/run"), parts.path, (), parts.hostname)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or not url.isprintable():
        raise ValueError("an endpoint is a full URL, such as http://gpu1:9001/generate")
    default_port = _DEFAULT_PORTS[parts.scheme]
    port = parts.port or default_port  # Raises ValueError if it is not a number up to 65535.
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
    name = f"[{host}]" if ":" in host else host
    lines = [f"Host: {name if port == default_port else f'{name}:{port}'}"]
    if parts.username or parts.password:
        user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        lines.append(f"Authorization: Basic {b64encode(user.encode('latin-1')).decode()}")
    target = quote_target((parts.path or "/") + f"?{parts.query}" * bool(parts.query))
    origin = (parts.scheme, host, port)
    return Endpoint(url.partition("#")[0], origin, parts.path.rstrip("/"), target, tuple(lines))


def quote_target(target: str) -> str:
    """Return a path and query with all characters quoted that HTTP does not allow in them, and no others."""
    if _UNRESERVED.fullmatch(target):
        return target
    return quote(_LONE_PERCENT.sub("%25", target), safe=_RESERVED)
