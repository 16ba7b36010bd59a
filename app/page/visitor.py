"""Who looks at the page, what they may see, and what their form says."""

from flask import g, request
from werkzeug.datastructures import MultiDict

from app.auth import access, session_cookie
from app.auth.access import current_tenant
from app.schemas.job_schemas import StateBody
from tasks.security.keyring import session_keys

THEME_COOKIE = "slotkeeper_theme"
THEMES = ("light", "dark", "auto")


def keys_required() -> bool:
    return access.keys() is not None


def is_logged_in() -> bool:
    """Whether it is known who asks."""
    return getattr(g, "flask_httpauth_user", None) is not None


def may_audit() -> bool:
    return current_tenant().admin or current_tenant().audits


def theme() -> str:
    """The colours that were chosen in this browser."""
    chosen = request.cookies.get(THEME_COOKIE, "")
    return chosen if chosen in THEMES else "auto"


def form_token() -> str:
    """What a form of this visit brings along."""
    return session_cookie.form_token(g.visit, next(session_keys()))


def form() -> MultiDict[str, str]:
    """What the form of this request says."""
    return request.form


def state_body() -> StateBody:
    """What a form with a state and a reason says.  Raises ValidationError."""
    return StateBody.model_validate({"state": form().get("state"), "reason": form().get("reason") or None})
