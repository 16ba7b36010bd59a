"""Authentication and authorization of requests.

With keys (SLOTKEEPER_REQUIRE_KEYS), `Authorization: Bearer sk_…` names a tenant, and /admin requires the key of an
administrator.  Without keys each client is the tenant LOCAL.  Then only clients on this machine are served, and
requests that a web page in a browser on this machine could send are refused: those to a host name that was bound to
127.0.0.1 (DNS rebinding), and those from another origin (CSRF).
"""

import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from hmac import compare_digest
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flask import Flask, Request, current_app, g, request

from app.auth.api_keys import read_bearer
from app.config import AppSettings, is_loopback
from app.context import context
from app.problems import ProblemError
from slotkeeper import audit, logs
from slotkeeper.audit import Actor
from slotkeeper.registry.tenants import LOCAL_TENANT, Tenant, Tenants, hash_key

View = TypeVar("View", bound=Callable[..., object])

_COMMAND_LINE = "slotkeeper-cli"
"""The User-Agent of the command line.  Any client can send it, so it is only logged, and allows nothing."""
_EXTENSION = "slotkeeper_keys"
_MOST_CACHED = 4096
_CHANGING_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_FORWARDED = re.compile(
    "HTTP_(FORWARDED|VIA|CDN_LOOP|X_(ORIGINAL_)?FORWARDED(_.*)?|X_REAL_IP|X_(CLUSTER_)?CLIENT_IP|X_AZURE_CLIENTIP"
    "|X_ENVOY_EXTERNAL_ADDRESS|(TRUE_CLIENT|CF_CONNECTING|FASTLY_CLIENT|FLY_CLIENT)_IP)"
)
# A page of another origin can send these only after a CORS preflight request, which the API never allows.
_SAFE_TYPES = frozenset({"application/json", "application/x-ndjson", "application/problem+json"})
_KEYS = "To serve others, set SLOTKEEPER_REQUIRE_KEYS=true and give them keys."


def keys() -> "Keys | None":
    """Return the keys of this application; None: it requires none."""
    cached_keys: Keys | None = current_app.extensions[_EXTENSION]
    return cached_keys


class Keys:
    """Finds the tenants of keys, and caches them for `cache_s` seconds.  Thread-safe.

    It decides what a request may do, and works without the server.  KeyCache (api_keys.py) has all keys in memory, for
    the server's limits and turns.
    """

    def __init__(self, tenants: Tenants, cache_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._tenants = tenants
        self._cache_s = cache_s
        self._clock = clock
        self._lock = threading.Lock()
        self._cache: dict[str, tuple[float, Tenant | None]] = {}

    def tenant(self, key: str) -> Tenant | None:
        """Return the tenant of a key, or None.  Raises DatabaseUnavailable."""
        return self.of_hashed(hash_key(key))

    def of_hashed(self, hashed: str) -> Tenant | None:
        """Return the tenant whose key has this hash, or None.  Raises DatabaseUnavailable."""
        now = self._clock()
        cached = self._cache.get(hashed)
        if cached is not None and now < cached[0]:
            return cached[1]
        tenant = self._tenants.find_by_hash(hashed)
        with self._lock:
            if len(self._cache) >= _MOST_CACHED:
                self._cache.clear()  # A client tries keys out.  The valid keys are soon cached again.
            self._cache[hashed] = (now + self._cache_s, tenant)
        return tenant


def register(app: Flask) -> None:
    """Authorize each request to a view of `app`, except to those that are marked as public."""
    app.before_request(authorize)
    app.teardown_request(_reset_actor)


def configure_access(app: Flask, settings: AppSettings, tenants: Tenants) -> None:
    """Set the tenants whose keys `app` accepts if it requires keys."""
    app.extensions[_EXTENSION] = Keys(tenants, settings.key_cache_s) if settings.require_keys else None


def public(view: View) -> View:
    """Mark a view that requires no key, because it shows nothing confidential."""
    view.public = True  # type: ignore[attr-defined]
    return view


def own_auth(view: View) -> View:
    """Mark a view that authenticates requests itself, and serves clients on all machines."""
    view.has_own_auth = True  # type: ignore[attr-defined]
    return view


def metrics_access(view: View) -> View:
    """Mark a view that shows metrics of all tenants.  It requires the metrics key or an administrator's key."""
    view.shows_metrics = True  # type: ignore[attr-defined]
    return view


def page_access(view: View) -> View:
    """Mark a view of the page.  A cookie authenticates its requests (app.page.login), and they may be forms."""
    view.is_page = True  # type: ignore[attr-defined]
    return view


def set_tenant(tenant: Tenant) -> None:
    """Set the tenant of this request, which the page has authenticated by its cookie."""
    _set_actor(tenant, "page")


def _set_actor(tenant: Tenant, interface: str) -> None:
    """Set the tenant of this request, and the actor for the audit log and the log."""
    g.tenant = tenant
    logs.bind_context(tenant=tenant.name)
    audit.set_actor(Actor(tenant.name, interface, request.environ.get("REMOTE_ADDR") or None))


def _reset_actor(_: BaseException | None) -> None:
    """Remove the actor: the next request of this thread may have another tenant."""
    audit.set_actor(audit.SYSTEM)
    logs.bind_context()


def current_tenant() -> Tenant:
    """Return the tenant of this request."""
    tenant = g.get("tenant")
    assert isinstance(tenant, Tenant), "a view without authentication has no tenant"
    return tenant


def visible_tenant() -> str | None:
    """Return the tenant whose jobs this request may see; None: those of all tenants."""
    tenant = current_tenant()
    return None if tenant.admin else tenant.name


def authorize() -> None:
    """Authorize this request before its view.  Raises ProblemError."""
    view = current_app.view_functions.get(request.endpoint or "")
    if view is None or getattr(view, "has_own_auth", False):
        return
    environ = request.environ
    if keys() is None:
        reject_remote(environ)
    if getattr(view, "public", False) or getattr(view, "is_page", False):
        return
    if getattr(view, "shows_metrics", False):
        if not _has_metrics_key(environ):
            _require_admin(_identify(environ))
        return
    method = environ["REQUEST_METHOD"]
    if method in _CHANGING_METHODS:
        reject_form_body(request)
    if method != "OPTIONS":  # Its response names the methods of a path, and nothing else.
        is_command_line = environ.get("HTTP_USER_AGENT") == _COMMAND_LINE
        _set_actor(_identify(environ), "command line" if is_command_line else "REST")


def _has_metrics_key(environ: Mapping[str, Any]) -> bool:
    key, sent_key = context().settings.metrics_key.encode(), read_bearer(environ).encode(errors="replace")
    return bool(key) and keys() is not None and compare_digest(sent_key, key)


def _identify(environ: Mapping[str, Any]) -> Tenant:
    """Return the tenant of a request.  Raises ProblemError 401."""
    cached_keys = keys()
    if cached_keys is None:
        return LOCAL_TENANT
    key = read_bearer(environ)
    tenant = cached_keys.tenant(key) if key else None
    if tenant is None:
        detail = "Send a valid key in the header: Authorization: Bearer sk_…"
        raise ProblemError(401, "unauthorized", "No valid key", detail)
    return tenant


def require_admin() -> None:
    """Refuse a request without an administrator's key.  For before_request.  Raises ProblemError 403."""
    if request.method != "OPTIONS":
        _require_admin(current_tenant())


def require_audit() -> None:
    """Refuse a request without the right to audit or to administer.  For before_request.  Raises ProblemError 403."""
    if request.method != "OPTIONS":
        tenant = current_tenant()
        if not tenant.audits:
            _require_admin(tenant)


def _require_admin(tenant: Tenant) -> None:
    if not tenant.admin:
        detail = "Send the key of a tenant that may administer, or that has the right to do this."
        raise ProblemError(403, "forbidden", "Not allowed", detail)


# -- without keys ------------------------------------------------------------------------------------------


def reject_remote(environ: Mapping[str, Any]) -> None:
    """Refuse requests from another machine, to a foreign host name, or from another site.  Raises ProblemError."""
    remote = environ.get("REMOTE_ADDR", "")
    if remote and not is_loopback(remote.partition("%")[0]):
        raise ProblemError(
            403, "not_local", "Not this machine", f"Without keys the API serves only this machine. {_KEYS}"
        )
    reject_forwarded(environ, remote)
    host = environ.get("HTTP_HOST", "")
    if not _is_own_host(host):
        detail = f"Without keys the Host header must name this machine, such as 127.0.0.1 or localhost. {_KEYS}"
        raise ProblemError(421, "wrong_host", "Wrong Host header", detail)
    if environ["REQUEST_METHOD"] in _CHANGING_METHODS and not _is_same_origin(environ, host):
        raise ProblemError(
            403,
            "cross_origin",
            "Sent by another site's page",
            f"Without keys the API refuses requests from other sites. {_KEYS}",
        )


def reject_forwarded(environ: Mapping[str, Any], remote: str) -> None:
    """Refuse a request that an untrusted proxy forwarded: its clients would count as this machine.

    Raises ProblemError.
    """
    variable = next(filter(_FORWARDED.fullmatch, environ), None)
    if variable is None:
        return
    if remote and context().settings.is_trusted_proxy(remote.partition("%")[0]):
        return
    header = variable.removeprefix("HTTP_").replace("_", "-").title()
    detail = (
        f"The header {header} shows that a proxy forwarded this request. Without keys each client of the proxy could "
        "administer: set SLOTKEEPER_REQUIRE_KEYS=true and create keys, or name the proxy in "
        "SLOTKEEPER_TRUSTED_PROXIES if only trusted clients can reach it."
    )
    raise ProblemError(403, "forwarded", "Forwarded by a proxy", detail)


def _is_own_host(host: str) -> bool:
    """Return whether the Host header names this machine."""
    name = _host_name(host)
    return name is not None and (is_loopback(name) or name in context().settings.own_hostnames)


@lru_cache(maxsize=64)
def _host_name(host: str) -> str | None:
    """Return the name in a Host header, without the port; None: it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return None


def _is_same_origin(environ: Mapping[str, Any], host: str) -> bool:
    """Return whether the request is from the same origin, or not from a browser: only browsers send an origin."""
    origin = environ.get("HTTP_ORIGIN")
    if origin is not None and origin.partition("://")[2] != host:
        return False
    return environ.get("HTTP_SEC_FETCH_SITE") in (None, "same-origin", "none")


def reject_form_body(request: Request) -> None:
    """Refuse a body that a form of another site could have sent.  Raises ProblemError 415."""
    if request.mimetype in _SAFE_TYPES:
        return
    if request.content_length or request.content_type or "HTTP_TRANSFER_ENCODING" in request.environ:
        detail = f"The body is {request.mimetype or 'of no known type'}; send JSON with Content-Type: application/json."
        raise ProblemError(415, "unsupported_media_type", "Not JSON", detail)
