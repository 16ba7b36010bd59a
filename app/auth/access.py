"""Who may come in.

With keys (SLOTKEEPER_REQUIRE_KEYS): `Authorization: Bearer sk_…` names a tenant; /admin asks for one that may
administer.  Without keys everybody is the tenant LOCAL, so only this machine is served, and nothing that a web
page in this machine's browser could send: neither to a name that was bound to 127.0.0.1 (DNS rebinding), nor
from another origin (CSRF).
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
from app.context import application, asked
from app.problems import ProblemError, problem_response
from slotkeeper import audit, logs
from slotkeeper.audit import Actor
from slotkeeper.registry.tenants import LOCAL_TENANT, Tenant, Tenants, hash_key

View = TypeVar("View", bound=Callable[..., object])

ADMIN, AUDIT = "admin", "audit"
_COMMAND_LINE = "slotkeeper-cli"
"""What the command line calls itself; anybody can, so it says by which door somebody came, and opens none."""
_EXTENSION = "slotkeeper_keys"
_MOST_CACHED = 4096
_CHANGES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_FORWARDED = re.compile(
    "HTTP_(FORWARDED|VIA|CDN_LOOP|X_(ORIGINAL_)?FORWARDED(_.*)?|X_REAL_IP|X_(CLUSTER_)?CLIENT_IP|X_AZURE_CLIENTIP"
    "|X_ENVOY_EXTERNAL_ADDRESS|(TRUE_CLIENT|CF_CONNECTING|FASTLY_CLIENT|FLY_CLIENT)_IP)"
)
# A page of another origin cannot send these without asking first, which nobody here answers.
_SAFE_TYPES = frozenset({"application/json", "application/x-ndjson", "application/problem+json"})


class _Bearer(HTTPTokenAuth):
    """Flask-HTTPAuth's token scheme, for which everybody is LOCAL while no keys are asked for."""

    def authenticate(self, auth: Any, stored_password: Any) -> Any:
        return LOCAL_TENANT if keys() is None else super().authenticate(auth, stored_password)


_scheme = _Bearer("Bearer", realm="slotkeeper")


def keys() -> "Keys | None":
    """Of this application; None: it asks for none."""
    found: Keys | None = application().extensions[_EXTENSION]
    return found


def _settings() -> AppSettings:
    found: AppSettings = application().extensions["slotkeeper_settings"]
    return found


class Keys:
    """Looks keys up, and remembers the answers for a moment.  Safe between threads."""

    def __init__(self, tenants: Tenants, cache_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._tenants = tenants
        self._cache_s = cache_s
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, Tenant | None]] = {}

    def tenant(self, key: str) -> Tenant | None:
        """Return the tenant of a key, or None.  Raises DatabaseUnavailable."""
        return self.of_hashed(hash_key(key))

    def of_hashed(self, hashed: str) -> Tenant | None:
        """Return the tenant whose key has this hash, or None.  Raises DatabaseUnavailable."""
        now = self._clock()
        known = self._known.get(hashed)
        if known is not None and now < known[0]:
            return known[1]
        found = self._tenants.find_by_hash(hashed)
        with self._lock:
            if len(self._known) >= _MOST_CACHED:
                self._known.clear()  # Somebody tries keys out; the good ones are soon back.
            self._known[hashed] = (now + self._cache_s, found)
        return found


def register(app: Flask) -> None:
    """Stand before every view of `app`, but for those marked as public."""
    app.before_request(authorize)
    app.teardown_request(_reset_actor)


def configure_access(app: Flask, settings: AppSettings, tenants: Tenants) -> None:
    """Say whose keys open `app`, where it asks for keys."""
    app.extensions[_EXTENSION] = Keys(tenants, settings.key_cache_s) if settings.require_keys else None
    app.extensions["slotkeeper_settings"] = settings


def public(view: View) -> View:
    """Mark a view that asks for no key: it shows nothing."""
    view.public = True  # type: ignore[attr-defined]
    return view


def own_auth(view: View) -> View:
    """Mark a view that asks for something else than a key, and may be asked from anywhere."""
    view.own_guard = True  # type: ignore[attr-defined]
    return view


def metrics_access(view: View) -> View:
    """Mark a view that shows figures of all tenants: the metrics key opens it, as an administrator's does."""
    view.figures = True  # type: ignore[attr-defined]
    return view


def page_access(view: View) -> View:
    """Mark a view of the page: who asks is found by its cookie (app.page.login), and forms may be sent."""
    view.for_people = True  # type: ignore[attr-defined]
    return view


def set_tenant(whose: Tenant) -> None:
    """This request is that tenant's, as something else than a key has shown."""
    _set_actor(whose, "page")


def _set_actor(whose: Tenant, door: str) -> None:
    """Whatever this request changes is noted as done by them, and its lines in the log say whose it is."""
    g.flask_httpauth_user = whose
    logs.bind_context(tenant=whose.name)
    audit.set_actor(Actor(whose.name, door, asked().environ.get("REMOTE_ADDR") or None))


def _reset_actor(_: BaseException | None) -> None:
    """The next request of this thread is somebody else's."""
    audit.set_actor(audit.SYSTEM)
    logs.bind_context()


def current_tenant() -> Tenant:
    """Whose request this is."""
    found = g.get("flask_httpauth_user")
    assert isinstance(found, Tenant), "only views behind the guard know a tenant"
    return found


def authorize() -> Response | None:
    seen = asked()
    view = application().view_functions.get(seen.endpoint or "")
    if view is None or getattr(view, "own_guard", False):
        return None
    environ, is_open = seen.environ, keys() is None
    if is_open:
        reject_remote(environ)
    if getattr(view, "public", False) or getattr(view, "for_people", False):
        return None
    if getattr(view, "figures", False):
        return None if _has_metrics_key() else require_admin()
    method = environ["REQUEST_METHOD"]
    if method in _CHANGES:
        reject_form_body(seen)
    refused: Response | None = None if is_open else _identify()
    if refused is None and method != "OPTIONS":  # which nobody needs a key for
        whose = LOCAL_TENANT if is_open else current_tenant()
        _set_actor(whose, "command line" if environ.get("HTTP_USER_AGENT") == _COMMAND_LINE else "REST")
    return refused


def _has_metrics_key() -> bool:
    key = _settings().metrics_key.encode()
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    is_bearer = scheme.lower() == "bearer"
    return bool(key) and keys() is not None and is_bearer and compare_digest(shown.encode(errors="replace"), key)


@_scheme.login_required
def _identify() -> None:
    """Let Flask-HTTPAuth read the header and remember the tenant."""


def require_admin() -> Response | None:
    """For before_request of what only administrators may do."""
    refused: Response | None = _identify_admin()
    return refused


@_scheme.login_required(role=ADMIN)
def _identify_admin() -> None:
    """As _identify, of one who may administer."""


def require_audit() -> Response | None:
    """For before_request of what only those may see who have the right to audit, or administer."""
    refused: Response | None = _identify_auditor()
    return refused


@_scheme.login_required(role=AUDIT)
def _identify_auditor() -> None:
    """As _identify, of one who may see who did what."""


@_scheme.verify_token
def _verify(key: str) -> Tenant | None:
    known = keys()
    return None if known is None else known.tenant(key)


@_scheme.get_user_roles
def _roles(user: Tenant) -> list[str]:
    return [ADMIN, AUDIT] if user.admin else [AUDIT] if user.audits else []


@_scheme.error_handler
def _refused(status: int) -> Response:
    if status == 403:
        detail = "Send the key of a tenant that may administer, or that has the right to do this."
        return problem_response(403, "forbidden", "Not allowed", detail)
    detail = "Send a valid key in the header: Authorization: Bearer sk_…"
    return problem_response(401, "unauthorized", "No valid key", detail)


# -- without keys ------------------------------------------------------------------------------------------


def reject_remote(environ: Mapping[str, Any]) -> None:
    """Only this machine, under a name that only it has, and no web page but our own."""
    remote = environ.get("REMOTE_ADDR", "")
    if remote and not is_loopback(remote.partition("%")[0]):
        raise ProblemError(
            403, "not_local", "Not this machine", f"Without keys the API serves only this machine. {_KEYS}"
        )
    reject_forwarded(environ, remote)
    host = environ.get("HTTP_HOST", "")
    if not _is_own(host):
        detail = f"Without keys the Host header must name this machine, such as 127.0.0.1 or localhost. {_KEYS}"
        raise ProblemError(421, "wrong_host", "Wrong Host header", detail)
    if environ["REQUEST_METHOD"] in _CHANGES and not _is_same_origin(environ, host):
        raise ProblemError(
            403,
            "cross_origin",
            "Sent by another site's page",
            f"Without keys the API refuses requests from other sites. {_KEYS}",
        )


_KEYS = "To serve others, set SLOTKEEPER_REQUIRE_KEYS=true and give them keys."


def reject_forwarded(environ: Mapping[str, Any], remote: str) -> None:
    """A proxy on this machine makes whoever reaches it look like this machine."""
    told = next(filter(_FORWARDED.fullmatch, environ), None)
    if told is None:
        return
    if remote and _settings().is_trusted_proxy(remote.partition("%")[0]):
        return
    header = told.removeprefix("HTTP_").replace("_", "-").title()
    detail = (
        f"The header {header} shows that a proxy forwarded this request. Without keys each client of the proxy could "
        "administer: set SLOTKEEPER_REQUIRE_KEYS=true and create keys, or name the proxy in "
        "SLOTKEEPER_TRUSTED_PROXIES if only trusted clients can reach it."
    )
    raise ProblemError(403, "forwarded", "Forwarded by a proxy", detail)


def _is_own(host: str) -> bool:
    name = _name_in(host)
    return name is not None and (is_loopback(name) or name in _settings().own_hostnames)


@lru_cache(maxsize=64)
def _name_in(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return None


def _is_same_origin(environ: Mapping[str, Any], host: str) -> bool:
    """Browsers name the origin of whatever changes something; other clients name none."""
    origin = environ.get("HTTP_ORIGIN")
    if origin is not None and origin.partition("://")[2] != host:
        return False
    return environ.get("HTTP_SEC_FETCH_SITE") in (None, "same-origin", "none")


def reject_form_body(seen: Request) -> None:
    """415 for a body that a form could have sent."""
    if seen.mimetype in _SAFE_TYPES:
        return
    if seen.content_length or seen.content_type or "HTTP_TRANSFER_ENCODING" in seen.environ:
        detail = f"The body is {seen.mimetype or 'of no known type'}; send JSON with Content-Type: application/json."
        raise ProblemError(415, "unsupported_media_type", "Not JSON", detail)
