"""Send one signed message to one URL that a stranger chose, without reaching anything inside by it.

Plain values in, a plain value out: nothing here knows the record, Redis or Celery.

The name is looked up once, every answer is checked, and the socket is opened to an address that was
checked (ssrfguard: Policy, resolve, connect).  Above that stands http.client and not requests, because
requests reads the whole body of a redirect even when it does not follow it, because a time-out there
counts anew for every read and every address, and because http.client has no redirects, proxies, netrc
or cookies to switch off.  What ssrfguard 0.4.1 leaves open is closed here: _TABLE, _openings, _examine
and _Deadline say what and why.  The table of attacks is tests/tasks/security/test_url_guard.py.
"""

import logging
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

log = logging.getLogger(__name__)

Network = IPv4Network | IPv6Network

MAX_URL_LENGTH = 2048
"""Characters."""

REFUSED_PORTS = frozenset({21, 22, 23, 25, 53, 110, 119, 139, 143, 445, 465, 587, 993, 995, 6379, 6667, 9100, 11211})
"""Where the text of a POST could be taken for commands: mail, news, shells, printers, Redis, memcached.
Every other port from 1 to 65535 is open: receivers listen on any, and the address is the guard."""

ALLOW_VARIABLE = "SLOTKEEPER_WEBHOOK_ALLOW"

_LOOPBACK = (ip_address("127.0.0.1"), ip_address("::1"))

# Stricter than the library's table in four ways.  Of the prefixes that carry an IPv4 address, only
# NAT64 is unwrapped, since a DNS64 network answers with it for any public name; mapped, 6to4 and Teredo
# addresses never name a real receiver.  The special blocks that IANA calls reachable hold routers'
# services (192.0.0.9 is the nearest NAT), no receivers.  WireServer looks public but is not.  And IPv6 outside of
# 2000::/3 is not assigned, so that only a private network can route it.
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
_CARRIERS = tuple(b.network for b in DEFAULT_DENIED.blocks if b.reach is Reach.TRANSLATED)

# Python's parser also takes [v1.name] and drops what stands behind a bracket.
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(:\d*)?")
_VISIBLE = re.compile(r"[!-\[\]-~]*")  # visible ASCII without the backslash
_PUBLIC_ONLY_HINT = "only public addresses are sent to; use a public one, or have the operator add its network to "
_NO_HOST = "The host is neither a DNS name nor an IP address in its plain form; write it as one of them."


def parse_networks(text: str) -> tuple[Network, ...]:
    """The networks in "127.0.0.1/32, 10.0.0.0/8" that may be sent to although they are not public.

    ValueError names the entry that is wrong and what to write instead.
    """
    networks = tuple(_network(entry) for entry in re.split(r"[,\s]+", text) if entry)
    _opened_networks(networks)
    return networks


def check_url(url: str, allow: Sequence[Network] = ()) -> str | None:
    """Why no message can go to this URL, with the remedy; None when nothing speaks against it.

    Looks nothing up: a name that leads inside is found out, and refused, when a message is sent.
    """
    found = examine_url(url, tuple(allow))
    return found if isinstance(found, str) else None


def examine_url(url: str, allow: tuple[Network, ...]) -> Target | str:
    """Where the URL leads, or the sentence that tells why it leads nowhere.

    The target is used for the connection as it stands, so no second parser can read the URL otherwise.
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
    except BlockedURLError as no:
        if isinstance(no.__cause__, BlockedAddressError):
            return f"{parts.hostname} is not public ({no.reason}): {_PUBLIC_ONLY_HINT}{ALLOW_VARIABLE}."
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
        on_partial_block="reject",  # a name that points inside and outside is an attempt, not a mistake
    )


@lru_cache(maxsize=16)
def _opened_networks(allow: tuple[Network, ...]) -> tuple[Network, ...]:
    """What the operator's list opens: all of it, except for cloud metadata.

    Metadata gives away the machine's credentials, and lies in ranges that are opened for other reasons
    (100.64.0.0/10 and fd00::/8 for VPNs), so it is open only where an entry names that one address.
    """
    opened: list[Network] = []
    for network in allow:
        _refuse_carrier(network)
        opened += _without_metadata(network)
    return tuple(opened)


def _refuse_carrier(network: Network) -> None:
    """An open network is not unwrapped, so every IPv4 address inside the wrapper would be open too."""
    if network != ip_network("::1/128") and any(network.overlaps(carrier) for carrier in _CARRIERS):
        raise ValueError(
            f"{ALLOW_VARIABLE}: {network} holds IPv6 addresses that carry IPv4 addresses; "
            "write the IPv4 or the narrower IPv6 network that is meant"
        )


def _without_metadata(network: Network) -> list[Network]:
    left = [network]
    for address in METADATA_ADDRESSES:
        if network.num_addresses > 1 and address in network:
            left = [piece for whole in left for piece in _exclude(whole, ip_network(address))]
    return left


def _exclude(whole: Network, excluded: Network) -> list[Network]:
    if excluded.network_address not in whole:
        return [whole]
    return list(cast(Any, whole).address_exclude(excluded))


def _network(entry: str) -> Network:
    try:
        return ip_network(entry)
    except ValueError as bad:
        raise ValueError(
            f"{ALLOW_VARIABLE}: {bad}; write networks such as 10.0.0.0/8 or 127.0.0.1/32, with commas between"
        ) from None
