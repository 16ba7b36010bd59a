"""Authentication and authorization of requests.

With keys (SLOTKEEPER_REQUIRE_KEYS), `Authorization: Bearer sk_…` names a tenant, and what the key may be used for: each
view has a scope (`blueprint(…, scope=…)` or `@scope`), or is marked as one that authorizes requests otherwise.

Without keys each client is LOCAL_IDENTITY.  Then only clients on this machine are served, and requests that a web page
in a browser on this machine could send are refused: those to a host name that was bound to 127.0.0.1 (DNS rebinding),
and those from another origin (CSRF).
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from hmac import compare_digest
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flask import Flask, Request, current_app, g, request

from app.auth.api_keys import KeyCache, read_bearer
from app.auth.session_cookie import SessionKeys
from app.config import AppSettings, is_loopback
from app.context import context
from app.problems import ProblemError
from routing.config import RoutingSettings
from slotkeeper import audit, logs
from slotkeeper.audit import Actor
from slotkeeper.db import Database
from slotkeeper.errors import NotFound, Unauthorized
from slotkeeper.registry.api_keys import ApiKeys, is_mistyped
from slotkeeper.registry.identity import LOCAL_IDENTITY, Identity, Scope, Tenant
from slotkeeper.registry.sessions import RevokedSessions
from slotkeeper.registry.tenants import OWN_TENANT, check_tenant_name

View = TypeVar("View", bound=Callable[..., object])

_COMMAND_LINE = "slotkeeper-cli"
"""The User-Agent of the command line.  Any client can send it, so it is only logged, and allows nothing."""
_EXTENSION = "slotkeeper_keys"
_MARKS = ("public", "has_own_auth", "shows_metrics", "is_page")  # of views that need no scope
_CHANGING_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_FORWARDED = re.compile(
    "HTTP_(FORWARDED|VIA|CDN_LOOP|X_(ORIGINAL_)?FORWARDED(_.*)?|X_REAL_IP|X_(CLUSTER_)?CLIENT_IP|X_AZURE_CLIENTIP"
    "|X_ENVOY_EXTERNAL_ADDRESS|(TRUE_CLIENT|CF_CONNECTING|FASTLY_CLIENT|FLY_CLIENT)_IP)"
)
# A page of another origin can send these only after a CORS preflight request, which the API never allows.
_SAFE_TYPES = frozenset({"application/json", "application/x-ndjson", "application/problem+json"})
_KEYS = "To serve others, set SLOTKEEPER_REQUIRE_KEYS=true and give them keys."


def key_cache() -> KeyCache | None:
    """Return the keys that this application accepts; None: it requires none."""
    return key_cache_of(current_app)


def key_cache_of(app: Flask) -> KeyCache | None:
    cache: KeyCache | None = app.extensions[_EXTENSION]
    return cache


def register(app: Flask) -> None:
    """Authorize each request to a view of `app`."""
    app.before_request(authorize)
    app.teardown_request(reset_actor)


def configure_access(app: Flask, settings: AppSettings, database: Database) -> None:
    """Set the keys that `app` accepts if it requires keys.  AssertionError: a view has neither a mark nor a scope."""
    for endpoint in app.view_functions:
        is_open = any(getattr(app.view_functions[endpoint], mark, False) for mark in _MARKS)
        assert is_open or scope_of(app, endpoint) is not None, f"the view {endpoint} has no scope"
    sessions = SessionKeys(settings.port, RevokedSessions(database))
    cache: KeyCache | None = None
    if settings.require_keys:
        refresh_s = RoutingSettings().catalog_refresh_s
        cache = KeyCache(ApiKeys(database), sessions, refresh_s, settings.metrics_key)
    app.extensions[_EXTENSION] = cache


def scope_of(app: Flask, endpoint: str) -> Scope | None:
    """Return the scope that a view requires: its own, or that of its blueprint."""
    own: Scope | None = getattr(app.view_functions[endpoint], "scope", None)
    return own or getattr(app.blueprints.get(endpoint.rpartition(".")[0]), "scope", None)


def scope(required: Scope) -> Callable[[View], View]:
    """Mark a view with the scope that it requires, in place of that of its blueprint."""

    def mark(view: View) -> View:
        view.scope = required  # type: ignore[attr-defined]
        return view

    return mark


def public(view: View) -> View:
    """Mark a view that requires no key, because it shows nothing confidential."""
    view.public = True  # type: ignore[attr-defined]
    return view


def own_auth(view: View) -> View:
    """Mark a view that authenticates requests itself, and serves clients on all machines."""
    view.has_own_auth = True  # type: ignore[attr-defined]
    return view


def metrics_access(view: View) -> View:
    """Mark a view that shows metrics of all tenants.  It requires the metrics key or the scope `operate`."""
    view.shows_metrics = True  # type: ignore[attr-defined]
    return view


def page_access(view: View) -> View:
    """Mark a view of the page.  A cookie authenticates its requests (app.page.login), and they may be forms."""
    view.is_page = True  # type: ignore[attr-defined]
    return view


def set_identity(identity: Identity) -> None:
    """Set who sends this request, whom the page has authenticated by its cookie."""
    g.identity = identity
    _set_actor(identity, request.environ, "page")


def _set_actor(identity: Identity, environ: Mapping[str, Any], interface: str) -> None:
    """Set the actor for the audit log and the log."""
    logs.bind_context(tenant=identity.tenant.name)
    audit.set_actor(Actor(identity.tenant.name, interface, environ.get("REMOTE_ADDR") or None))


def reset_actor(_: BaseException | None = None) -> None:
    """Remove the actor: the next request of this thread may have another tenant."""
    audit.set_actor(audit.SYSTEM)
    logs.bind_context()


def current_identity() -> Identity:
    """Return who sends this request."""
    identity = g.get("identity")
    assert isinstance(identity, Identity), "a view without authentication has no identity"
    return identity


def current_tenant() -> Tenant:
    """Return the tenant of this request."""
    return current_identity().tenant


def visible_tenant() -> str | None:
    """Return the tenant whose jobs this request may see; None: those of all tenants."""
    identity = current_identity()
    return None if identity.operates else identity.tenant.name


def visible_name(tenant: str) -> str:
    """Return the name of a tenant that this request may see; `me`: its own.  Raises InvalidRequest, NotFound."""
    identity = current_identity()
    name = identity.tenant.name if tenant == OWN_TENANT else check_tenant_name(tenant)
    if name != identity.tenant.name and not identity.operates:
        raise NotFound(f"There is no tenant {name!r}, or this key may not see it.", tenant=name)
    return name


def authorize() -> None:
    """Authorize this request before its view.  Raises ProblemError, Unauthorized, ScopeMissing."""
    endpoint, environ = request.endpoint or "", request.environ
    view, cache = current_app.view_functions.get(endpoint), key_cache()
    if view is None or getattr(view, "has_own_auth", False):
        return
    if cache is None:
        reject_remote(environ, context().settings)
    if getattr(view, "public", False) or getattr(view, "is_page", False):
        return
    if getattr(view, "shows_metrics", False):
        if not _has_metrics_key(environ):
            _identify(environ, cache).require(Scope.OPERATE)
        return
    method = environ["REQUEST_METHOD"]
    if method in _CHANGING_METHODS:
        reject_form_body(request)
    if method != "OPTIONS":  # Its response names the methods of a path, and nothing else.
        required = scope_of(current_app, endpoint)
        assert required is not None, "checked when the application was configured"
        g.identity = identify_sender(environ, cache, required)


def identify_sender(environ: Mapping[str, Any], cache: KeyCache | None, required: Scope) -> Identity:
    """Return who sends a request to a view that requires a scope, and set the actor for the audit log and the log.

    Raises Unauthorized, ScopeMissing.
    """
    identity = _identify(environ, cache)
    is_command_line = environ.get("HTTP_USER_AGENT") == _COMMAND_LINE
    _set_actor(identity, environ, "command line" if is_command_line else "REST")
    identity.require(required)
    return identity


def _has_metrics_key(environ: Mapping[str, Any]) -> bool:
    key, sent_key = context().settings.metrics_key.encode(), read_bearer(environ).encode(errors="replace")
    return bool(key) and key_cache() is not None and compare_digest(sent_key, key)


def _identify(environ: Mapping[str, Any], cache: KeyCache | None) -> Identity:
    """Return who sends a request.  Raises Unauthorized.  `cache` None: no keys are required."""
    if cache is None:
        return LOCAL_IDENTITY
    key = read_bearer(environ)
    identity = cache.find(key) if key else None
    if identity is None:
        detail = "Send a valid key in the header: Authorization: Bearer sk_…"
        if is_mistyped(key):
            detail = "The key is mistyped: its last characters do not fit the others. " + detail
        raise Unauthorized(detail)
    return identity


# -- without keys ------------------------------------------------------------------------------------------


def reject_remote(environ: Mapping[str, Any], settings: AppSettings) -> None:
    """Refuse requests from another machine, to a foreign host name, or from another site.  Raises ProblemError."""
    remote = environ.get("REMOTE_ADDR", "")
    if remote and not is_loopback(remote.partition("%")[0]):
        raise ProblemError(
            403, "not_local", "Not this machine", f"Without keys the API serves only this machine. {_KEYS}"
        )
    reject_forwarded(environ, remote, settings)
    host = environ.get("HTTP_HOST", "")
    if not _is_own_host(host, settings):
        detail = f"Without keys the Host header must name this machine, such as 127.0.0.1 or localhost. {_KEYS}"
        raise ProblemError(421, "wrong_host", "Wrong Host header", detail)
    if environ["REQUEST_METHOD"] in _CHANGING_METHODS and not _is_same_origin(environ, host):
        raise ProblemError(
            403,
            "cross_origin",
            "Sent by another site's page",
            f"Without keys the API refuses requests from other sites. {_KEYS}",
        )


def reject_forwarded(environ: Mapping[str, Any], remote: str, settings: AppSettings) -> None:
    """Refuse a request that an untrusted proxy forwarded: its clients would count as this machine.

    Raises ProblemError.
    """
    variable = next(filter(_is_forwarding, environ), None)
    if variable is None:
        return
    if remote and settings.is_trusted_proxy(remote.partition("%")[0]):
        return
    header = variable.removeprefix("HTTP_").replace("_", "-").title()
    detail = (
        f"The header {header} shows that a proxy forwarded this request. Without keys each client of the proxy could "
        "administer: set SLOTKEEPER_REQUIRE_KEYS=true and create keys, or name the proxy in "
        "SLOTKEEPER_TRUSTED_PROXIES if only trusted clients can reach it."
    )
    raise ProblemError(403, "forwarded", "Forwarded by a proxy", detail)


@lru_cache(maxsize=1024)
def _is_forwarding(variable: str) -> bool:
    """Return whether this variable of the WSGI environment is a header that a proxy adds."""
    return _FORWARDED.fullmatch(variable) is not None


def _is_own_host(host: str, settings: AppSettings) -> bool:
    """Return whether the Host header names this machine."""
    name = _host_name(host)
    return name is not None and (is_loopback(name) or name in settings.own_hostnames)


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
