"""A time limit for a whole request, which all its steps share.

Each step that waits for the database or Redis has a separate limit.  Without a common limit they would add up.
"""

import time
from collections.abc import Callable
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


def register(app: Flask) -> None:
    """Apply the time limit to the requests of `app`."""
    app.before_request(_begin)
    app.teardown_request(_end)


def _begin() -> None:
    view = current_app.view_functions.get(request.endpoint or "")
    if request.method in ("GET", "HEAD") or getattr(view, "answered_in_time", False):
        deadline = request.environ.get(ANSWER_UNTIL)
        seconds = database().limits.request_s if deadline is None else deadline - time.monotonic()
        g.time_limit = time_limit(seconds)
        g.time_limit.__enter__()


def _end(_: BaseException | None) -> None:
    limit = g.pop("time_limit", None)
    if limit is not None:
        limit.__exit__()
