"""Check an untrusted URL, so that no webhook reaches an internal address (SSRF).

The module takes and returns plain values, and uses no database, Redis or Celery.

The URL is checked here.  When a message is sent (tasks/webhooks/sender.py), the name is resolved once, every address is
checked, and the socket is connected to a checked address (ssrfguard: Policy, resolve, connect).  http.client sends the
request and not requests, for three reasons: requests reads the whole body of a redirect even if it does not follow it;
its timeout starts again for every read and every address; and http.client has no redirects, proxies, netrc or cookies
that must be disabled.

ssrfguard 0.4.1 alone does not prevent all attacks.  _TABLE, _opened_networks and examine_url here, and _Deadline in the
sender, prevent the others; their comments give the reasons.  tests/tasks/security/test_url_guard.py lists the attacks.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from ssrfguard import (
    DEFAULT_DENIED,
    AddressTable,
    Block,
    BlockedAddressError,
    BlockedURLError,
    Policy,
    Reach,
    Target,
)

from slotkeeper.urls import METADATA_ADDRESSES, NAT64_NETWORK, parse_host_address

Network = IPv4Network | IPv6Network

MAX_URL_LENGTH = 2048
"""In characters."""

REFUSED_PORTS = frozenset({21, 22, 23, 25, 53, 110, 119, 139, 143, 445, 465, 587, 993, 995, 6379, 6667, 9100, 11211})
"""Ports of servers that could execute the text of a POST as commands: mail, news, shells, printers, Redis, memcached.

All other ports from 1 to 65535 are allowed: a receiver may listen on any, and the check of the address protects them.
"""

ALLOW_VARIABLE = "SLOTKEEPER_WEBHOOK_ALLOW"

_LOOPBACK = (ip_address("127.0.0.1"), ip_address("::1"))

# Stricter than the library's table in four ways:
# - Of the IPv6 prefixes that embed an IPv4 address, only NAT64 is translated, because DNS64 returns it for any public
#   name.  Mapped, 6to4 and Teredo addresses never belong to a real receiver.
# - The special blocks that IANA lists as reachable contain services of routers (192.0.0.9 is the nearest NAT).
# - Azure's WireServer has a public address but is internal.
# - IPv6 outside 2000::/3 is not assigned, so only a private network can route it.
_TABLE = AddressTable(
    (
        *(b if b.network == NAT64_NETWORK else replace(b, reach=Reach.DENIED) for b in DEFAULT_DENIED.blocks),
        Block(ip_network("168.63.129.16/32"), "Azure WireServer", "Azure documentation", Reach.DENIED),
        *(
            Block(ip_network(network), "not global unicast", "RFC 4291, 2.4", Reach.DENIED)
            for network in ("::/3", "4000::/2", "8000::/1")
        ),
    )
)
_EMBEDDING_NETWORKS = tuple(b.network for b in DEFAULT_DENIED.blocks if b.reach is Reach.TRANSLATED)

# Python's parser also accepts [v1.name], and drops text after a closing bracket.
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(:\d*)?")
_VISIBLE = re.compile(r"[!-\[\]-~]*")  # visible ASCII without the backslash
_PUBLIC_ONLY_HINT = "only public addresses are sent to; use a public one, or have the operator add its network to "
_NO_HOST = "The host is neither a DNS name nor an IP address in its plain form; write it as one of them."


def parse_networks(text: str) -> tuple[Network, ...]:
    """Parse the operator's list of allowed networks, such as "127.0.0.1/32, 10.0.0.0/8".

    Raises ValueError, which names the wrong entry and what to write instead.
    """
    networks = tuple(_parse_network(entry) for entry in re.split(r"[,\s]+", text) if entry)
    _opened_networks(networks)  # raises ValueError for a network that cannot be allowed
    return networks


def check_url(url: str, allow: Sequence[Network] = ()) -> str | None:
    """Return why a URL is refused and how to correct it, as a sentence; None: the URL is accepted.

    The host is not resolved.  A name with an internal address is refused when a message is sent.
    """
    result = examine_url(url, tuple(allow))
    return result if isinstance(result, str) else None


def examine_url(url: str, allow: tuple[Network, ...]) -> Target | str:
    """Return the target of a URL, or a sentence with the reason why the URL is refused.

    The connection uses this target, so no second parser can interpret the URL differently.
    """
    if len(url) > MAX_URL_LENGTH:
        return f"The URL is longer than {MAX_URL_LENGTH} characters; shorten it."
    if not _VISIBLE.fullmatch(url):
        return (
            "The URL holds a blank, a backslash, or a character that is not visible ASCII; "
            "percent-encode it, and write an international host name in its xn-- form."
        )
    try:
        parts = urlsplit(url)
        problem = _url_problem(parts, parts.port)
    except ValueError:
        return "The URL cannot be parsed; write it as https://host/path or https://host:port/path."
    return problem or _check_host(url, parts, allow)


def _url_problem(parts: SplitResult, port: int | None) -> str | None:
    if parts.scheme not in ("http", "https"):
        return "The URL must begin with https:// or http://."
    if "@" in parts.netloc:
        return "The URL carries a user name or password before an @; leave it out, messages are signed instead."
    if not parts.hostname:
        return "The URL names no host; write it as https://host/path."
    if not _AUTHORITY.fullmatch(parts.netloc):
        return _NO_HOST
    if port == 0 or port in REFUSED_PORTS:
        return f"Port {port} is not one for HTTP; let the receiver listen on another, such as 443."
    return None


def _check_host(url: str, parts: SplitResult, allow: tuple[Network, ...]) -> Target | str:
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        target = _policy(allow, port).check_url(url)
    except BlockedURLError as error:
        if isinstance(error.__cause__, BlockedAddressError):
            return f"{parts.hostname} is not public ({error.reason}): {_PUBLIC_ONLY_HINT}{ALLOW_VARIABLE}."
        return _NO_HOST
    if target.address is None and parse_host_address(target.host) is not None:
        return _NO_HOST
    if _is_localhost(target.host) and not any(a in network for a in _LOOPBACK for network in allow):
        return f"{target.host} is this machine: {_PUBLIC_ONLY_HINT}{ALLOW_VARIABLE}."
    return target


def _is_localhost(host: str) -> bool:
    return f".{host.rstrip('.')}".endswith(".localhost")


@lru_cache(maxsize=256)
def _policy(allow: tuple[Network, ...], port: int) -> Policy:
    return Policy(
        denied_networks=_TABLE,
        allowed_networks=_opened_networks(allow),
        allowed_ports=frozenset({port}),
        on_partial_block="reject",  # A name with both internal and public addresses is an attack, not a mistake.
    )


@lru_cache(maxsize=16)
def _opened_networks(allow: tuple[Network, ...]) -> tuple[Network, ...]:
    """Return the operator's networks without the addresses of cloud metadata.

    Metadata services reveal the machine's credentials, and their addresses are in ranges that operators allow for other
    reasons (100.64.0.0/10 and fd00::/8 for VPNs).  So such an address is allowed only by an entry for it alone.

    Raises ValueError for a network that cannot be allowed.
    """
    opened: list[Network] = []
    for network in allow:
        _check_embeds_no_ipv4(network)
        opened += _without_metadata(network)
    return tuple(opened)


def _check_embeds_no_ipv4(network: Network) -> None:
    """Raise ValueError for a network of IPv6 addresses that embed IPv4 addresses.

    The embedded addresses of an allowed network are not checked, so it would allow all of them.
    """
    if network != ip_network("::1/128") and any(network.overlaps(embedding) for embedding in _EMBEDDING_NETWORKS):
        raise ValueError(
            f"{ALLOW_VARIABLE}: {network} holds IPv6 addresses that carry IPv4 addresses; "
            "write the IPv4 or the narrower IPv6 network that is meant"
        )


def _without_metadata(network: Network) -> list[Network]:
    remaining = [network]
    for address in METADATA_ADDRESSES:
        if network.num_addresses > 1 and address in network:
            remaining = [part for whole in remaining for part in _exclude(whole, ip_network(address))]
    return remaining


def _exclude(whole: Network, excluded: Network) -> list[Network]:
    if excluded.network_address not in whole:
        return [whole]
    return list(cast(Any, whole).address_exclude(excluded))


def _parse_network(entry: str) -> Network:
    try:
        return ip_network(entry)
    except ValueError as error:
        raise ValueError(
            f"{ALLOW_VARIABLE}: {error}; write networks such as 10.0.0.0/8 or 127.0.0.1/32, with commas between"
        ) from None
