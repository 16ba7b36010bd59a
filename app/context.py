"""The objects that the views of an application share."""

from dataclasses import dataclass
from typing import cast

from flask import Flask, current_app

from app.config import AppSettings
from app.readiness import Readiness
from routing.dispatch.dispatcher import Dispatcher

_EXTENSION = "slotkeeper"


@dataclass(frozen=True, slots=True)
class Context:
    """The dispatcher, the settings, and the readiness of the process."""

    dispatcher: Dispatcher
    settings: AppSettings
    readiness: Readiness


def set_context(app: Flask, context: Context) -> None:
    app.extensions[_EXTENSION] = context


def context_of(app: Flask) -> Context:
    """Return the context of an application."""
    return cast(Context, app.extensions[_EXTENSION])


def context() -> Context:
    """Return the context of the application of this request."""
    return context_of(current_app)


def dispatcher() -> Dispatcher:
    return context().dispatcher
