"""Protection against requests that a foreign web page sends through a browser (CSRF and DNS rebinding).

A page can send a POST with a form or plain text to this server without a CORS preflight; the browser then names the
page in the header Origin.  A page whose host name resolves to 127.0.0.1 (DNS rebinding) could even read the responses;
its requests have a foreign host name in the header Host.
"""

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from slotkeeper.serve import protocol_responses
from slotkeeper.serve.http_server import Request, Response

_JSON = "application/json"


class HostGuard:
    """A filter of requests by their Host, Origin and Content-Type.

    `names` are host names that clients may use for the server.  IP addresses, `host` and localhost are always allowed.
    Without `names`, a server that listens on the network accepts any host name.
    """

    def __init__(self, host: str, names: Collection[str]) -> None:
        self._names = frozenset(name.lower() for name in (*names, host, "localhost"))
        # a server that listens on the network cannot know which host names its clients use
        self._accepts_any_name = not names and not _is_loopback(host)

    def refusal(self, request: Request) -> Response | None:
        """Return the error response for a request that must be refused; None if it is accepted."""
        host = request.headers.get("host", "")
        if not self._accepts_host(host):
            return protocol_responses.refused(421, "the Host is no name of this server; allow it by --allow-host")
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
        if (origin is not None and origin.partition("://")[2] != host) or site not in ("none", "same-origin"):
            return protocol_responses.refused(403, "another site's page sent this")
        content_type = request.headers.get("content-type", _JSON).partition(";")[0].strip().lower()
        if request.method == "POST" and request.body and content_type != _JSON:
            return protocol_responses.refused(415, f"the body must be JSON, with Content-Type: {_JSON}")
        return None

    def _accepts_host(self, host: str) -> bool:
        if not host or self._accepts_any_name:
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
