"""The client of the page: its rights, its theme, and the form that it sent."""

from flask import g, request
from werkzeug.datastructures import MultiDict

from app.auth import access, session_cookie
from app.auth.access import current_tenant
from app.schemas.base import StateBody
from tasks.security.keyring import session_keys

THEME_COOKIE = "slotkeeper_theme"
THEMES = ("light", "dark", "auto")


def keys_required() -> bool:
    return access.keys() is not None


def is_logged_in() -> bool:
    """Return whether the request has a tenant."""
    return getattr(g, "flask_httpauth_user", None) is not None


def may_audit() -> bool:
    return current_tenant().admin or current_tenant().audits


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
