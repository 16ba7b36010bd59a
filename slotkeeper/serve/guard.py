"""Keeps web pages away: a browser on this machine must not be made to run anything here by a page of a stranger.

A page can send requests, without asking first, as text or as a form, and names itself as their Origin; and a name that
was bound to 127.0.0.1 for the purpose (DNS rebinding) would even let it read the answers.
"""

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from slotkeeper.serve import protocol_responses
from slotkeeper.serve.http_server import Request, Response

_JSON = "application/json"


class HostGuard:
    """`names`: host names under which the server may be called, besides addresses and, on loopback, this machine's."""

    def __init__(self, host: str, names: Collection[str]) -> None:
        self._names = frozenset(name.lower() for name in (*names, host, "localhost"))
        # Whoever listens to the network is called by whatever name that has there, unless it is told.
        self._any_name = not names and not _is_loopback(host)

    def refusal(self, request: Request) -> Response | None:
        """Why a request is not let in; None: it is."""
        host = request.headers.get("host", "")
        if not self._is_own(host):
            return protocol_responses.refused(421, "the Host is no name of this server; allow it by --allow-host")
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
        if (origin is not None and origin.partition("://")[2] != host) or site not in ("none", "same-origin"):
            return protocol_responses.refused(403, "another site's page sent this")
        kind = request.headers.get("content-type", _JSON).partition(";")[0].strip().lower()
        if request.method == "POST" and request.body and kind != _JSON:
            return protocol_responses.refused(415, f"the body must be JSON, with Content-Type: {_JSON}")
        return None

    def _is_own(self, host: str) -> bool:
        if not host or self._any_name:
            return True
        if "@" in host:
            return False
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        return name in self._names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)
