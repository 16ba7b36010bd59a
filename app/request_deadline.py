"""The time within which a request is answered, whatever stalls: all its steps share it.

Each step that waits for the database or Redis has a limit of its own; without a common one they would add up.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from flask import Flask, g, request
from flask import current_app as application

from slotkeeper.db.time_limits import time_limit
from tasks.services import database

ANSWER_UNTIL = "slotkeeper.answer_until"
"""In the WSGI environment: the time.monotonic() until which the client is to have its answer."""

View = TypeVar("View", bound=Callable[..., Any])


def answered_in_time(view: View) -> View:
    """Mark a view that writes and is limited, as all views are that only read."""
    view.answered_in_time = True  # type: ignore[attr-defined]
    return view


def register(app: Flask) -> None:
    app.before_request(_begin)
    app.teardown_request(_end)


def _begin() -> None:
    view = application.view_functions.get(request.endpoint or "")
    if request.method in ("GET", "HEAD") or getattr(view, "answered_in_time", False):
        until = request.environ.get(ANSWER_UNTIL)
        seconds = database().limits.request_s if until is None else until - time.monotonic()
        g.time_limit = time_limit(seconds)
        g.time_limit.__enter__()


def _end(_: BaseException | None) -> None:
    limit = g.pop("time_limit", None)
    if limit is not None:
        limit.__exit__()
