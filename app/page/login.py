"""Log-in, sessions and form tokens of the page.

If keys are required, a session begins with a log-in.  Otherwise each client is LOCAL_IDENTITY, as in the API, and the
session only protects the forms.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import quote

from flask import Blueprint, Flask, Request, Response, g, redirect, request
from pydantic import ValidationError
from werkzeug.exceptions import HTTPException

from app import problems
from app.auth import access, session_cookie
from app.auth.access import current_identity, page_access, set_identity
from app.auth.session_cookie import Session
from app.config import MAX_FORM_BYTES
from app.context import context
from app.page.layout import THEME_COOKIE, THEMES, form, is_logged_in
from app.page.rendering import render_page
from app.problems import ProblemError
from app.request_json import reject_nul_in
from slotkeeper.clock import now_ms
from slotkeeper.errors import NotFound, SlotkeeperError
from slotkeeper.registry.api_keys import hash_key
from slotkeeper.registry.identity import LOCAL_IDENTITY, Scope
from slotkeeper.registry.sessions import RevokedSessions
from tasks.config import TaskSettings
from tasks.security.keyring import session_keys
from tasks.services import database

V = TypeVar("V", bound=Callable[..., Any])

LOG_IN = "/page/log-in"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_MAX_FIELDS = 2000

page = Blueprint("page", "app.page")


class PageError(Exception):
    """The client may not do this, or has to do something else first.  Shown as an error page."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.title, self.detail = status, title, detail


def page_view(
    rule: str, scope: Scope = Scope.READ, *, method: str = "GET", open_to_all: bool = False
) -> Callable[[V], V]:
    """Register a view of the page at the URL rule, for keys with this scope.  open_to_all: also without a log-in."""

    def register(view: V) -> V:
        @wraps(view)
        def guarded(**path: Any) -> Any:
            if not open_to_all and not is_logged_in():
                return redirect(_log_in_url(request), 303)
            if not open_to_all and not current_identity().may(scope):
                raise PageError(403, "Not allowed", f"Log in with a key that has the scope {scope.value}.")
            return view(**path)

        page.add_url_rule(rule, view.__name__, page_access(guarded), methods=[method])
        return view

    return register


def _log_in_url(blocked: Request) -> str:
    """Return the URL of the log-in, which then redirects to the requested page."""
    path = blocked.full_path.rstrip("?")
    return LOG_IN if blocked.method != "GET" or path == "/" else f"{LOG_IN}?next={quote(path)}"


def register(app: Flask) -> None:
    app.register_blueprint(page)


# -- each request ------------------------------------------------------------------------------------------


@page.before_request
def _begin_request() -> None:
    request.max_form_parts, request.max_content_length = _MAX_FIELDS, MAX_FORM_BYTES
    session = session_cookie.decode_session(request.cookies.get(_cookie(), ""), session_keys())
    if session is not None and session.key_hash and RevokedSessions(database()).is_revoked(session.id):
        session = None
    g.session = session or session_cookie.new_session("", context().settings.session_s)
    g.is_new_session = session is None
    _identify(g.session)
    if request.method not in _SAFE:
        _refuse_foreign_forms(g.session)
        for field, texts in form().lists():
            reject_nul_in(field, *texts)


def _identify(session: Session) -> None:
    """Set who sends the request, if the session has a valid key or no keys are required."""
    cache = access.key_cache()
    identity = LOCAL_IDENTITY if cache is None else cache.find_hashed(session.key_hash) if session.key_hash else None
    if identity is not None:
        set_identity(identity)


def _refuse_foreign_forms(session: Session) -> None:
    """Refuse a form without the token of this session, which other sites cannot know.  Raises PageError."""
    if g.is_new_session or not session_cookie.is_valid_form_token(form().get("token", ""), session, session_keys()):
        detail = "This form is too old or from another session.  Go back, reload the page, and try again."
        raise PageError(403, "Form not valid", detail)


@page.after_request
def _finish_response(response: Response) -> Response:
    if g.get("is_new_session") and request.endpoint != "page.asset":
        _set_session_cookie(response, g.session)
    if request.endpoint != "page.asset":
        response.headers["Cache-Control"] = "no-store"
    response.headers["Referrer-Policy"] = "same-origin"
    return response


def _set_session_cookie(response: Response, session: Session) -> None:
    value, max_age_s = session_cookie.encode_session(session, next(session_keys())), context().settings.session_s
    _set_cookie(response, _cookie(), value, max_age_s)


def _set_cookie(response: Response, name: str, value: str, max_age_s: int) -> None:
    secure = TaskSettings().callback_base.startswith("https://")
    response.set_cookie(name, value, max_age_s, httponly=True, samesite="Strict", secure=secure, path="/")


def _cookie() -> str:
    return session_cookie.cookie_name(context().settings.port)


# -- log-in, log-out and theme -----------------------------------------------------------------------------


@page_view(LOG_IN, open_to_all=True)
def log_in_form() -> Any:
    next_path = own_path(request.args.get("next", "/"))
    if is_logged_in():
        return redirect(next_path, 303)
    return render_page("log_in.html", error="", next=next_path)


@page_view(LOG_IN, method="POST", open_to_all=True)
def log_in() -> Any:
    cache = access.key_cache()
    if cache is None:
        return redirect("/", 303)
    hashed, next_path = hash_key(form().get("key", "").strip()), own_path(form().get("next", "/"))
    if cache.find_hashed(hashed) is None:
        return render_page("log_in.html", 401, error="No tenant has this key.", next=next_path), 401
    g.session, g.is_new_session = session_cookie.new_session(hashed, context().settings.session_s), True
    return redirect(next_path, 303)


@page_view("/page/log-out", method="POST", open_to_all=True)
def log_out() -> Any:
    """End the session, also for copies of its cookie.  Raises DatabaseUnavailable; then the session continues."""
    if g.session.key_hash:
        RevokedSessions(database()).revoke(g.session.id, g.session.until_ms, now_ms())
    g.session, g.is_new_session = session_cookie.new_session("", context().settings.session_s), True
    return redirect(LOG_IN, 303)


@page_view("/page/theme", method="POST", open_to_all=True)
def choose_theme() -> Any:
    chosen = form().get("theme", "")
    response = redirect(own_path(form().get("back", "/")), 303)
    if chosen in THEMES:
        _set_cookie(response, THEME_COOKIE, chosen, 366 * 86_400)  # type: ignore[arg-type]
    return response


def own_path(path: str) -> str:
    """Return the path if it is on this site, otherwise "/": a redirect must not lead to another site."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_own else "/"


# -- errors ------------------------------------------------------------------------------------------------


@page.errorhandler(Exception)
def _handle_error(error: Exception) -> Any:
    """Return the error page with the status, title and detail that the API would return."""
    if "session" not in g:  # The request was refused before `_begin_request` ran.
        g.session, g.is_new_session = session_cookie.new_session("", context().settings.session_s), False
    if isinstance(error, PageError):
        return _error_page(error.status, error.title, error.detail)
    if isinstance(error, HTTPException) and (error.code is None or error.code < 400):
        return error
    return _error_page(*problem_of(error))


def problem_of(error: Exception) -> tuple[int, str, str]:
    """Return (status, title, detail) of an error, as the API reports it."""
    problem = problems.problem_for(error)
    assert isinstance(problem, Response), "an HTTPException that is no error is handled before"
    body = problem.get_json()
    return problem.status_code, body["title"], body["detail"]


def _error_page(status: int, title: str, detail: str) -> Any:
    return render_page("error.html", status, status=status, title=title, detail=detail), status


def run_or_ask_again(action: Callable[[], Any], ask_again: Callable[[str], Any]) -> Any:
    """Return the response of the action; if the API refuses it, return the form with the message of the API."""
    try:
        return action()
    except NotFound:
        raise
    except (SlotkeeperError, ValidationError, ProblemError) as error:
        status, _, detail = problem_of(error)
        response = ask_again(detail)
        response.status_code = status
        return response


def is_checked(name: str) -> bool:
    return form().get(name) == "yes"
