"""Tokens in what is sent for a job: the steps of a canvas belong to the tenant of the job before them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery.signals import before_task_publish

from slotkeeper.clock import now_ms
from slotkeeper.process import singleton
from tasks.config import TaskSettings
from tasks.security.celery_tokens import TokenSubject, make_token

TOKEN_HEADER = "slotkeeper_token"
_STEP_TOKEN_MS = 86_400_000  # as long as the result backend keeps results

_acting: ContextVar[TokenSubject | None] = ContextVar("slotkeeper_acting", default=None)


@singleton
def requires_keys() -> bool:
    """Return whether keys are required.  Read once: to read the settings takes as long as to store a job."""
    return TaskSettings().require_keys


@contextmanager
def acting_for(subject: TokenSubject) -> Iterator[None]:
    """What is sent meanwhile is sent for this tenant with this key: calls of `infer`, and messages to any task."""
    token = _acting.set(subject)
    try:
        yield
    finally:
        _acting.reset(token)


@before_task_publish.connect
def _add_token(headers: dict[str, Any] | None = None, **_: object) -> None:
    subject = _acting.get()
    if subject is not None and headers is not None and requires_keys():
        headers.setdefault(TOKEN_HEADER, make_token(subject, now_ms() + _STEP_TOKEN_MS))


def current_subject() -> TokenSubject | None:
    """Return the tenant and key for which messages are sent now; None: they are not sent for a job."""
    return _acting.get()
