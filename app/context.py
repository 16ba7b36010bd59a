"""What views of one process share: made once, when the application is."""

from dataclasses import dataclass
from typing import cast

from flask import Flask, Request, current_app, request

from app.config import AppSettings
from app.readiness import Readiness
from routing.dispatch.dispatcher import Dispatcher

_EXTENSION = "slotkeeper"


@dataclass(frozen=True, slots=True)
class Context:
    """The use cases, and what the door keeps beside them."""

    dispatcher: Dispatcher
    settings: AppSettings
    readiness: Readiness


def set_context(app_extensions: dict[str, object], context: Context) -> None:
    app_extensions[_EXTENSION] = context


def context() -> Context:
    """Of the application that answers this request."""
    return cast(Context, application().extensions[_EXTENSION])


def application() -> Flask:
    """The application itself: through Flask's proxy each look at it would find it anew, and its attribute by name."""
    return cast(Flask, current_app._get_current_object())  # type: ignore[attr-defined]


def asked() -> Request:
    """The request itself, for the same reason."""
    return cast(Request, request._get_current_object())  # type: ignore[attr-defined]


def dispatcher() -> Dispatcher:
    return context().dispatcher
