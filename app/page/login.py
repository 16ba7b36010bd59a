"""Log-in, sessions and form tokens of the page.

With keys a visit begins with a log-in.  Without them everybody is LOCAL, as at the API, and a visit is there for the
forms alone.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import quote

from flask import Blueprint, Flask, Request, Response, current_app, g, redirect, request
from werkzeug.exceptions import HTTPException

from app import problems
from app.auth import access, session_cookie
from app.auth.access import current_tenant, page_access, set_tenant
from app.auth.session_cookie import Session
from app.config import AppSettings
from app.page.attempts import Attempts
from app.page.rendering import render_page
from app.page.visitor import THEME_COOKIE, THEMES, form, is_logged_in, may_audit
from app.request_json import reject_nul_in
from slotkeeper.clock import now_ms
from slotkeeper.registry.tenants import LOCAL_TENANT, RevokedSessions, hash_key
from tasks.config import TaskSettings
from tasks.security.keyring import session_keys
from tasks.services import database

V = TypeVar("V", bound=Callable[..., Any])

LOG_IN = "/page/log-in"
_ATTEMPTS = "slotkeeper_attempts"
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_MOST_FIELDS, _MOST_FORM_BYTES = 2000, 256 << 10

page = Blueprint("page", "app.page")


class PageError(Exception):
    """What a person may not do, or has to do first."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.title, self.detail = status, title, detail


def page_view(
    rule: str, *, admin: bool = False, audit: bool = False, method: str = "GET", open_to_all: bool = False
) -> Callable[[V], V]:
    """Serve a view of the page there.

    `admin`: only to who may administer; `audit`: to them, and to who may see what others did; `open_to_all`: also
    without a log-in.
    """

    def register(view: V) -> V:
        @wraps(view)
        def guarded(**path: Any) -> Any:
            if not open_to_all and not is_logged_in():
                return redirect(_log_in_before(request), 303)
            if admin and not current_tenant().admin:
                raise PageError(403, "Not allowed", "Log in with the key of a tenant that may administer.")
            if audit and not may_audit():
                raise PageError(403, "Not allowed", "Log in with the key of a tenant that may audit.")
            return view(**path)

        page.add_url_rule(rule, view.__name__, page_access(guarded), methods=[method])
        return view

    return register


def _log_in_before(wanted: Request) -> str:
    """Return the address of the log-in, which leads on to the wanted screen."""
    path = wanted.full_path.rstrip("?")
    return LOG_IN if wanted.method != "GET" or path == "/" else f"{LOG_IN}?next={quote(path)}"


def register(app: Flask) -> None:
    app.register_blueprint(page)


def equip(app: Flask) -> None:
    app.extensions[_ATTEMPTS] = Attempts()


# -- each request ------------------------------------------------------------------------------------------


@page.before_request
def _begin_request() -> None:
    request.max_form_parts, request.max_content_length = _MOST_FIELDS, _MOST_FORM_BYTES
    visit = session_cookie.decode_session(request.cookies.get(_cookie(), ""), session_keys())
    if visit is not None and visit.key_hash and RevokedSessions(database()).is_revoked(visit.id):
        visit = None
    g.visit = visit or session_cookie.new_session("", _settings().session_s)
    g.is_new_visit = visit is None
    _identify(g.visit)
    if request.method not in _SAFE:
        _refuse_foreign_forms(g.visit)
        for field, texts in form().lists():
            reject_nul_in(field, *texts)


def _identify(visit: Session) -> None:
    keys = access.keys()
    whose = LOCAL_TENANT if keys is None else keys.of_hashed(visit.key_hash) if visit.key_hash else None
    if whose is not None:
        set_tenant(whose)


def _refuse_foreign_forms(visit: Session) -> None:
    """Refuse a form without this session's token, which other sites cannot know."""
    if g.is_new_visit or not session_cookie.is_valid_form_token(form().get("token", ""), visit, session_keys()):
        detail = "This form is too old or from another session.  Go back, reload the page, and try again."
        raise PageError(403, "Form not valid", detail)


@page.after_request
def _finish_response(response: Response) -> Response:
    if g.get("is_new_visit") and request.endpoint != "page.asset":
        _set_session_cookie(response, g.visit)
    if request.endpoint != "page.asset":
        response.headers["Cache-Control"] = "no-store"
    response.headers["Referrer-Policy"] = "same-origin"
    return response


def _set_session_cookie(response: Response, visit: Session) -> None:
    value, lasts_s = session_cookie.encode_session(visit, next(session_keys())), _settings().session_s
    _set_cookie(response, _cookie(), value, lasts_s)


def _set_cookie(response: Response, name: str, value: str, lasts_s: int) -> None:
    secure = TaskSettings().callback_base.startswith("https://")
    response.set_cookie(name, value, lasts_s, httponly=True, samesite="Strict", secure=secure, path="/")


def _cookie() -> str:
    return session_cookie.cookie_name(_settings().port)


def _settings() -> AppSettings:
    found: AppSettings = current_app.extensions["slotkeeper_settings"]
    return found


# -- log-in, log-out, light and dark -----------------------------------------------------------------------


@page_view(LOG_IN, open_to_all=True)
def log_in_form() -> Any:
    next_path = own_path(request.args.get("next", "/"))
    if is_logged_in():
        return redirect(next_path, 303)
    return render_page("log_in.html", wrong="", next=next_path)


@page_view(LOG_IN, method="POST", open_to_all=True)
def log_in() -> Any:
    keys = access.keys()
    if keys is None:
        return redirect("/", 303)
    hashed = hash_key(form().get("key", "").strip())
    if keys.of_hashed(hashed) is None:
        return _refuse_key()
    g.visit, g.is_new_visit = session_cookie.new_session(hashed, _settings().session_s), True
    return redirect(own_path(form().get("next", "/")), 303)


def _refuse_key() -> Any:
    attempts: Attempts = current_app.extensions[_ATTEMPTS]
    next_path = own_path(form().get("next", "/"))
    if wait_s := attempts.wrong(request.environ.get("REMOTE_ADDR", "")):
        wrong = "No tenant has this key, and there were too many wrong keys; try again in a minute."
        return render_page("log_in.html", 429, wrong=wrong, next=next_path), 429, {"Retry-After": str(int(wait_s) + 1)}
    return render_page("log_in.html", 401, wrong="No tenant has this key.", next=next_path), 401


@page_view("/page/log-out", method="POST", open_to_all=True)
def log_out() -> Any:
    """End the session, also for copies of its cookie.  Raises DatabaseUnavailable: the session goes on."""
    if g.visit.key_hash:
        RevokedSessions(database()).revoke(g.visit.id, g.visit.until_ms, now_ms())
    g.visit, g.is_new_visit = session_cookie.new_session("", _settings().session_s), True
    return redirect(LOG_IN, 303)


@page_view("/page/theme", method="POST", open_to_all=True)
def choose_theme() -> Any:
    chosen = form().get("theme", "")
    response = redirect(own_path(form().get("back", "/")), 303)
    if chosen in THEMES:
        _set_cookie(response, THEME_COOKIE, chosen, 366 * 86_400)  # type: ignore[arg-type]
    return response


def own_path(path: str) -> str:
    """A place on this page to go on to, and no other site's."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_own else "/"


# -- what goes wrong ---------------------------------------------------------------------------------------


@page.errorhandler(Exception)
def _handle_error(error: Exception) -> Any:
    """As the API would answer it, but for people."""
    if "visit" not in g:  # It was refused before anybody asked who it is.
        g.visit, g.is_new_visit = session_cookie.new_session("", _settings().session_s), False
    if isinstance(error, PageError):
        return _error_page(error.status, error.title, error.detail)
    if isinstance(error, HTTPException) and (error.code is None or error.code < 400):
        return error
    return _error_page(*problem_of(error))


def problem_of(error: Exception) -> tuple[int, str, str]:
    """An error in the API's words: (status, title, detail)."""
    problem = problems.problem_for(error)
    assert isinstance(problem, Response), "only what is no error leaves otherwise"
    body = problem.get_json()
    return problem.status_code, body["title"], body["detail"]


def _error_page(status: int, title: str, detail: str) -> Any:
    return render_page("error.html", status, status=status, title=title, detail=detail), status
