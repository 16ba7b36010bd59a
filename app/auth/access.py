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

from flask import Flask, Request, Response, g, request
from flask_httpauth import HTTPTokenAuth

from app.config import AppSettings, is_loopback
from app.context import application, current_request
from app.problems import ProblemError, problem_response
from slotkeeper import audit, logs
from slotkeeper.audit import Actor
from slotkeeper.registry.tenants import LOCAL_TENANT, Tenant, Tenants, hash_key

View = TypeVar("View", bound=Callable[..., object])

ADMIN, AUDIT = "admin", "audit"
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


class _Bearer(HTTPTokenAuth):
    """Flask-HTTPAuth's token scheme.  Each client is LOCAL_TENANT if no keys are required."""

    def authenticate(self, auth: Any, stored_password: Any) -> Any:
        return LOCAL_TENANT if keys() is None else super().authenticate(auth, stored_password)


_scheme = _Bearer("Bearer", realm="slotkeeper")


def keys() -> "Keys | None":
    """Return the keys of this application; None: it requires none."""
    cached_keys: Keys | None = application().extensions[_EXTENSION]
    return cached_keys


def _settings() -> AppSettings:
    settings: AppSettings = application().extensions["slotkeeper_settings"]
    return settings


class Keys:
    """Finds the tenants of keys, and caches them for `cache_s` seconds.  Thread-safe."""

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
    """Set the settings of `app`, and the tenants whose keys it accepts if it requires keys."""
    app.extensions[_EXTENSION] = Keys(tenants, settings.key_cache_s) if settings.require_keys else None
    app.extensions["slotkeeper_settings"] = settings


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
    g.flask_httpauth_user = tenant
    logs.bind_context(tenant=tenant.name)
    audit.set_actor(Actor(tenant.name, interface, current_request().environ.get("REMOTE_ADDR") or None))


def _reset_actor(_: BaseException | None) -> None:
    """Remove the actor: the next request of this thread may have another tenant."""
    audit.set_actor(audit.SYSTEM)
    logs.bind_context()


def current_tenant() -> Tenant:
    """Return the tenant of this request."""
    tenant = g.get("flask_httpauth_user")
    assert isinstance(tenant, Tenant), "a view without authentication has no tenant"
    return tenant


def visible_tenant() -> str | None:
    """Return the tenant whose jobs this request may see; None: those of all tenants."""
    tenant = current_tenant()
    return None if tenant.admin else tenant.name


def authorize() -> Response | None:
    """Authorize this request before its view.  Return the refusal, or None.  Raises ProblemError."""
    request = current_request()
    view = application().view_functions.get(request.endpoint or "")
    if view is None or getattr(view, "has_own_auth", False):
        return None
    environ, requires_key = request.environ, keys() is not None
    if not requires_key:
        reject_remote(environ)
    if getattr(view, "public", False) or getattr(view, "is_page", False):
        return None
    if getattr(view, "shows_metrics", False):
        return None if _has_metrics_key() else require_admin()
    method = environ["REQUEST_METHOD"]
    if method in _CHANGING_METHODS:
        reject_form_body(request)
    refusal: Response | None = _identify() if requires_key else None
    if refusal is None and method != "OPTIONS":  # Flask-HTTPAuth authenticates no OPTIONS request.
        tenant = current_tenant() if requires_key else LOCAL_TENANT
        _set_actor(tenant, "command line" if environ.get("HTTP_USER_AGENT") == _COMMAND_LINE else "REST")
    return refusal


def _has_metrics_key() -> bool:
    key = _settings().metrics_key.encode()
    scheme, _, sent_key = request.headers.get("Authorization", "").partition(" ")
    is_bearer = scheme.lower() == "bearer"
    return bool(key) and keys() is not None and is_bearer and compare_digest(sent_key.encode(errors="replace"), key)


@_scheme.login_required
def _identify() -> None:
    """Let Flask-HTTPAuth read the header and store the tenant in `g`."""


def require_admin() -> Response | None:
    """Return the refusal of a request without an administrator's key, or None.  For before_request."""
    refusal: Response | None = _identify_admin()
    return refusal


@_scheme.login_required(role=ADMIN)
def _identify_admin() -> None:
    """As _identify, and require an administrator."""


def require_audit() -> Response | None:
    """Return the refusal of a request without the right to audit or to administer, or None.  For before_request."""
    refusal: Response | None = _identify_auditor()
    return refusal


@_scheme.login_required(role=AUDIT)
def _identify_auditor() -> None:
    """As _identify, and require the right to audit."""


@_scheme.verify_token
def _verify(key: str) -> Tenant | None:
    cached_keys = keys()
    return None if cached_keys is None else cached_keys.tenant(key)


@_scheme.get_user_roles
def _roles(user: Tenant) -> list[str]:
    return [ADMIN, AUDIT] if user.admin else [AUDIT] if user.audits else []


@_scheme.error_handler
def _refusal(status: int) -> Response:
    if status == 403:
        detail = "Send the key of a tenant that may administer, or that has the right to do this."
        return problem_response(403, "forbidden", "Not allowed", detail)
    detail = "Send a valid key in the header: Authorization: Bearer sk_…"
    return problem_response(401, "unauthorized", "No valid key", detail)


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


_KEYS = "To serve others, set SLOTKEEPER_REQUIRE_KEYS=true and give them keys."


def reject_forwarded(environ: Mapping[str, Any], remote: str) -> None:
    """Refuse a request that an untrusted proxy forwarded: its clients would count as this machine.

    Raises ProblemError.
    """
    variable = next(filter(_FORWARDED.fullmatch, environ), None)
    if variable is None:
        return
    if remote and _settings().is_trusted_proxy(remote.partition("%")[0]):
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
    return name is not None and (is_loopback(name) or name in _settings().own_hostnames)


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
