"""Addresses in URLs: read as a socket reads them, and shown without the secrets that they hold."""

import errno
import socket
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

Address = IPv4Address | IPv6Address

METADATA_ADDRESSES = tuple(
    ip_address(text)
    for text in (
        "169.254.169.254",  # AWS, GCP, Azure, and most others
        "169.254.170.2",  # AWS ECS
        "169.254.170.23",  # AWS EKS
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",  # GCP
        "100.100.100.200",  # Alibaba
        "192.0.0.192",  # Oracle
        "168.63.129.16",  # Azure WireServer
    )
)
"""Where a cloud gives a machine's credentials to whoever asks from it."""
METADATA_HOSTNAMES = frozenset(
    {
        "metadata",
        "metadata.google.internal",
        "metadata.goog",
        "metadata.azure.internal",
        "metadata.platformequinix.com",
        "metadata.tencentyun.com",
        "instance-data",
        "instance-data.ec2.internal",
        "rancher-metadata",
    }
)
NAT64_NETWORK = ip_network("64:ff9b::/96")
"""Addresses that a DNS64 network gives to IPv4 addresses."""
_TRANSLATED_NETWORKS = (NAT64_NETWORK, ip_network("::ffff:0:0:0/96"))  # also those of a stateless translator
_REFUSED_WITHIN_S = 1.0
_NO_WAY = frozenset({errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.EAFNOSUPPORT})  # as of ::1 where there is no IPv6
_PORTS = {"http": 80, "https": 443}
_HIDDEN = "***"
_SHORTEST_SECRET = 6  # characters


@lru_cache(maxsize=1024)
def parse_host_address(host: str) -> Address | None:
    """Return the address that a socket opens for a URL's host, or None for a name that has to be looked up.

    The C library's inet_aton reads it: 2130706433, 0x7f.1, 0177.0.0.1 and 127.1 are 127.0.0.1.  An IPv6 address that
    carries an IPv4 address (mapped, NAT64, translated, 6to4) is that IPv4 address.  Nothing is looked up.
    """
    text = host.strip("[]").partition("%")[0].rstrip(".")
    try:
        return _carried(ip_address(text if ":" in text else socket.inet_aton(text)))
    except (OSError, ValueError):
        return None


def _carried(address: Address) -> Address:
    if isinstance(address, IPv4Address):
        return address
    if any(address in network for network in _TRANSLATED_NETWORKS):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def is_metadata_host(host: str) -> bool:
    """Return whether this host of a URL is a cloud's metadata service, by name or by address."""
    return host.lower().rstrip(".") in METADATA_HOSTNAMES or parse_host_address(host) in METADATA_ADDRESSES


def is_local_address(address: Address) -> bool:
    """Return whether this machine has the address.  A socket can be bound to no other."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as bound:
            bound.bind((str(address), 0))
    except OSError:
        return False
    return True


def mask_url(url: str) -> str:
    """Return the URL with *** for a user, a password and each value of its query, which may be keys."""
    address, mark, query = url.partition("?")
    scheme, slashes, rest = address.partition("://")
    authority, slash, path = rest.partition("/")
    if slashes and "@" in authority:
        address = f"{scheme}://{_HIDDEN}@{authority.rpartition('@')[2]}{slash}{path}"
    query, sharp, fragment = query.partition("#")
    names = (part.partition("=") for part in query.split("&"))
    shown = "&".join(name + equals + (_HIDDEN if value else "") for name, equals, value in names)
    return address + mark + shown + sharp + fragment


def find_secrets_in_url(url: str) -> tuple[str, ...]:
    """Return the texts that `mask_url` hides of a URL, raw and decoded, except those too short to be secrets.

    An error message of a server may repeat the URL.  A value such as "1" or "v2" is common in any message.
    """
    parts = urlsplit(url)
    hidden = [parts.username, parts.password, *(part.partition("=")[2] for part in parts.query.split("&"))]
    forms = {form for text in hidden if text for form in (text, unquote(text))}
    return tuple(sorted(form for form in forms if len(form) >= _SHORTEST_SECRET))


def refuses_connections(url: str) -> bool:
    """Return whether every address of `url` refuses connections: no process listens there.

    False also if there is no answer at all, since the process may run behind a broken network; and for a node: that its
    gateway refuses connections says nothing about it.
    """
    parts = urlsplit(url)
    if parts.scheme == "node":
        return False
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or _PORTS.get(parts.scheme), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    refusals = [_refuses(family, address) for family, _, _, _, address in found]
    return any(refusals) and None not in refusals


def _refuses(family: int, address: object) -> bool | None:
    """Return True if refused, None if accepted or unknown, False if there is no route to the address."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(_REFUSED_WITHIN_S)
            probe.connect(address)  # type: ignore[arg-type]
    except ConnectionRefusedError:
        return True
    except OSError as error:
        return False if error.errno in _NO_WAY else None
    return None


Location: TypeAlias = tuple[str, str, int | None, str]


@lru_cache(maxsize=4096)
def parse_location(url: str) -> Location:
    """Return (scheme, host, port, path): where a server is, without user, password and query."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port, parts.path
