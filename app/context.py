"""The objects that the views of an application share."""

from dataclasses import dataclass
from typing import cast

from flask import Flask, Request, current_app, request

from app.config import AppSettings
from app.readiness import Readiness
from routing.dispatch.dispatcher import Dispatcher

_EXTENSION = "slotkeeper"


@dataclass(frozen=True, slots=True)
class Context:
    """The use cases, the settings, and the readiness of the process."""

    dispatcher: Dispatcher
    settings: AppSettings
    readiness: Readiness


def set_context(app_extensions: dict[str, object], context: Context) -> None:
    app_extensions[_EXTENSION] = context


def context() -> Context:
    """Return the context of the application of this request."""
    return cast(Context, application().extensions[_EXTENSION])


def application() -> Flask:
    """Return the application itself.  Flask's proxy would look it up again at each access to an attribute."""
    return cast(Flask, current_app._get_current_object())  # type: ignore[attr-defined]


def current_request() -> Request:
    """Return the request itself, for the same reason."""
    return cast(Request, request._get_current_object())  # type: ignore[attr-defined]


def dispatcher() -> Dispatcher:
    return context().dispatcher
