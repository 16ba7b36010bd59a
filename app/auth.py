"""Who may come in.

With keys (SLOTKEEPER_REQUIRE_KEYS): `Authorization: Bearer sk_…` names a tenant; /admin asks for one that may
administer.  Without keys everybody is the tenant LOCAL, so only this machine is served, and nothing that a web
page in this machine's browser could send: neither to a name that was bound to 127.0.0.1 (DNS rebinding), nor
from another origin (CSRF).
"""

import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flask import Flask, Response, current_app, request
from flask_httpauth import HTTPTokenAuth

from app.config import AppSettings, is_loopback
from app.errors import ProblemError, problem
from jobs.tenants import LOCAL, Tenant, Tenants, hash_key

View = TypeVar("View", bound=Callable[..., object])

ADMIN = "admin"
_EXTENSION = "slotkeeper_keys"
_MOST_CACHED = 4096
_CHANGES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_FORWARDED = re.compile(
    r"forwarded|via|x-(original-)?forwarded(-.*)?|x-real-ip|x-(cluster-)?client-ip|(true-client|cf-connecting)-ip",
    re.IGNORECASE,
)
# A page of another origin cannot send these without asking first, which nobody here answers.
_SAFE_TYPES = frozenset({"application/json", "application/x-ndjson", "application/problem+json"})


class _Bearer(HTTPTokenAuth):
    """Flask-HTTPAuth's token scheme, for which everybody is LOCAL while no keys are asked for."""

    def authenticate(self, auth: Any, stored_password: Any) -> Any:
        return LOCAL if _keys() is None else super().authenticate(auth, stored_password)


_scheme = _Bearer("Bearer", realm="slotkeeper")


def _keys() -> "Keys | None":
    keys: Keys | None = current_app.extensions[_EXTENSION]
    return keys


class Keys:
    """Looks keys up, and remembers the answers for a moment.  Safe between threads."""

    def __init__(self, tenants: Tenants, cache_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._tenants = tenants
        self._cache_s = cache_s
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, Tenant | None]] = {}

    def tenant(self, key: str) -> Tenant | None:
        """Whose key it is; None: nobody's.  Raises RecordUnavailable."""
        name, now = hash_key(key), self._clock()
        known = self._known.get(name)
        if known is not None and now < known[0]:
            return known[1]
        found = self._tenants.by_key(key)
        with self._lock:
            if len(self._known) >= _MOST_CACHED:
                self._known.clear()  # Somebody tries keys out; the good ones are soon back.
            self._known[name] = (now + self._cache_s, found)
        return found


def register(app: Flask, settings: AppSettings, tenants: Tenants) -> None:
    """Stand before every view of `app`, but for those marked as public."""
    app.extensions[_EXTENSION] = Keys(tenants, settings.key_cache_s) if settings.require_keys else None
    app.extensions["slotkeeper_settings"] = settings
    app.before_request(_guard)


def public(view: View) -> View:
    """Mark a view that asks for no key: it shows nothing."""
    view.public = True  # type: ignore[attr-defined]
    return view


def guards_itself(view: View) -> View:
    """Mark a view that asks for something else than a key, and may be asked from anywhere."""
    view.own_guard = True  # type: ignore[attr-defined]
    return view


def tenant() -> Tenant:
    """Whose request this is."""
    found = _scheme.current_user()
    assert isinstance(found, Tenant), "only views behind the guard know a tenant"
    return found


def _guard() -> Response | None:
    view = current_app.view_functions.get(request.endpoint or "")
    if view is None or getattr(view, "own_guard", False):
        return None
    if _keys() is None:
        _refuse_strangers()
    if getattr(view, "public", False):
        return None
    if request.method in _CHANGES:
        _refuse_forms()
    refused: Response | None = _identify()
    return refused


@_scheme.login_required
def _identify() -> None:
    """Let Flask-HTTPAuth read the header and remember the tenant."""


@_scheme.login_required(role=ADMIN)
def require_admin() -> None:
    """For before_request of what only administrators may do."""


@_scheme.verify_token
def _verify(key: str) -> Tenant | None:
    keys = _keys()
    return None if keys is None else keys.tenant(key)


@_scheme.get_user_roles
def _roles(user: Tenant) -> list[str]:
    return [ADMIN] if user.admin else []


@_scheme.error_handler
def _refused(status: int) -> Response:
    if status == 403:
        detail = "This needs the key of a tenant that may administer."
        return problem(403, "forbidden", "Not allowed", detail)
    detail = "Send a valid key in the header: Authorization: Bearer sk_…"
    return problem(401, "unauthorized", "No valid key", detail)


# -- without keys ------------------------------------------------------------------------------------------


def _refuse_strangers() -> None:
    """Only this machine, under a name that only it has, and no web page but our own."""
    remote = request.environ.get("REMOTE_ADDR", "")
    if remote and not is_loopback(remote.partition("%")[0]):
        raise ProblemError(403, "not_local", "Not this machine", f"Without keys only this machine is served. {_KEYS}")
    _refuse_forwarded(remote)
    host = request.environ.get("HTTP_HOST", "")
    if not _is_own(host):
        detail = f"Without keys the Host header must name this machine, such as 127.0.0.1 or localhost. {_KEYS}"
        raise ProblemError(421, "wrong_host", "Not a name of this machine", detail)
    if request.method in _CHANGES and not _is_same_origin(host):
        raise ProblemError(403, "cross_origin", "Sent by another site's page", f"Without keys this is refused. {_KEYS}")


_KEYS = "To serve others, set SLOTKEEPER_REQUIRE_KEYS=true and give them keys."


def _refuse_forwarded(remote: str) -> None:
    """A proxy on this machine makes whoever reaches it look like this machine."""
    told = next((name for name, _ in request.headers if _FORWARDED.fullmatch(name)), None)
    settings: AppSettings = current_app.extensions["slotkeeper_settings"]
    if told is None or (remote and settings.is_proxy(remote.partition("%")[0])):
        return
    detail = (
        f"The header {told} says that a proxy has passed this on, and without keys everybody behind it would "
        "administer: set SLOTKEEPER_REQUIRE_KEYS=true and give out keys, or name the proxy in "
        "SLOTKEEPER_TRUSTED_PROXIES if it lets in only whom you trust."
    )
    raise ProblemError(403, "forwarded", "Passed on by a proxy", detail)


def _is_own(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    settings: AppSettings = current_app.extensions["slotkeeper_settings"]
    return is_loopback(name) or name in settings.own_names


def _is_same_origin(host: str) -> bool:
    """Browsers name the origin of whatever changes something; other clients name none."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != host:
        return False
    return request.headers.get("Sec-Fetch-Site") in (None, "same-origin", "none")


def _refuse_forms() -> None:
    """415 for a body that a form could have sent."""
    if request.mimetype in _SAFE_TYPES:
        return
    if request.content_length or request.content_type or "HTTP_TRANSFER_ENCODING" in request.environ:
        detail = f"The body is {request.mimetype or 'of no known type'}; send JSON with Content-Type: application/json."
        raise ProblemError(415, "unsupported_media_type", "Not JSON", detail)
