"""The layout of every page, and the client that it is for: navigation, messages, tenant, theme, its form."""

from dataclasses import dataclass
from typing import Any

from flask import current_app, g, request
from werkzeug.datastructures import MultiDict

from app.auth import access, session_cookie
from app.auth.access import current_identity
from app.schemas.base import StateBody
from slotkeeper.registry.identity import Identity, Scope
from tasks.security.keyring import session_keys

# The messages after a form was submitted, by the value of `done` in the URL of the redirect.
MESSAGES = {
    "canceled": "The job is canceled.",
    "batch-paused": "It starts no more jobs; those that run continue.",
    "batch-resumed": "It goes on.",
    "batch-canceled": "Its waiting jobs are canceled; its running jobs end when their servers stop them.",
    "canceling": "The job ends when its server stops the run.",
    "retried": "The job is back at its place in the queue, with all retries available.",
    "changed": "Changed; all hosts apply it within two seconds.",
    "tested": "The test is being sent; see the result under the latest tries.",
    "enabled": "The webhook is enabled; it also gets the events that it missed.",
    "disabled": "The webhook is disabled; it gets no events until it is enabled.",
    "replayed": "The messages will be sent again.",
    "reset": "The breaker of the server is closed, and its cooldowns have ended.",
    "removed": "Removed.",
    "revoked": "The key is revoked.",
    "credited": "The transfer is stored.",
    "leaving": "The removal has started; it is done when the remaining jobs have ended.",
    "kept": "The removal is canceled.",
}
THEME_COOKIE = "slotkeeper_theme"
THEMES = ("light", "dark", "auto")


@dataclass(frozen=True, slots=True)
class NavItem:
    """An entry of the navigation, shown to keys with this scope.

    with_keys: only where keys are required.  of_tenants: not to those who operate, who find it elsewhere.
    """

    name: str
    path: str
    scope: Scope = Scope.OPERATE
    with_keys: bool = False
    of_tenants: bool = False

    @property
    def is_current(self) -> bool:
        """Whether the request is for this page or a page below it."""
        return request.path == self.path or (self.path != "/" and request.path.startswith(self.path + "/"))


NAVIGATION = (
    NavItem("Overview", "/", Scope.READ),
    NavItem("Jobs", "/page/jobs", Scope.READ),
    NavItem("Batches", "/page/batches", Scope.READ),
    NavItem("Servers", "/page/servers"),
    NavItem("Dead", "/page/dead", Scope.MANAGE),
    NavItem("Tenants", "/page/tenants"),
    NavItem("Keys", "/page/keys", Scope.KEYS, with_keys=True),
    NavItem("Usage", "/page/usage", Scope.READ, of_tenants=True),
    NavItem("Credits", "/page/credits", Scope.READ, of_tenants=True),
    NavItem("Webhooks", "/page/webhooks", Scope.READ),
    NavItem("Audit", "/page/audit", Scope.AUDIT),
    NavItem("Settings", "/page/settings"),
)


def template_values() -> dict[str, Any]:
    """Return the values that every template uses."""
    identity = current_identity() if is_logged_in() else None
    return {
        "identity": identity,
        "keys_required": keys_required(),
        "nav_items": [item for item in NAVIGATION if identity is not None and _is_shown(item, identity)],
        "theme": theme(),
        "form_token": form_token(),
        "message": _message_for(request.args.get("done", "")),
        "path": request.full_path.rstrip("?"),
        "version": current_app.extensions["slotkeeper_version"],
    }


def _is_shown(item: NavItem, identity: Identity) -> bool:
    is_elsewhere = (item.with_keys and not keys_required()) or (item.of_tenants and identity.operates)
    return identity.may(item.scope) and not is_elsewhere


def _message_for(code: str) -> str | None:
    """Return the message for the value of `done` in the URL; None for an unknown value."""
    if code in MESSAGES:
        return MESSAGES[code]
    number, _, rest = code.partition("-")
    if rest in ("retried", "left") and number.isdecimal() and len(number) < 7:
        more = "  More jobs are dead; retry all again." if rest == "left" else ""
        jobs = "1 job is" if number == "1" else f"{number} jobs are"
        return f"{jobs} back in the queue.{more}"
    return None


def keys_required() -> bool:
    return access.key_cache() is not None


def is_logged_in() -> bool:
    """Return whether it is known who sends the request."""
    return getattr(g, "identity", None) is not None


def theme() -> str:
    """Return the theme that was chosen in this browser."""
    chosen = request.cookies.get(THEME_COOKIE, "")
    return chosen if chosen in THEMES else "auto"


def form_token() -> str:
    """Return the token that each form of this session sends."""
    return session_cookie.form_token(g.session, next(session_keys()))


def form() -> MultiDict[str, str]:
    """Return the fields of the submitted form."""
    return request.form


def state_body() -> StateBody:
    """Return the state and the reason of the submitted form.  Raises ValidationError."""
    return StateBody.model_validate({"state": form().get("state"), "reason": form().get("reason") or None})
