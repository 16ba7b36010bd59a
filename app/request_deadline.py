"""A time limit for a whole request, which all its steps share.

Each step that waits for the database or Redis has a separate limit.  Without a common limit they would add up.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flask import Flask, current_app, g, request

from slotkeeper.db.time_limits import time_limit
from tasks.services import database

ANSWER_UNTIL = "slotkeeper.answer_until"
"""In the WSGI environment: the time.monotonic() before which the response must be sent."""

View = TypeVar("View", bound=Callable[..., Any])


def answered_in_time(view: View) -> View:
    """Mark a view that writes and answers within the time limit, as requests with GET or HEAD always do.

    Not those that change many rows or the catalog: they would end half-way.
    """
    view.answered_in_time = True  # type: ignore[attr-defined]
    return view


def view_time_limit(environ: Mapping[str, Any]) -> time_limit:
    """Return the limit for what is left of a request's time."""
    deadline = environ.get(ANSWER_UNTIL)
    return time_limit(database().limits.request_s if deadline is None else deadline - time.monotonic())


def register(app: Flask) -> None:
    """Apply the time limit to the requests of `app`."""
    app.before_request(_begin)
    app.teardown_request(_end)


def _begin() -> None:
    view = current_app.view_functions.get(request.endpoint or "")
    if request.method in ("GET", "HEAD") or getattr(view, "answered_in_time", False):
        g.time_limit = view_time_limit(request.environ)
        g.time_limit.__enter__()


def _end(_: BaseException | None) -> None:
    limit = g.pop("time_limit", None)
    if limit is not None:
        limit.__exit__()
