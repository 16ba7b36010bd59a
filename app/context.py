"""The objects that the views of an application share."""

from dataclasses import dataclass
from typing import cast

from flask import current_app

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


def set_context(app_extensions: dict[str, object], context: Context) -> None:
    app_extensions[_EXTENSION] = context


def context() -> Context:
    """Return the context of the application of this request."""
    return cast(Context, current_app.extensions[_EXTENSION])


def dispatcher() -> Dispatcher:
    return context().dispatcher
